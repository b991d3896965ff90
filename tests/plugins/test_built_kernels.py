"""The kernels of a cycle of the 27B as a package uses them: fused, unlike in cases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kernel_usage import usage_of

from thor_dflash.builders.synthetic import write_synthetic
from thor_dflash.config.build import BuildConfig
from thor_dflash.core.tensors import DType
from thor_dflash.package.launch_program import Program, read
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.cuda.compile import architecture
from thor_dflash.plugins.launch import H100, THOR, CallSite, Device, Launch, Shaped
from thor_dflash.plugins.registry import KERNELS

CYCLE = ("propose", "verify", "accept", "observe")
CACHE_ROWS = 32768


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of the 27B without weights."""
    out = tmp_path_factory.mktemp("hollow")
    write_synthetic("qwen3.6-27b", out, BuildConfig(engine="cuda"), (32,))
    return out


def launches(program: Program, device: Device) -> Iterator[tuple[Path, Launch]]:
    """Every launch of a program and the path of its source."""
    shapes: dict[str, Shaped] = {}
    for table in (program.weights, program.values, program.inputs, program.outputs):
        for name, value in table.items():
            shape = tuple(CACHE_ROWS if isinstance(n, str) else n for n in value.shape)
            shapes[name] = Shaped(DType(value.dtype), shape)
    for step in program.steps:
        rule = KERNELS[step.op]
        ports = {port: shapes[name] for port, name in step.ports.items()}
        for one in rule.launches(CallSite(rule.op, Attributes(step.attributes), ports), device):
            yield rule.source(one), one


@pytest.mark.slow
@pytest.mark.parametrize("device", [H100, THOR], ids=["h100", "thor"])
def test_no_kernel_of_a_cycle_spills(package: Path, device: Device) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC (the extra [cuda])")
    arch = architecture(device.capability)
    found = {
        (source.resolve(), one.kernel, tuple(sorted(one.defines.items())))
        for name in (*CYCLE, "verify.32")
        for source, one in launches(read(package, name), device)
    }
    assert len([kernel for _, kernel, _ in found if kernel == "linear"]) > 10
    for source, kernel, defines in found:
        usage = usage_of(source, dict(defines), arch)[kernel]
        assert usage.spilled == 0, f"{source.name} {kernel} {dict(defines)}"
