"""Our code, type-checked against TensorRT's own bindings, of the versions of a Thor and of the
newest that is supported; and the recorder, compared with them member by member.

This shows that every call exists, not that it does what we expect.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from enum import IntEnum
from functools import cache
from pathlib import Path

import pytest
from stand_ins import trt_recorder as recorder
from stand_ins import trt_stubs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PACKAGES = (
    "thor_dflash.builders.tensorrt",
    "thor_dflash.plugins.tensorrt",
    "thor_dflash.runtime.engines.tensorrt",
)
CONFIG = """
[mypy]
strict = true
mypy_path = {typings}:{root}
follow_imports = silent
cache_dir = {cache}
[mypy-tensorrt.*]
ignore_errors = true
[mypy-cuda.*,onnxruntime.*]
ignore_missing_imports = true
"""
WRONG = """
import tensorrt as trt

def build(builder: trt.Builder, network: trt.INetworkDefinition) -> bytes:
    config = builder.create_builder_config()
    config.set_flag(trt.BuilderFlag.FP61)  # no such flag
    network.add_input("x", "float", (1, 2))  # a word for a type
    network.add_softplus(network.get_input(0))  # no such method
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE)  # an argument missing
    builder.build_serialized_network_to_stream(network, config, open("x", "wb"))  # no writer
    profile = builder.create_optimization_profile()
    profile.set_shape("x", (1,), (2,), "3")  # a word for a shape
    return builder.build_serialized_network(network, config)  # no bytes
"""
TOO_NEW = """
import tensorrt as trt
print(trt.OnnxParserFlag.ENABLE_PLUGIN_OVERRIDE)
"""
REMOVED = """
import tensorrt as trt
print(trt.BuilderFlag.FP16)
"""
OLDEST, *_, NEWEST = trt_stubs.VERSIONS


@pytest.fixture(scope="session")
def typings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Version -> directory of its typing stubs."""
    return {
        version: trt_stubs.write_stubs(version, tmp_path_factory.mktemp(version))
        for version in trt_stubs.VERSIONS
    }


def mypy(typings: Path, *what: str) -> list[str]:
    """Returns mypy's errors, one line each."""
    config = typings.parent / "mypy.ini"
    # One cache for all versions: mypy checks again whatever depends on stubs that changed.
    cache = typings.parents[1] / "cache"
    config.write_text(CONFIG.format(typings=typings, root=ROOT, cache=cache))
    command = [sys.executable, "-m", "mypy", f"--config-file={config}", *what]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    return [line for line in run.stdout.splitlines() if ": error:" in line]


@pytest.mark.parametrize("version", trt_stubs.VERSIONS)
def test_our_code_uses_only_what_this_version_has(typings: dict[str, Path], version: str) -> None:
    assert not mypy(typings[version], *(f"-p{name}" for name in PACKAGES))


@pytest.mark.parametrize("version", trt_stubs.VERSIONS)
def test_wrong_calls_are_found_each_on_its_line(
    typings: dict[str, Path], version: str, tmp_path: Path
) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    found = {int(line.split(":")[1]) for line in mypy(typings[version], str(file))}
    assert found == {i for i, line in enumerate(WRONG.splitlines(), 1) if "#" in line}


def test_what_is_too_new_or_gone_is_found(typings: dict[str, Path], tmp_path: Path) -> None:
    new, old = tmp_path / "new.py", tmp_path / "old.py"
    new.write_text(TOO_NEW)
    old.write_text(REMOVED)
    assert [len(mypy(typings[v], str(new))) for v in (OLDEST, NEWEST)] == [1, 0]
    assert [len(mypy(typings[v], str(old))) for v in (OLDEST, NEWEST)] == [0, 1]


# ---- the recorder has no more than TensorRT ----------------------------------------------------

OWN = {
    "IDimensionExpr": {"value"},
    "ILayer": {"inputs", "outputs", "kind", "plugin", "fields"},
    "INetworkDefinition": {
        *("inputs", "outputs", "layers", "flags"),
        *("initializers", "beginnings", "declared"),
    },
    "IPluginRegistry": {"creators"},
    "IOptimizationProfile": {"shapes"},
    "IBuilderConfig": {"pools", "profiles", "cache", "ignore_mismatch"},
    "ITimingCache": {"data"},
}
"""Class -> members that the recorder adds for the tests; TensorRT does not have them."""


@cache
def members(typings: Path) -> dict[str, dict[str, list[list[str]]]]:
    """Returns class -> member -> parameters of each overload. Members of bases are included."""
    tree = ast.parse((typings / "tensorrt" / "__init__.pyi").read_text())
    classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}

    def of(node: ast.ClassDef) -> dict[str, list[list[str]]]:
        found: dict[str, list[list[str]]] = {}
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in classes:
                found |= of(classes[base.id])
        for part in node.body:
            if isinstance(part, ast.FunctionDef):
                names = [a.arg for a in (*part.args.posonlyargs, *part.args.args)]
                found.setdefault(part.name, []).append(names)
            elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                found[part.target.id] = []
        return found

    return {name: of(node) for name, node in classes.items()}


def classes() -> list[type]:
    return [
        value
        for name, value in vars(recorder).items()
        if inspect.isclass(value)
        and value.__module__.startswith("stand_ins.trt_")
        and name != "Built"
    ]


def fits(mine: list[str], other: list[str]) -> bool:
    """Whether the recorder's parameters are among TensorRT's. Those of some bindings have no names
    (arg0, arg1): then only their number counts.
    """
    unnamed = any(re.fullmatch(r"arg\d+", name) for name in other)
    return len(mine) == len(other) if unnamed else set(mine) <= set(other)


@pytest.mark.parametrize("version", trt_stubs.VERSIONS)
def test_the_recorder_has_nothing_that_tensorrt_has_not(
    typings: dict[str, Path], version: str
) -> None:
    known = members(typings[version])
    for one in classes():
        assert one.__name__ in known, one
        there = known[one.__name__]
        for name, value in vars(one).items():
            if name.startswith("_") or name in OWN.get(one.__name__, set()):
                continue
            if issubclass(one, IntEnum):
                assert name in there, f"{one.__name__}.{name}"
            elif inspect.isfunction(value):
                mine = list(inspect.signature(value).parameters)
                assert any(fits(mine, other) for other in there[name]), f"{one.__name__}.{name}"
            elif not inspect.isclass(value):
                assert name in there, f"{one.__name__}.{name}"
