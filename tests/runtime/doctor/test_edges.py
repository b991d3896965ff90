"""The doctor at the limits of its checks: the oldest and newest known versions, devices that are
too old, clocks that only one source tells, memory that is just enough.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import pytest
from support.doctor_machines import (
    EVERYTHING,
    GB,
    H100,
    H100_GPU,
    LAPTOP,
    TEGRA,
    THOR,
    THOR_GPU,
    Pretend,
    built_on,
    devfreq,
)
from support.samples import MANIFEST, package

from thor_dflash.cli import main
from thor_dflash.config.engine import EngineConfig
from thor_dflash.package import manifest
from thor_dflash.package.manifest import NAME, FileEntry, render
from thor_dflash.plugins.verify_attention import TILE
from thor_dflash.runtime.doctor import jetson, software
from thor_dflash.runtime.doctor.examine import DoctorReport, examine
from thor_dflash.runtime.doctor.facts import Cuda, Finding, Gpu, Nvrtc, TensorRT
from thor_dflash.runtime.doctor.package import fits
from thor_dflash.runtime.engines.cuda.arena import RESERVE
from thor_dflash.runtime.engines.memory_estimate import needs, shorter


def examined(machine: Pretend) -> DoctorReport:
    return examine(machine, EngineConfig(), None)


def found(machine: Pretend, item: str) -> Finding | None:
    return next((f for f in examined(machine).findings if f.item == item), None)


def having(machine: Pretend, *gpus: Gpu) -> Pretend:
    return replace(machine, gpu=replace(machine.gpu, devices=gpus))


# ---- which engine can run


class Two(Pretend):
    """A machine whose second device is the one to run on."""

    def nvrtc(self, arch: str, device: int) -> Nvrtc:
        assert (arch, device) == ("sm_90", 1)
        return super().nvrtc(arch, device)


def test_the_device_that_is_examined_is_the_one_to_run_on() -> None:
    old = replace(H100_GPU, major=8, minor=9)
    two = Two(gpu=replace(H100.gpu, devices=(old, H100_GPU)))
    report = examine(two, EngineConfig(device=1), None)
    assert report.engines["cuda"] == ""
    assert examined(having(H100, old, H100_GPU)).engines["cuda"].startswith("no device")


def test_the_plans_of_a_package_are_compared_with_the_device_to_run_on(tmp_path: Path) -> None:
    made = package(tmp_path, **{"verify.plan.json": built_on(H100_GPU).encode()})
    (tmp_path / manifest.NAME).write_text(manifest.render(replace(made, engine="tensorrt")))
    two = having(THOR, THOR_GPU, H100_GPU)
    for device, state in ((0, "wrong"), (1, "ok")):
        report = examine(two, EngineConfig(device=device), tmp_path)
        assert [f.state for f in report.findings if f.item == "plans"] == [state]


@pytest.mark.parametrize("free", [-1, 1])
def test_an_engine_that_cannot_keep_its_kernels_cannot_run(free: int) -> None:
    full = replace(THOR, free=free)
    cubins = found(full, "cubins")
    assert cubins
    assert examined(full).engines == {"ort": "", "cuda": cubins.text, "tensorrt": cubins.text}


MIXED = replace(THOR, trt=TensorRT(bindings="10.16.2.1", library=101303))
OLD = replace(THOR, files={**THOR.files, TEGRA: "# R36 (release), REVISION: 4.3"})


@pytest.mark.parametrize(
    ("machine", "item", "engine", "state"),
    [
        (MIXED, "tensorrt", "", "wrong"),
        (MIXED, "tensorrt", "ort", "warn"),
        (MIXED, "tensorrt", "cuda", "warn"),
        (MIXED, "tensorrt", "tensorrt", "wrong"),
        (OLD, "jetpack", "", "wrong"),
        (OLD, "jetpack", "ort", "warn"),
        (OLD, "jetpack", "cuda", "wrong"),
        (OLD, "jetpack", "tensorrt", "wrong"),
    ],
)
def test_a_part_is_wrong_unless_a_package_makes_no_use_of_it(
    tmp_path: Path, machine: Pretend, item: str, engine: str, state: str
) -> None:
    plans = {"verify.plan.json": built_on(THOR_GPU).encode()}
    made = package(tmp_path, **plans)
    if engine:
        kind = cast("Literal['ort', 'cuda', 'tensorrt']", engine)
        (tmp_path / NAME).write_text(render(replace(made, engine=kind)))
    report = examine(machine, EngineConfig(), tmp_path if engine else None)
    assert next(f.state for f in report.findings if f.item == item) == state
    if engine in ("ort", "cuda"):
        assert report.wrong == (state == "wrong")
    assert ("must be of one version" in report.engines["tensorrt"]) == (machine is MIXED)


@pytest.mark.parametrize(
    ("machine", "engine", "why"),
    [
        (replace(LAPTOP, versions={}), "ort", "onnxruntime missing"),
        (replace(H100, versions={**EVERYTHING, "cuda-bindings": "12.9"}), "cuda",
         "cuda-bindings 12.9"),
        (replace(H100, gpu=replace(H100.gpu, driver=12080)), "cuda", "must know CUDA 13.0"),
        (replace(H100, compiler=Nvrtc(error="kernel.cu must compile")), "cuda", "must compile"),
        (having(H100, replace(H100_GPU, major=8, minor=9)), "cuda", "no device of compute"),
        (having(H100), "cuda", "no device of compute"),
    ],
)  # fmt: skip
def test_an_engine_that_lacks_a_part_cannot_run_whether_or_not_it_is_needed(
    machine: Pretend, engine: str, why: str
) -> None:
    report = examined(machine)
    assert not report.wrong
    assert why in report.engines[engine]
    assert "needed for" not in report.engines[engine], "that of another engine, if two need it"


def test_a_kernel_is_not_tried_on_a_device_that_is_too_old() -> None:
    old = replace(H100_GPU, major=8, minor=9)
    assert examined(having(H100, old)).engines["cuda"].startswith("no device")
    finding = found(having(H100, old), "nvrtc")
    assert finding
    assert f"a kernel for {software.ARCH}" in finding.text
    assert "the device loads it" not in finding.text


# ---- versions


# ---- the board


def test_the_clock_of_the_compute_units_is_the_gpus() -> None:
    files = {**THOR.files, **devfreq("gpu-nvd-0", 100, 200, 1000)}
    gpu, _ = jetson.clocks(replace(THOR, files=files))
    assert gpu.text == "1575 MHz of 1575, held", "that of the video units beside it is another"


# ---- memory of a package


PACKAGE = replace(
    MANIFEST, engine="cuda", chunk=64, chunks=(),
    files={"weights/a.bin": FileEntry(sha256="0", bytes=GB)},
)  # fmt: skip


def test_memory_is_that_of_the_largest_step_a_package_has() -> None:
    sized, wide = replace(PACKAGE, chunks=(512,)), replace(PACKAGE, chunk=512)
    for kind in ("cache", "ring"):
        assert needs(sized, 2048)[kind] == needs(wide, 2048)[kind] > needs(PACKAGE, 2048)[kind]


def test_the_engines_of_a_package_are_in_memory_like_its_weights() -> None:
    files = {**PACKAGE.files, "verify.plan": FileEntry(sha256="0", bytes=3 * GB),
             "verify.plan.json": FileEntry(sha256="0", bytes=9)}  # fmt: skip
    assert needs(replace(PACKAGE, files=files), 2048)["weights"] == 4 * GB


def test_the_shortest_context_is_one_tile_of_the_cache() -> None:
    least, wanted = (sum(needs(PACKAGE, n).values()) for n in (TILE, 2048))
    assert shorter(PACKAGE, 2048, wanted - least) == TILE
    assert shorter(PACKAGE, 2048, wanted - least + 1) == 0


def memory_finding(free: int, capacity: int, block: int = 0) -> Finding:
    cuda: Cuda = having(H100, replace(H100_GPU, free=free)).gpu
    config = EngineConfig(capacity=capacity, block=block)
    package = replace(PACKAGE, widths=(4,))
    return {f.item: f for f in fits(H100, cuda, package, config)}["package memory"]


def test_a_package_may_take_every_byte_there_is_and_no_more() -> None:
    total = sum(needs(PACKAGE, 2048).values()) + RESERVE
    assert memory_finding(total, 2048).state == "ok"
    lacking = memory_finding(total - 1, 2048)
    assert lacking.state == "wrong"
    assert lacking.remedy == f"--set engine.capacity={shorter(PACKAGE, 2048, 1)}"


@pytest.mark.parametrize("free", [-1, 1])
def test_kernels_made_elsewhere_may_be_all_that_are_needed(free: int) -> None:
    for held, state in ((3, "ok"), (0, "wrong"), (-1, "wrong")):
        machine = replace(THOR, free=free, held=held)
        assert jetson.disk(machine, "cubins", needed=True).state == state
    assert jetson.disk(replace(THOR, held=-1), "cubins", needed=True).state == "wrong"


# ---- options without a package


@pytest.mark.parametrize("key", ["engine.block"])
def test_sizes_are_not_accepted_where_nothing_can_check_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    key: str,
) -> None:
    monkeypatch.setattr("thor_dflash.runtime.doctor.local_machine.LocalMachine", lambda: LAPTOP)
    assert main.main(["doctor", "--set", f"{key}=7"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"thor-dflash: {key} must go with --package (got none)\n")
    (file := tmp_path / "robot.toml").write_text(f"[engine]\n{key[7:]} = 7\n")
    assert main.main(["doctor", "-c", str(file)]) == 0, "the file is for other commands, too"
    package(tmp_path / "package", a=b"1")
    line = ["doctor", "--package", str(tmp_path / "package"), "--set", f"{key}=7"]
    assert main.main(line) == 1
    assert f"{key} must be " in capsys.readouterr().out
