"""The rules of CONTRIBUTING.md that ruff cannot check. Each test lists all offenders."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import thor_dflash

ROOT = Path(__file__).parent.parent
TOPS = ("plugins", "builders", "runtime", "calib", "serving")
OWN = ("cli", "config", "core", "package")
LAYERS = "core|config|package|plugins|builders runtime|serving|calib|cli".split("|")
"""From the bottom up. A layer imports those below it only."""
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split()}

MAY = dict(
    row.split(maxsplit=1)
    for row in """
    numpy *
    ml_dtypes *
    onnx builders/* calib/c*/*.py plugins/onnx_builder.py plugins/*/onnx_body.py tests/*
    cuda plugins/cuda/* runtime/doctor/probe.py tests/*
    tensorrt */tensorrt/* runtime/doctor/* tests/*
    tensorrt_bindings tests/*
    onnxruntime runtime/engines/onnxruntime_import.py
    tokenizers runtime/text/tokenizer.py calib/nano/* tests/*
    jinja2 thor_dflash/cli/report/* runtime/text/template_worker.py calib/nano/* tests/*
    llguidance runtime/grammar/* tests/*
    rich thor_dflash/core/pro* thor_dflash/core/plan* thor_dflash/cli/commands/* calib/demo* tests/*
    zmq serving/* tests/*
    msgspec serving/* thor_dflash/* runtime/text/template_*.py runtime/text/messages.py tests/*
    jsonschema_rs serving/planner/schema_validator.py tests/*
    starlette serving/gateway/* tests/*
    uvicorn serving/gateway/http_server.py tests/*
    shtab thor_dflash/cli/commands/completion.py
    prometheus_client serving/gateway/metrics.py tests/*
    openai tests/*
    yaml thor_dflash/cli/skill_file.py tests/*
    PIL runtime/vision/decoder.py calib/pictured_files.py tests/*
    packaging tests/*
    tomli_w thor_dflash/package/manifest.py
    safetensors builders/checkpoint/shards.py calib/nano/* tests/*
    torch calib/nano/*
    transformers calib/nano/*
    pytest tests/*
    hypothesis tests/*
    """.strip().split("\n")
)
"""Third-party package -> the files that may import it."""
LAZY = {"serving/client/__init__.py": "asyncio is half of a robot's time to import the client"}
"""Packages that import a public name when it is asked for -> why."""
ENVIRONMENT = {
    "serving/server/systemd.py": "systemd names its socket to a service there and nowhere else",
    "runtime/engines/onnxruntime_import.py": "ONNX Runtime looks there for leave to send telemetry",
}
"""Files that may use environment variables -> why."""
BANNED = set(
    "environ getenv putenv hasattr setattr delattr __getattr__ __getattribute__ __setattr__".split()
)
"""Nothing is configured from the environment, and no object is probed or changed by name."""
PURE = {"all", "bool", "isinstance", "is_absolute", "len", "of", "tuple", "zip"}
"""Functions and methods that an assertion may call."""
TWICE = {"Place"}
"""Class names that are defined in several files. The list may only shrink."""
WORDS = re.compile(
    r"(?<![a-z])(rooms?|roomy|roomier|floors?(?!f?\()|floored|flooring|letters?|lettered|desks?"
    r"|shelf|shelves|told|said)(?![a-z])",
    re.IGNORECASE,
)
"""Words of the house's first design, where the field has words of its own."""
OBJECTS = re.compile(r"\b(on|from|off) the (top |upper )?shelf\b|\"shelf\"|\"Floor\"")
"""What a robot says of its world."""
SPOKEN = """
    models/* docs/examples/* docs/robot.md calib/planbench/* tests/calib/planbench/* tests/goldens/*
    calib/data/* tests/test_house.py
""".split()
"""Files in which the words may stand: rooms of a house, corpora, recorded data, this list."""
SHARED = {"support", "stand_ins", "emulator", "gpu"}
"""Packages that tests share."""


def files(*tops: str) -> list[Path]:
    return [p for top in tops for p in sorted((ROOT / top).rglob("*.py"))]


ROS = files("serving/ros2")
"""Packages of ROS 2, with ROS's layout; its Python runs them, with packages of its own."""
HOUSE = [
    ROOT / "thor_dflash" / "__init__.py",
    *(p for p in files(*(f"thor_dflash/{name}" for name in OWN), *TOPS) if p not in ROS),
]
TESTS = files("tests")
ROS_SCRIPTS = ("tests/ros2/robot.py", "tests/ros2/bare_server.py")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module(path: Path) -> str:
    dotted = name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return dotted if dotted.startswith("thor_dflash") else f"thor_dflash.{dotted}"


MODULES = {module(path): path for path in HOUSE}


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Returns all nodes of a file, the module itself first."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Returns every module that a file imports, also inside functions."""
    found: list[str] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [one if one in MODULES else node.module or "" for one in inner]
    return tuple(found)


def packages(path: Path) -> set[str]:
    """Returns the third-party packages that a file imports."""
    tops = {module.partition(".")[0] for module in imports(path)}
    return tops - sys.stdlib_module_names - SHARED - {"thor_dflash"}


def layer(module: str) -> str:
    """Returns the name in LAYERS to which a module belongs."""
    return module.split(".")[1] if "." in module else ""


def folder(module: str) -> str:
    """Returns a module's folder below its layer; a module beside such folders counts by itself."""
    return ".".join(module.split(".")[:3])


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """Returns a circle of a graph, empty if there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as found:
        return list(found.args[1])
    return []


def test_imports_go_down() -> None:
    wrong = []
    for here, path in MODULES.items():
        if layer(here):
            assert layer(here) in LEVEL, f"{here} is in no layer"
        for there in filter(MODULES.get, imports(path)):
            if (
                layer(there) not in ("", layer(here))
                and LEVEL.get(layer(here), -1) <= LEVEL[layer(there)]
            ):
                wrong.append(f"{here} imports {there}")
    assert not wrong


def test_no_import_makes_a_circle() -> None:
    by_module: defaultdict[str, set[str]] = defaultdict(set)
    by_folder: defaultdict[str, set[str]] = defaultdict(set)
    for here, path in MODULES.items():
        for there in filter(MODULES.get, imports(path)):
            by_module[here].add(there)
            if folder(here) != folder(there):
                by_folder[folder(here)].add(folder(there))
    # An estimate has a type of the loop. Goes with the move of that type.
    by_folder["thor_dflash.runtime.engines"].discard("thor_dflash.runtime.decoding")
    assert not circle(by_module)
    assert not circle(by_folder)


def test_a_class_has_a_name_of_its_own() -> None:
    where: defaultdict[str, list[str]] = defaultdict(list)
    for path in HOUSE:
        for node in ast.iter_child_nodes(nodes(path)[0]):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(name(path))
    twice = {one: paths for one, paths in where.items() if len(paths) > 1}
    assert not {one: twice[one] for one in twice.keys() - TWICE}
    assert not TWICE - twice.keys(), "no longer defined twice: take them from the list"


def test_words_are_those_of_the_field() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split("\n")  # nothing, in a tree without git
    wrong = []
    for file in listed:
        path = ROOT / file
        if any(fnmatch(file, glob) for glob in SPOKEN) or not path.is_file():
            continue
        text = f"{file}\n{path.read_bytes().decode(errors='replace')}"
        words = re.sub(r"([a-z])([A-Z])", r"\1 \2", OBJECTS.sub("", text))
        for found in WORDS.finditer(words):
            wrong.append(f"{file}:{words.count(chr(10), 0, found.start())}: {found[0]}")
    assert not wrong, "\n".join(wrong)


def test_packages_from_outside_stay_where_they_belong() -> None:
    wrong = [
        f"{name(path)}: {package}"
        for path in HOUSE + TESTS
        # Scripts run by hand, and by the Python of ROS.
        if not fnmatch(name(path), "tests/goldens/*") and name(path) not in ROS_SCRIPTS
        for package in packages(path)
        if not any(fnmatch(name(path), glob) for glob in MAY.get(package, "").split())
    ]
    assert not wrong


def test_small_files_small_functions() -> None:
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    wrong = [p for p in HOUSE + TESTS + ROS if p.read_text(encoding="utf-8").count("\n") > 600]
    wrong += [
        f"{name(path)}: {node.name}"
        for path in HOUSE + TESTS + ROS
        for node in nodes(path)
        if isinstance(node, functions) and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert not wrong


def knobs(path: Path) -> Iterator[str]:
    for node in nodes(path):
        word = ""
        if isinstance(node, ast.Name):
            word = node.id
        elif isinstance(node, ast.Attribute) and node.attr not in ("setattr", "delattr"):
            word = node.attr  # less monkeypatch.setattr and delattr, by which tests replace names
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            word = node.name
        allowed = {"environ": ENVIRONMENT, "__getattr__": LAZY}.get(word, {})
        if word in BANNED and name(path) not in allowed:
            yield f"{name(path)}: {word}"


def test_no_hidden_knobs() -> None:
    assert not [one for path in HOUSE + TESTS + ROS for one in knobs(path)]


def test_what_is_asserted_changes_nothing() -> None:
    """`python -O` leaves assertions out, so nothing else may depend on them."""
    wrong = []
    for path in HOUSE:
        for node in nodes(path):
            for part in ast.walk(node.test) if isinstance(node, ast.Assert) else ():
                call = part.func if isinstance(part, ast.Call) else None
                called = getattr(call, "attr", None) or getattr(call, "id", "")
                if isinstance(part, ast.NamedExpr) or (call and called not in PURE):
                    wrong.append(f"{name(path)}:{node.lineno}")  # type: ignore[attr-defined]
    assert not wrong


def test_every_layer_is_linked() -> None:
    for top in TOPS:
        link = ROOT / "thor_dflash" / top
        assert link.is_symlink()
        assert link.readlink() == Path("..", top)
        assert (link / "__init__.py").is_file()


def test_every_folder_of_python_is_a_package() -> None:
    # A folder without __init__.py works from the checkout and is missing from the wheel.
    for path in HOUSE:
        assert (path.parent / "__init__.py").is_file(), path.parent


def test_the_checkers_see_all_but_torch() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert {f"thor_dflash/{top}" for top in TOPS} < set(settings["pyright"]["include"])
    with_torch = {name(p) for p in HOUSE if packages(p) & {"torch", "transformers"}}
    unseen = {glob.removeprefix("**/") for glob in settings["pyright"]["ignore"]}
    assert with_torch == unseen
    skipped = [row["module"] for row in settings["mypy"]["overrides"] if row.get("ignore_errors")]
    modules = {"thor_dflash." + file.removesuffix(".py").replace("/", ".") for file in with_torch}
    assert {module for row in skipped for module in row} == modules


