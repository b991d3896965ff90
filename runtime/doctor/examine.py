"""The whole examination, each check after those that it depends on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from thor_dflash.config.engine import EngineConfig
from thor_dflash.package.manifest import Manifest
from thor_dflash.runtime.doctor import jetson as board
from thor_dflash.runtime.doctor import package, software
from thor_dflash.runtime.doctor.facts import Cuda, Finding, Gpu, TensorRT
from thor_dflash.runtime.doctor.local_machine import LocalMachine

EXTRAS = {
    "ort": frozenset({"ort"}),
    "cuda": frozenset({"cuda"}),
    "tensorrt": frozenset({"tensorrt"}),
}
"""Engine of a package -> the extras it cannot run without."""


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The result of an examination."""

    findings: tuple[Finding, ...]
    engines: dict[str, str]
    """Engine -> why it cannot run here; "" if it can."""

    @property
    def wrong(self) -> bool:
        """Whether any finding is wrong."""
        return any(finding.state == "wrong" for finding in self.findings)


def examine(machine: LocalMachine, config: EngineConfig, path: Path | None) -> DoctorReport:
    """Run every check. `path`: a package that is to run here."""
    manifest, read = package.read(path) if path else (None, None)
    cuda, tensorrt = machine.cuda(), machine.tensorrt()
    findings = [*_findings(machine, config, cuda, tensorrt, manifest), *package.threads(config)]
    if read is not None:
        findings.append(read)
    if manifest is not None:
        findings += package.fits(machine, cuda, manifest, config)
        if path and manifest.engine == "tensorrt":
            findings.append(package.plan(path, cuda, tensorrt, config.device))
        if path and manifest.engine == "cuda":
            findings += package.tuning(machine, path, cuda, manifest, config)
    found = engines({f.item: f for f in findings}, cuda, tensorrt, config.device)
    return DoctorReport(tuple(findings), found)


def _findings(
    machine: LocalMachine,
    config: EngineConfig,
    cuda: Cuda,
    tensorrt: TensorRT,
    manifest: Manifest | None,
) -> Iterator[Finding]:
    engine = str(manifest.engine) if manifest else ""
    jetson, on_device = board.is_jetson(machine), engine in package.ON_DEVICE
    yield software.python(machine)
    yield from software.extras(machine, EXTRAS.get(engine, frozenset()))
    unused = bool(engine) and not on_device
    yield software.driver(machine, cuda, jetson=jetson, needed=on_device, unused=unused)
    for index, gpu in enumerate(cuda.devices):
        yield software.device(index, gpu)
    if machine.version("nvidia-cuda-nvrtc"):
        yield _nvrtc(machine, cuda, config.device, needed=on_device)
    needed, other = engine == "tensorrt", engine not in ("", "tensorrt")
    yield software.tensorrt(tensorrt, jetson=jetson, needed=needed, unused=other)
    yield from board.speed(machine, on_cpu=unused)
    yield from board.memory(machine, cuda)
    yield board.disk(machine, config.cubins, needed=on_device)


def _nvrtc(machine: LocalMachine, cuda: Cuda, index: int, *, needed: bool) -> Finding:
    gpu = _usable(cuda, index)
    arch = f"sm_{gpu.major}{gpu.minor}" if gpu else software.ARCH
    found = machine.nvrtc(arch, index if gpu else -1)
    return software.nvrtc(found, arch, cuda.driver, needed=needed)


def _usable(cuda: Cuda, index: int) -> Gpu | None:
    gpu = cuda.devices[index] if index < len(cuda.devices) else None
    return gpu if gpu and gpu.capability >= software.LEAST else None


def engines(
    found: Mapping[str, Finding], cuda: Cuda, tensorrt: TensorRT, index: int
) -> dict[str, str]:
    """For each engine, why it cannot run here ("" if it can), whatever package was given."""

    def lacks(item: str) -> str:
        finding = found.get(item)
        # Without what an extra is needed for: more than one engine may need it.
        return finding.text.partition("; needed ")[0] if finding and finding.state != "ok" else ""

    device = cuda.error or ("" if _usable(cuda, index) else "no device of compute capability 9.0")
    on_device = lacks("extra cuda") or device or lacks("cuda driver") or lacks("nvrtc")
    on_device = on_device or lacks("cubins")
    bindings = tensorrt.error or software.mixed(tensorrt)
    return {"ort": lacks("extra ort"), "cuda": on_device, "tensorrt": on_device or bindings}
