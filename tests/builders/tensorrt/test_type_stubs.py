"""Our code, type-checked against TensorRT's own bindings, of the versions of a Thor and of the
newest that is supported.

This shows that every call exists, not that it does what we expect.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
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
