"""The rules of docs/style.md that a program can check: direction of imports, third-party packages,
sizes, docstrings, no hidden configuration, packaging.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOPS = ("plugins", "builders", "runtime", "calib", "serving")
LAYERS = (
    ("core",),
    ("config",),
    ("package",),
    ("plugins",),
    ("builders", "runtime"),
    ("serving",),
    ("calib",),
    ("cli",),
)
"""From the bottom up. A layer imports those below it only."""
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# Third-party package -> the files that may import it.
MAY = {
    "numpy": ["*"],
    "ml_dtypes": ["*"],
    "onnx": [
        "builders/*",
        "calib/check/ort_trace.py",
        "plugins/onnx_builder.py",
        "plugins/*/onnx_body.py",
        "tests/*",
    ],
    "cuda": ["plugins/cuda/*", "runtime/doctor/probe.py", "tests/*"],
    "tensorrt": [
        "builders/tensorrt/*",
        "plugins/tensorrt/*",
        "runtime/engines/tensorrt/*",
        "runtime/doctor/*",
        "tests/*",
    ],
    "tensorrt_bindings": ["tests/*"],
    "onnxruntime": ["runtime/engines/onnxruntime_import.py"],
    "tokenizers": ["runtime/text/tokenizer.py", "calib/nano/*", "tests/*"],
    "jinja2": ["runtime/text/chat_template.py", "calib/nano/*", "tests/*"],
    "llguidance": ["runtime/grammar/*", "tests/*"],
    "rich": [
        "thor_dflash/core/progress.py",
        "thor_dflash/cli/commands/*",
        "calib/demo*",
        "tests/*",
    ],
    "zmq": ["serving/*", "tests/*"],
    "msgspec": ["serving/*", "thor_dflash/cli/commands/plan.py", "tests/*"],
    "jsonschema_rs": ["serving/planner/schema_validator.py"],
    "starlette": ["serving/gateway/app.py", "tests/*"],
    "uvicorn": ["thor_dflash/cli/commands/gateway.py", "tests/*"],
    "prometheus_client": ["serving/gateway/metrics.py"],
    "openai": ["tests/*"],
    "tomli_w": ["thor_dflash/package/manifest.py"],
    "safetensors": ["calib/nano/*", "tests/*"],
    "torch": ["calib/nano/*"],
    "transformers": ["calib/nano/*"],
    "pytest": ["tests/*"],
    "hypothesis": ["tests/*"],
}
# Nothing is configured from the environment, and no object is probed or changed by name.
ENVIRONMENT = {
    "serving/server/systemd.py": "systemd names its socket to a service there and nowhere else",
    "runtime/engines/onnxruntime_import.py": "ONNX Runtime looks there for leave to send telemetry",
}
"""Files that may use environment variables -> why."""
BANNED = {
    "environ", "getenv", "putenv", "hasattr", "setattr", "delattr",
    "__getattr__", "__getattribute__", "__setattr__",
}  # fmt: skip


PURE = {"all", "bool", "isinstance", "is_absolute", "len", "of", "tuple", "zip"}
"""Functions and methods that an assertion may call."""


def files(*tops: str) -> list[Path]:
    return [p for top in tops for p in sorted((ROOT / top).rglob("*.py"))]


OWN = ("cli", "config", "core", "package")
HOUSE = [
    ROOT / "thor_dflash" / "__init__.py",
    *files(*(f"thor_dflash/{name}" for name in OWN), *TOPS),
]
TESTS = files("tests")
SHARED = {"support", "stand_ins", "emulator"}
"""Packages that tests share."""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


every_source = pytest.mark.parametrize("path", HOUSE, ids=name)
every_file = pytest.mark.parametrize("path", HOUSE + TESTS, ids=name)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def layer(path: Path) -> str:
    """Returns the name in LAYERS to which a source file belongs."""
    first, *rest = path.relative_to(ROOT).parts
    return rest[0].removesuffix(".py") if first == "thor_dflash" else first


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(path)))


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Returns every module that a file imports, also inside functions; `from a import b` gives a
    and a.b.
    """
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def uses(path: Path) -> set[str]:
    """Returns the third-party packages that a file imports."""
    tops = {module.partition(".")[0] for module in imports(path)}
    return tops - sys.stdlib_module_names - SHARED - {"thor_dflash"}


@every_file
def test_layers_are_imported_through_the_package(path: Path) -> None:
    for module in imports(path):
        top = module.partition(".")[0]
        assert top in SHARED or top not in TOPS, f"say thor_dflash.{module}"


@every_source
def test_imports_go_down(path: Path) -> None:
    here = layer(path)
    if here == "__init__":
        assert not [m for m in imports(path) if m.startswith("thor_dflash.")]
        return
    assert here in LEVEL, f"{here} is no layer"
    for module in imports(path):
        parts = module.split(".")
        there = parts[1] if parts[0] == "thor_dflash" and len(parts) > 1 else here
        if there in LEVEL and there != here:
            assert LEVEL[there] < LEVEL[here], f"{here} imports {module}"


@every_file
def test_packages_from_outside_stay_where_they_belong(path: Path) -> None:
    if fnmatch(name(path), "tests/goldens/*"):
        return  # scripts that make the goldens, run by hand where the reference is installed
    for package in uses(path):
        assert package in MAY, f"{package} is not among the packages of the house"
        assert any(fnmatch(name(path), glob) for glob in MAY[package]), f"{package} is imported"


@every_file
def test_small_files_small_functions(path: Path) -> None:
    assert path.read_text(encoding="utf-8").count("\n") <= 600
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, node.name


@every_file
def test_no_hidden_knobs(path: Path) -> None:
    for node in nodes(path):
        word = ""
        if isinstance(node, ast.Name):
            word = node.id
        elif isinstance(node, ast.Attribute) and node.attr not in ("setattr", "delattr"):
            word = node.attr  # less monkeypatch.setattr and delattr, by which tests replace names
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            word = node.name
        if word == "environ" and name(path) in ENVIRONMENT:
            continue
        assert word not in BANNED, f"line {node.lineno}: {word}"  # type: ignore[attr-defined]


@every_source
def test_what_is_asserted_changes_nothing(path: Path) -> None:
    """`python -O` leaves assertions out, so nothing else may depend on them."""
    for node in nodes(path):
        for part in ast.walk(node.test) if isinstance(node, ast.Assert) else ():
            assert not isinstance(part, ast.NamedExpr), f"line {part.lineno}"
            if isinstance(part, ast.Call):
                called = getattr(part.func, "attr", None) or getattr(part.func, "id", "")
                assert called in PURE, f"line {part.lineno}: {called}"


@every_source
def test_everything_public_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree(path)), "module"
    for node in tree(path).body:
        for part in (node, *(node.body if isinstance(node, ast.ClassDef) else ())):
            kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            if isinstance(part, kinds) and not part.name.startswith("_"):
                private = isinstance(node, ast.ClassDef) and node.name.startswith("_")
                assert private or ast.get_docstring(part), f"line {part.lineno}: {part.name}"


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
    with_torch = {name(p) for p in HOUSE if uses(p) & {"torch", "transformers"}}
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
        assert first.group().lower().replace("_", "-") in pinned, need
