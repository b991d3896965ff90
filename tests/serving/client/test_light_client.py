"""What `pip install thor-dflash` alone can do: the clients, in a directory that holds the checkout
and the base dependencies, as this interpreter has them, and nothing else.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.serving_fixtures import House

ROOT = Path(__file__).parents[3]
MAX_BYTES = 40_000_000
START = (
    "import sys; sys.path.extend([{path!r}, {root!r}]); sys.dont_write_bytecode = True; "
    "from thor_dflash.cli.main import main; sys.exit(main(sys.argv[1:]))"
)
IMPORT = (
    "import sys; sys.path.extend([{path!r}, {root!r}]); sys.dont_write_bytecode = True\n"
    "import thor_dflash.serving.client\n"
    "print(*sorted({{name.partition('.')[0] for name in sys.modules}} - sys.stdlib_module_names))\n"
    "print('asyncio' in sys.modules, 'thor_dflash.config' in sys.modules)"
)


def distributions() -> Iterator[importlib.metadata.Distribution]:
    """The base dependencies and theirs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting, seen = [*project["dependencies"]], set()
    while waiting:
        need = Requirement(waiting.pop())
        if need.name in seen or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        seen.add(need.name)
        yield (found := importlib.metadata.distribution(need.name))
        waiting += found.requires or []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with links to the base dependencies."""
    directory = tmp_path_factory.mktemp("site")
    for found in distributions():
        for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            link, there = directory / top, Path(str(found.locate_file(top)))
            if there.exists() and not link.exists():
                link.symlink_to(there)
    return directory


def python(site: Path, code: str, *args: str) -> subprocess.CompletedProcess[str]:
    script = code.format(path=str(site), root=str(ROOT))
    command = [sys.executable, "-I", "-S", "-c", script, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_python_client_needs_pyzmq_and_msgspec_alone(site: Path) -> None:
    done = python(site, IMPORT)
    assert done.returncode == 0, done.stderr
    packages, slow = done.stdout.splitlines()
    assert slow == "False False", "a quarter of the time"
    loaded = {word for word in packages.split() if "cython" not in word.lower()}
    assert loaded == {"__main__", "msgspec", "thor_dflash", "zmq"}


def test_the_command_line_is_a_client_and_says_what_the_rest_needs(
    site: Path, house: House
) -> None:
    endpoint = house.mock().endpoints[0]
    done = python(site, START, "plan", "Bring it.", "--server", endpoint)
    assert done.returncode == 0, done.stderr
    assert '"goal": "cup on table"' in done.stdout
    for command, extra in (
        (["serve", "--mock"], "serve"), (["gateway"], "http"), (["doctor"], "ort"),
        (["build", "--target", "t", "--out", "o"], "build"),
    ):  # fmt: skip
        done = python(site, START, *command)
        assert done.returncode == 2, done.stderr
        assert f"pip install 'thor-dflash[{extra}]'" in done.stderr.splitlines()[-1]


def test_the_client_is_small() -> None:
    """All that an installation of the base dependencies and of this package writes."""
    files = {
        Path(str(found.locate_file(file)))
        for found in distributions()
        for file in found.files or ()
    }
    code = ("*.py", "*.cu", "*.cuh", "*.hpp", "*.json", "*.jinja")
    tops = ("thor_dflash", "plugins", "runtime", "builders", "serving", "calib")
    files |= {path for top in tops for glob in code for path in (ROOT / top).rglob(glob)}
    assert sum(path.stat().st_size for path in files if path.is_file()) < MAX_BYTES
