"""The doctor, shown made-up machines: a Thor, an H100 and a laptop, in order and with faults."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.doctor_machines import (
    GB,
    H100,
    H100_GPU,
    LAPTOP,
    NO_DRIVER,
    TEGRA,
    THOR,
    THOR_GPU,
    Pretend,
    built_on,
    devfreq,
)
from support.loop_models import session
from support.samples import MANIFEST, package

from thor_dflash.builders.synthetic import QWEN36_27B, QWEN36_27B_DFLASH
from thor_dflash.cli import main
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import ConfigError, PackageError
from thor_dflash.core.progress import Silent
from thor_dflash.package.manifest import FileEntry, Manifest, TensorTotals
from thor_dflash.runtime.doctor import software
from thor_dflash.runtime.doctor.examine import DoctorReport, examine
from thor_dflash.runtime.doctor.facts import CommandOutput, Cuda, Finding, Nvrtc, TensorRT
from thor_dflash.runtime.doctor.package import fits
from thor_dflash.runtime.doctor.package import plan as package_plan
from thor_dflash.runtime.engines.cuda.arena import RESERVE
from thor_dflash.runtime.engines.memory_estimate import needs
from thor_dflash.runtime.session import open_session


def examined(machine: Pretend, path: Path | None = None, **options: int) -> DoctorReport:
    return examine(machine, EngineConfig(**options), path)  # type: ignore[arg-type]


def found(report: DoctorReport, item: str) -> Finding:
    return next(finding for finding in report.findings if finding.item == item)


def off(report: DoctorReport) -> dict[str, str]:
    """Items that are not ok, and their state."""
    return {f.item: f.state for f in report.findings if f.state != "ok"}


# ---- whole machines


def test_a_thor_as_it_should_be_has_no_finding() -> None:
    report = examined(THOR)
    assert off(report) == {}
    assert report.engines == {"ort": "", "cuda": "", "tensorrt": ""}
    assert found(report, "jetpack").text == "L4T 38.4.0, JetPack 7.1"
    assert "11.0, 20 SMs" in found(report, "device 0").text
    assert "shared with the CPU" in found(report, "device 0").text
    assert "the device loads it" in found(report, "nvrtc").text


def test_a_laptop_without_a_gpu_is_not_ill() -> None:
    report = examined(LAPTOP)
    assert not report.wrong
    assert off(report) == {"cuda driver": "warn", "tensorrt": "warn"}
    assert report.engines["ort"] == ""
    assert "no driver" in report.engines["cuda"]
    assert found(report, "cuda driver").remedy == ""
    assert "sm_110" in found(report, "nvrtc").text
    assert found(report, "memory").text == "24.6 GB available of 32.8"


def test_an_h100_lacks_nothing_but_tensorrt() -> None:
    report = examined(H100)
    assert off(report) == {"tensorrt": "warn"}
    assert report.engines["cuda"] == ""
    assert report.engines["tensorrt"] == "tensorrt is not installed"
    assert "jetpack" not in {finding.item for finding in report.findings}


# ---- what is wrong, and its remedy


@pytest.mark.parametrize(
    ("machine", "item", "state", "text", "remedy"),
    [
        (replace(LAPTOP, python=(3, 10)), "python", "wrong", "3.11 or later", "python3.12 -m venv"),
        (replace(LAPTOP, versions={}), "extra ort", "warn", "onnxruntime missing",
         "pip install 'thor-dflash[ort]'"),
        (replace(LAPTOP, files={**LAPTOP.files, "sys/bus/pci/devices/a/vendor": "0x10de"}),
         "cuda driver", "wrong", "no driver", "sudo apt install nvidia-driver-580-open"),
        (replace(H100, gpu=Cuda(error="CUDA_ERROR_SYSTEM_DRIVER_MISMATCH from cuInit")),
         "cuda driver", "wrong", "MISMATCH", "sudo reboot"),
        (replace(H100, gpu=replace(H100.gpu, driver=12080)), "cuda driver", "warn",
         "CUDA 12.8", "sudo apt install nvidia-driver-580-open"),
        (replace(H100, gpu=replace(H100.gpu, devices=(replace(H100_GPU, major=8, minor=9),))),
         "device 0", "warn", "needs 9.0 or later", ""),
        (replace(H100, compiler=Nvrtc(error="cuModuleLoadData must succeed", version="13.2")),
         "nvrtc", "warn", "must succeed", "pip install 'nvidia-cuda-nvrtc==13.0.*'"),
        (replace(THOR, trt=TensorRT(bindings="10.16.2.1", library=101303)), "tensorrt", "wrong",
         "libnvinfer 10.13.3: they must be of one version", "--system-site-packages"),
        (replace(THOR, files={**THOR.files, TEGRA: "# R36 (release), REVISION: 4.3"}),
         "jetpack", "wrong", "L4T 36.4.3; Thor needs JetPack 7", "flash"),
        (replace(THOR, commands={"nvpmodel -q": CommandOutput(0, "NV Power Mode: 70W\n2\n")}),
         "power mode", "warn", "70W", "sudo nvpmodel -m 0"),
        (replace(THOR, files={**THOR.files, **devfreq("gpu-gpc-0", 306, 1575, 1575)}),
         "GPU clock", "warn", "1575 MHz of 1575, free to fall to 306", "sudo jetson_clocks"),
        (replace(LAPTOP, free=1), "cubins", "warn", "268 MB are needed", "df -h"),
    ],
)  # fmt: skip
def test_each_ill_has_its_line_and_its_remedy(
    machine: Pretend, item: str, state: str, text: str, remedy: str
) -> None:
    finding = found(examined(machine), item)
    assert (finding.state, text in finding.text) == (state, True), finding
    assert remedy in finding.remedy
    assert bool(remedy) == bool(finding.remedy), finding


def test_a_page_cache_that_the_driver_counts_as_used_is_named() -> None:
    gpu = replace(THOR.gpu, devices=(replace(THOR_GPU, free=20 * GB),))
    finding = found(examined(replace(THOR, gpu=gpu)), "memory")
    assert finding.state == "warn"
    assert "drop_caches" in finding.remedy
    # A discrete card has memory of its own, so what is free there says nothing of the machine's.
    gpu = replace(H100.gpu, devices=(replace(H100_GPU, free=1 * GB),))
    assert found(examined(replace(H100, gpu=gpu)), "memory").state == "ok"


def test_the_extras_are_those_of_the_project() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    optional = tomllib.loads(text)["project"]["optional-dependencies"]

    def declared(extra: str) -> dict[str, str]:
        """What an extra asks for, and the extras that it names, but for `engine`."""
        found: dict[str, str] = {}
        for need in optional[extra]:
            if named := re.fullmatch(r"thor-dflash\[(.*)\]", need):
                for other in named[1].split(","):
                    found |= declared(other) if other != "engine" else {}
            else:
                name, least = need.split(">=")
                found[name] = least
        return found

    for extra, parts in software.EXTRAS.items():
        assert parts == declared(extra), extra


# ---- packages


BIG = replace(
    MANIFEST, engine="cuda", target=QWEN36_27B, drafter=QWEN36_27B_DFLASH, kv="fp8",
    activations="bf16", chunk=512, capacity=8192,
    files={"weights/a.bin": FileEntry(sha256="0", bytes=17 * GB)},
)  # fmt: skip


def fitting(machine: Pretend, manifest: Manifest, **options: int) -> dict[str, Finding]:
    config = EngineConfig(**options)  # type: ignore[arg-type]
    return {f.item: f for f in fits(machine, machine.gpu, manifest, config)}


def test_a_package_of_the_27b_fits_a_thor_and_no_laptop() -> None:
    assert {f.state for f in fitting(THOR, BIG).values()} == {"ok"}
    on_laptop = fitting(LAPTOP, BIG)["engine cuda"]
    assert on_laptop.state == "wrong"
    assert "--engine ort" in on_laptop.remedy


def test_a_package_of_the_27b_for_a_cpu_is_far_larger_in_memory() -> None:
    mlp = {
        "nvfp4": TensorTotals(count=3, bytes=9 * GB),
        "fp8": TensorTotals(count=1, bytes=2 * GB),
    }
    stored = {"mlp": mlp, "drafter.fc": {"bf16": TensorTotals(count=1, bytes=GB)}}
    on_cpu = replace(BIG, engine="ort", quantisation=stored)
    assert needs(on_cpu, 8192)["unpacked weights"] == (2 * (4 * 16 + 4 * 2) + 2) * GB
    finding = fitting(LAPTOP, on_cpu)["package memory"]
    assert (finding.state, finding.remedy) == ("wrong", "free memory")
    assert "unpacked weights 146.0 GB" in finding.text
    sized = replace(on_cpu, chunks=(32, 2048))
    assert needs(sized, 8192)["unpacked weights"] == (4 * (4 * 16 + 4 * 2) + 2) * GB


def test_a_context_that_does_not_fit_is_refused_with_the_longest_that_does() -> None:
    small = replace(H100, gpu=replace(H100.gpu, devices=(replace(H100_GPU, free=22 * GB),)))
    finding = fitting(small, BIG, capacity=262144)["package memory"]
    assert finding.state == "wrong"
    assert "weights 17.0 GB" in finding.text
    shorter = int(finding.remedy.rpartition("=")[2])
    assert fitting(small, BIG, capacity=shorter - 2000)["package memory"].state == "ok"
    assert fitting(small, BIG, capacity=shorter + 3000)["package memory"].state == "wrong"
    tiny = replace(H100, gpu=replace(H100.gpu, devices=(replace(H100_GPU, free=9 * GB),)))
    assert "no context is short enough" in fitting(tiny, BIG)["package memory"].text
    assert fitting(THOR, BIG, capacity=10**6)["context"].remedy == "--set engine.capacity=8192"
    assert "device 1" in fitting(THOR, BIG, device=1)["engine cuda"].text


@pytest.mark.parametrize("saves", ["records", "states"])
def test_the_byte_table_is_what_an_engine_makes(saves: str) -> None:
    model = session(saves=saves).model
    have: dict[str, int] = {}
    kinds = {"attention": "cache", "gdn": "state", "drafter": "ring"}
    for name, tensor in model.state.tensors.items():
        once = name.endswith((".state", ".k", ".v")) or kinds[name.split(".")[0]] != "state"
        kind = kinds[name.split(".")[0]]
        have[kind] = have.get(kind, 0) + tensor.spec.nbytes({}) * (1 if once else 2)
    want = needs(model.manifest, model.capacity)
    assert {kind: want[kind] for kind in have} == have
    narrow = needs(model.manifest, model.capacity, model.block // 2)
    assert {k for k, size in narrow.items() if size < want[k]} == {"state", "logits"}
    assert 2 * narrow["logits"] == want["logits"]


def truncated(package: Path) -> None:
    (package / "weights" / "a").write_bytes(b"1")


def with_a_file_more(package: Path) -> None:
    (package / "notes.txt").write_text("mine")


def linked(package: Path) -> None:
    (package / "weights").rename(package.with_name("elsewhere"))
    (package / "weights").symlink_to(package.with_name("elsewhere"))


def moved(package: Path) -> None:
    package.rename(package.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("damage", "remedy"),
    [
        (truncated, "build"),
        (moved, "thor-dflash build"),
        (with_a_file_more, "ls -lR '{}'"),
        (linked, "ls -lR '{}'"),
    ],
)
def test_a_package_that_opening_refuses_is_refused_in_the_same_words(
    tmp_path: Path, damage: Callable[[Path], None], remedy: str
) -> None:
    path = tmp_path / "a package"
    package(path, weights__a=b"12345678")
    assert found(examined(LAPTOP, path), "package").state == "ok"
    damage(path)
    report = examined(LAPTOP, path)
    with pytest.raises(PackageError) as error:
        open_session(path, EngineConfig(), Silent())
    assert report.wrong
    assert found(report, "package").text == str(error.value)
    assert remedy.format(path) in found(report, "package").remedy


@pytest.mark.parametrize(
    ("option", "item", "remedy"),
    [
        ({"threads": 10**6}, "threads", "--set engine.threads=0"),
        ({"capacity": 17}, "context", "--set engine.capacity=512"),
    ],
)
def test_an_option_that_opening_refuses_is_refused_in_the_same_words(
    tmp_path: Path, option: dict[str, int], item: str, remedy: str
) -> None:
    package(tmp_path, a=b"1")
    assert not examined(LAPTOP, tmp_path).wrong
    report = examined(LAPTOP, tmp_path, **option)
    with pytest.raises(ConfigError) as error:
        open_session(tmp_path, EngineConfig(**option), Silent())  # type: ignore[arg-type]
    assert report.wrong
    finding = found(report, item)
    assert (finding.text, finding.remedy) == (str(error.value), remedy)


def test_plans_of_another_tensorrt_or_device_are_refused(tmp_path: Path) -> None:
    (tmp_path / "verify.plan.json").write_text(built_on(THOR_GPU))
    assert package_plan(tmp_path, THOR.gpu, THOR.trt, 0).state == "ok"
    newer = package_plan(tmp_path, THOR.gpu, replace(THOR.trt, bindings="10.16.2.1"), 0)
    assert (newer.state, "TensorRT 10.13.3.9, here 10.16.2.1" in newer.text) == ("wrong", True)
    elsewhere = package_plan(tmp_path, H100.gpu, THOR.trt, 0)
    assert "compute capability (11, 0), here (9, 0), SMs 20, here 132" in elsewhere.text
    assert "--engine tensorrt" in elsewhere.remedy
    assert package_plan(tmp_path / "no", THOR.gpu, THOR.trt, 0).state == "wrong"


def test_a_driver_that_a_package_has_no_use_for_is_not_wrong(tmp_path: Path) -> None:
    package(tmp_path, a=b"1")
    broken = Cuda(error="CUDA_ERROR_UNKNOWN from cuInit")
    for machine in (replace(H100, gpu=NO_DRIVER), replace(H100, gpu=broken)):
        assert off(examined(machine))["cuda driver"] == "wrong"
        report = examined(machine, tmp_path)
        assert not report.wrong
        finding = found(report, "cuda driver")
        assert (finding.state, bool(finding.remedy)) == ("warn", True)


def test_a_package_may_take_every_byte_there_is_and_no_more() -> None:
    small = replace(BIG, target=MANIFEST.target, drafter=MANIFEST.drafter, chunk=64)
    total = sum(needs(small, 2048).values()) + RESERVE
    for free, state in ((total, "ok"), (total - 1, "wrong")):
        machine = replace(H100, gpu=replace(H100.gpu, devices=(replace(H100_GPU, free=free),)))
        found = fitting(machine, small, capacity=2048)["package memory"]
        assert found.state == state


def test_the_device_that_is_examined_is_the_one_to_run_on() -> None:
    old = replace(H100_GPU, major=8, minor=9)
    two = replace(H100, gpu=replace(H100.gpu, devices=(old, H100_GPU)))
    assert examined(two, device=1).engines["cuda"] == ""
    assert examined(two).engines["cuda"].startswith("no device")


# ---- the command


def test_the_exit_status_is_1_if_something_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("thor_dflash.runtime.doctor.local_machine.LocalMachine", lambda: LAPTOP)
    assert main.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "ok     python            3.12 on x86_64" in text
    assert "engine cuda       cannot run here: " in text
    assert main.main(["doctor", "--json", "--package", str(tmp_path / "none")]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["wrong"] is True
    assert report["items"][-1]["item"] == "package"
