"""The doctor at the limits of its checks: the oldest and newest known versions, devices that are
too old, clocks that only one source tells, memory that is just enough.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
from thor_dflash.runtime.doctor.facts import CommandOutput, Cuda, Finding, Gpu, Nvrtc, TensorRT
from thor_dflash.runtime.doctor.package import fits, read
from thor_dflash.runtime.engines.cuda.arena import RESERVE
from thor_dflash.runtime.engines.memory_estimate import needs, shorter


def examined(machine: Pretend) -> DoctorReport:
    return examine(machine, EngineConfig(), None)


def found(machine: Pretend, item: str) -> Finding | None:
    return next((f for f in examined(machine).findings if f.item == item), None)


def having(machine: Pretend, *gpus: Gpu) -> Pretend:
    return replace(machine, gpu=replace(machine.gpu, devices=gpus))


# ---- which engine can run


def test_a_tensorrt_that_is_only_warned_of_can_run() -> None:
    newer = replace(THOR, trt=TensorRT(bindings="11.4.0.1", library=110400))
    assert found(newer, "tensorrt").state == "warn"  # type: ignore[union-attr]
    assert examined(newer).engines["tensorrt"] == ""


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


@pytest.mark.parametrize("room", [-1, 1])
def test_an_engine_that_cannot_keep_its_kernels_cannot_run(room: int) -> None:
    full = replace(THOR, room=room)
    cubins = found(full, "cubins")
    assert cubins
    assert examined(full).engines == {"ort": "", "cuda": cubins.text, "tensorrt": cubins.text}


def test_a_tensorrt_that_calls_another_library_cannot_run() -> None:
    mixed = replace(THOR, trt=TensorRT(bindings="10.16.2.1", library=101303))
    engines = examined(mixed).engines
    assert "they must be of one version" in engines["tensorrt"]
    assert engines["cuda"] == engines["ort"] == ""


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
def test_an_engine_that_lacks_a_part_cannot_run_though_nobody_asked_for_it(
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


def test_the_oldest_version_that_is_allowed_is_enough() -> None:
    least = {name: v for parts in software.EXTRAS.values() for name, v in parts.items()}
    machine = replace(LAPTOP, python=(3, 11), versions=least, room=jetson.CUBINS)
    items = ("python", *(f"extra {extra}" for extra in software.EXTRAS), "cubins")
    assert [found(machine, item).state for item in items] == ["ok"] * len(items)  # type: ignore[union-attr]


def test_a_version_is_its_numbers_up_to_the_first_word() -> None:
    assert software.numbers("10.13rc2.9") == (10, 13, 9)
    assert software.numbers("1.x.3") == (1,)
    finding = found(having(replace(H100, gpu=replace(H100.gpu, driver=13100)), H100_GPU),
                    "cuda driver")  # fmt: skip
    assert finding
    assert finding.text.startswith("CUDA 13.10, bindings for CUDA 13.0")
    patched = replace(THOR, trt=TensorRT(bindings="10.13.12.9", library=101312))
    finding = found(patched, "tensorrt")
    assert finding
    assert (finding.state, finding.text) == ("ok", "bindings 10.13.12.9, libnvinfer 10.13.12")


@pytest.mark.parametrize(
    ("machine", "bindings", "state"),
    [(H100, (10, 12), "warn"), (H100, (10, 13), "ok"), (H100, (11, 9), "ok"),
     (THOR, (10, 12), "warn"), (THOR, (10, 13), "ok"), (THOR, (10, 16), "ok"),
     (THOR, (10, 17), "warn")],
)  # fmt: skip
def test_a_tensorrt_is_known_from_its_first_release_to_its_last(
    machine: Pretend, bindings: tuple[int, int], state: str
) -> None:
    major, minor = bindings
    trt = TensorRT(bindings=f"{major}.{minor}.1.9", library=10000 * major + 100 * minor + 1)
    finding = found(replace(machine, trt=trt), "tensorrt")
    assert finding
    assert finding.state == state


def test_a_library_that_cannot_be_asked_is_told_and_not_held_against_its_bindings() -> None:
    finding = found(replace(THOR, trt=TensorRT(bindings="10.13.3.9", library=0)), "tensorrt")
    assert finding
    assert (finding.state, finding.text) == ("ok", "bindings 10.13.3.9, libnvinfer unknown")


# ---- the board


@pytest.mark.parametrize(
    ("release", "told"),
    [("REVISION: 4,", "L4T 38.4.0, JetPack 7.1"), ("REVISION: 2.1,", "L4T 38.2.1, JetPack 7.0")],
)
def test_a_release_has_a_last_number_also_where_it_is_not_written(release: str, told: str) -> None:
    machine = replace(THOR, files={**THOR.files, TEGRA: f"# R38 (release), {release} GCID: 1"})
    finding = jetson.jetpack(machine)
    assert (finding.state, finding.text) == ("ok", told)


@pytest.mark.parametrize("mode", ["MAXN", "MAXN_SUPER", "maxn"])
def test_every_mode_without_limits_is_the_fastest(mode: str) -> None:
    said = {"nvpmodel -q": CommandOutput(0, f"NV Power Mode: {mode}\n0\n")}
    finding = jetson.power(replace(THOR, commands=said))
    assert (finding.state, finding.text) == ("ok", mode)


def test_the_clock_of_the_compute_units_is_the_gpus() -> None:
    files = {**THOR.files, **devfreq("gpu-nvd-0", 100, 200, 1000)}
    gpu, _ = jetson.clocks(replace(THOR, files=files))
    assert gpu.text == "1575 MHz of 1575, held", "that of the video units beside it is another"


@dataclass(frozen=True)
class Asked(Pretend):
    """A machine that records the commands it is told to run."""

    ran: list[str] = field(default_factory=list[str])

    def run(self, *command: str) -> CommandOutput:
        self.ran.append(" ".join(command))
        return super().run(*command)


def test_clocks_are_asked_of_jetson_clocks_only_where_the_kernel_does_not_tell_them() -> None:
    other = (
        "GPU MinFreq=1 MaxFreq=2000000 CurrentFreq=1\n"
        "EMC MinFreq=1 MaxFreq=4266000000 CurrentFreq=665600000\n"
    )
    said = {**THOR.commands, "jetson_clocks --show": CommandOutput(0, other)}
    all_told = Asked(commands=said, files=THOR.files)
    assert [f.state for f in jetson.clocks(all_told)] == ["ok", "ok"]
    assert all_told.ran == [], "it takes a second, and root"
    files = {name: text for name, text in THOR.files.items() if "bwmgr" not in name}
    gpu, memory = jetson.clocks(replace(all_told, files=files))
    assert gpu.text == "1575 MHz of 1575, held", "the kernel's word comes first"
    assert memory.text == "666 MHz of 4266, free to fall to 0"


def test_a_clock_that_is_low_and_may_rise_is_told_with_what_holds_it_up() -> None:
    files = {**THOR.files, **devfreq("gpu-gpc-0", 306, 700, 1575)}
    gpu, memory = jetson.clocks(replace(THOR, files=files))
    assert (gpu.text, gpu.remedy) == (
        "700 MHz of 1575, free to fall to 306", "sudo jetson_clocks"
    )  # fmt: skip
    assert memory.remedy == ""


@pytest.mark.parametrize(("share", "state"), [(0.79, "warn"), (0.81, "ok")])
def test_a_board_may_offer_a_little_less_than_what_is_available(share: float, state: str) -> None:
    free = round(share * jetson.available(THOR))
    machine = having(THOR, replace(THOR.gpu.devices[0], free=free))
    assert next(jetson.memory(machine, machine.gpu)).state == state


# ---- room for a package


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
    least, asked = (sum(needs(PACKAGE, n).values()) for n in (TILE, 2048))
    assert shorter(PACKAGE, 2048, asked - least) == TILE
    assert shorter(PACKAGE, 2048, asked - least + 1) == 0


def room(free: int, capacity: int, block: int = 0) -> Finding:
    cuda: Cuda = having(H100, replace(H100_GPU, free=free)).gpu
    config = EngineConfig(capacity=capacity, block=block)
    package = replace(PACKAGE, widths=(4,))
    return {f.item: f for f in fits(H100, cuda, package, config)}["package memory"]


def test_a_package_may_take_every_byte_there_is_and_no_more() -> None:
    total = sum(needs(PACKAGE, 2048).values()) + RESERVE
    assert room(total, 2048).state == "ok"
    lacking = room(total - 1, 2048)
    assert lacking.state == "wrong"
    assert lacking.remedy == f"--set engine.capacity={shorter(PACKAGE, 2048, 1)}"


def test_narrower_steps_take_less_and_steps_that_there_are_not_as_much_as_the_package_s() -> None:
    total = sum(needs(PACKAGE, 2048, 4).values()) + RESERVE
    assert room(total, 2048, 4).state == "ok"
    assert {room(total, 2048, block).state for block in (0, 5)} == {"wrong"}


@pytest.mark.parametrize("free", [-1, 1])
def test_kernels_made_elsewhere_may_be_all_that_are_needed(free: int) -> None:
    for held, state in ((3, "ok"), (0, "wrong"), (-1, "wrong")):
        machine = replace(THOR, room=free, held=held)
        assert jetson.disk(machine, "cubins", needed=True).state == state
    assert jetson.disk(replace(THOR, held=-1), "cubins", needed=True).state == "wrong"


@pytest.mark.parametrize(("engine", "state"), [("ort", "wrong"), ("cuda", "ok")])
def test_weights_that_onnx_runtime_would_not_follow_out_of_a_package_are_told(
    tmp_path: Path, engine: Literal["ort", "cuda"], state: str
) -> None:
    """A link to another file of the package is none out of it, nor is one to the package."""
    root, blob = tmp_path / "p", tmp_path / "blob"
    (root / "weights").mkdir(parents=True)
    for path in (blob, root / "weights/own"):
        path.write_bytes(b"1")
    (root / "weights/near").symlink_to("own")
    (tmp_path / "link").symlink_to("p")
    one = FileEntry(sha256="0", bytes=1)
    files = {"weights/own": one, "weights/near": one}
    (root / NAME).write_text(render(replace(MANIFEST, engine=engine, files=files)))
    assert read(tmp_path / "link")[1].state == "ok"
    (root / "weights/far").symlink_to(blob)
    (root / NAME).write_text(
        render(replace(MANIFEST, engine=engine, files={**files, "weights/far": one}))
    )
    found = read(tmp_path / "link")[1]
    assert (found.state, "(got weights/far)" in found.text) == (state, state == "wrong")


# ---- options without a package


def test_more_threads_than_cores_are_too_many_for_any_package() -> None:
    report = examine(LAPTOP, EngineConfig(threads=10**6), None)
    (finding,) = (f for f in report.findings if f.state == "wrong")
    assert (finding.item, finding.remedy) == ("threads", "--set engine.threads=0")
    assert "engine.threads must be <= " in finding.text
    assert not examine(LAPTOP, EngineConfig(threads=1), None).wrong


@pytest.mark.parametrize("key", ["engine.block", "engine.capacity", "engine.chunk"])
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
