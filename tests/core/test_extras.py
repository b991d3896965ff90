"""Optional dependencies: a command that needs a missing package names it and the extra that
installs it.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.constrained_model import package

from thor_dflash.core.errors import ConfigError
from thor_dflash.core.extras import ENGINE, extra

SCRIPT = (
    "import sys; sys.modules[sys.argv[1]] = None\n"
    "from thor_dflash.cli.main import main\n"
    "sys.exit(main(sys.argv[2:]))"
)
"""Runs the command line where importing the package argv[1] fails."""


@pytest.mark.parametrize(
    ("missing", "name", "args"),
    [
        ("onnx", "build", "build --target t --out o"),
        ("onnxruntime", "ort", "generate --prompt hi --max-tokens 8 --package"),
        ("jsonschema_rs", "serve", "serve --mock"),
        ("tokenizers", "ort", "generate --prompt hi --max-tokens 8 --package"),
        ("ml_dtypes", "ort", "doctor"),
        ("jinja2", "ort", "replay t --url http://127.0.0.1:9/v1 --html o.html"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, missing: str, name: str, args: str
) -> None:
    whole = [*args.split(), *[str(package())] * args.endswith("--package")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, missing, *whole],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    message = f"thor-dflash: {missing} must be installed: pip install 'thor-dflash[{name}]'"
    assert done.returncode == 2, done.stderr
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", ["replay", "bfcl"])
def test_measuring_a_server_needs_no_engine(tmp_path: Path, command: str) -> None:
    script = f"import sys; sys.modules.update(dict.fromkeys({ENGINE}))\n{SCRIPT}"
    done = subprocess.run(
        [sys.executable, "-c", script, "onnx", command, "no.jsonl", "--url", "http://127.0.0.1:9/v1"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "no.jsonl must be readable" in done.stderr


def test_the_modules_of_engines_are_those_of_the_extra() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    needs = tomllib.loads(text)["project"]["optional-dependencies"]["engine"]
    assert {re.split("[><=]", need)[0].replace("-", "_") for need in needs} == {*ENGINE}


def test_a_session_without_an_engine_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "from thor_dflash.core.errors import ConfigError\n"
        "try: import thor_dflash.runtime.session\n"
        "except ConfigError as e: print(e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("ml_dtypes must be installed: pip install 'thor-dflash[ort]'")


def test_a_module_of_ours_that_is_missing_is_a_fault_and_no_extra() -> None:
    with pytest.raises(ModuleNotFoundError), extra("serve"):
        importlib.import_module("thor_dflash.serving.no_such")
    with pytest.raises(ImportError, match="cannot import name"), extra("serve"):
        from thor_dflash.serving import no_such  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(ConfigError, match="^no_such must be installed"), extra("serve"):
        importlib.import_module("no_such")