def test_every_dependency_is_pinned_by_version_alone() -> None:
    rows = [
        row
        for row in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if not row.startswith("#")
    ]
    for row in rows:
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", row), row
    pinned = {row.partition("==")[0].lower().replace("_", "-") for row in rows}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = sum(project["optional-dependencies"].values(), project["dependencies"])
    for need in wanted:
        first = re.match(r"[\w-]+", need)
        assert first
        distribution = first.group().lower().replace("_", "-")
        assert distribution in {*pinned, project["name"]}, need


def test_every_file_has_the_version_that_the_changelog_names() -> None:
    heading = re.search(r"^## ([\d.]+), (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert heading is not None
    number, date = heading.groups()
    assert thor_dflash.__version__ == (f"{number}.dev0" if date == "unreleased" else number)
    ros = ROOT / "serving/ros2"
    for path in (*ros.glob("*/package.xml"), *ros.glob("*/setup.py")):
        found = re.search(r"(?:<version>|    version=\")([\d.]+)", path.read_text())
        assert found is not None
        assert found.group(1) == number, path  # ROS has no pre-releases


def test_a_planted_mistake_has_its_place() -> None:
    """Else `make mutations`, which nobody runs with every change, has nothing to plant."""
    entries = tomllib.loads((ROOT / "tests/mutations.toml").read_text(encoding="utf-8"))["mutation"]
    assert not [
        entry["law"]
        for entry in entries
        if (ROOT / entry["file"]).read_text(encoding="utf-8").count(entry["old"]) != 1
    ]
