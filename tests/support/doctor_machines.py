"""Pretended machines for the doctor to examine: a laptop, one with an H100 and a Thor, each set up
as it should be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch

from thor_dflash.package.trt_engine import BuildEnvironment, EngineDescription, render
from thor_dflash.runtime.doctor import software
from thor_dflash.runtime.doctor.facts import CommandOutput, Cuda, Gpu, Nvrtc, TensorRT
from thor_dflash.runtime.doctor.local_machine import LocalMachine

GB, MHZ = 10**9, 10**6
TEGRA = "etc/nv_tegra_release"
EVERYTHING = {name: "99.0" for parts in software.EXTRAS.values() for name in parts}
NO_DRIVER = Cuda(error="no driver: libcuda.so.1 is not there")
COMPILER = Nvrtc(version="13.0", seconds=0.3)
NO_TENSORRT = TensorRT(error="tensorrt is not installed")
NO_MACHINE = CommandOutput(None, "No such file or directory")


@dataclass(frozen=True)
class Pretend(LocalMachine):
    """A machine whose answers are its fields."""

    python: tuple[int, int] = (3, 12)
    processor: str = "x86_64"
    versions: Mapping[str, str] = field(default_factory=lambda: EVERYTHING)
    files: Mapping[str, str] = field(
        default_factory=lambda: {
            "proc/meminfo": "MemTotal: 32000000 kB\nMemFree: 1 kB\nMemAvailable: 24000000 kB"
        }
    )
    commands: Mapping[str, CommandOutput] = field(default_factory=dict)
    gpu: Cuda = NO_DRIVER
    compiler: Nvrtc = COMPILER
    trt: TensorRT = NO_TENSORRT
    free: int = 50 * GB
    held: int = 0

    def version(self, distribution: str) -> str:
        return self.versions.get(distribution, "")

    def text(self, path: str) -> str:
        return self.files.get(path, "")

    def paths(self, pattern: str) -> Sequence[str]:
        every = {path.rpartition("/")[0] for path in self.files} | set(self.files)
        return sorted(path for path in every if fnmatch(path, pattern))

    def run(self, *command: str) -> CommandOutput:
        return self.commands.get(" ".join(command), NO_MACHINE)

    def space(self, directory: str) -> int:
        return self.free

    def kernels(self, directory: str) -> int:
        return self.held

    def cuda(self) -> Cuda:
        return self.gpu

    def nvrtc(self, arch: str, device: int) -> Nvrtc:
        return replace(self.compiler, loaded=device >= 0 and not self.compiler.error)

    def tensorrt(self) -> TensorRT:
        return self.trt


def devfreq(name: str, low: int, now: int, high: int) -> dict[str, str]:
    """Returns the sysfs files of a clock and their contents. Arguments in MHz."""
    clocks = {"min": low, "cur": now, "max": high}
    return {f"sys/class/devfreq/{name}/{n}_freq": str(mhz * MHZ) for n, mhz in clocks.items()}


THOR_GPU = Gpu(
    name="NVIDIA Thor", major=11, minor=0, multiprocessors=20, memory=128 * GB, free=110 * GB,
    integrated=True,
)  # fmt: skip
H100_GPU = Gpu(
    name="NVIDIA H100", major=9, minor=0, multiprocessors=132, memory=80 * GB, free=79 * GB,
    integrated=False,
)  # fmt: skip
LAPTOP = Pretend()
H100 = Pretend(
    gpu=Cuda(driver=13000, bindings=13000, devices=(H100_GPU,)),
    files={**LAPTOP.files, "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de"},
)
THOR = Pretend(
    processor="aarch64",
    gpu=Cuda(driver=13000, bindings=13000, devices=(THOR_GPU,)),
    trt=TensorRT(bindings="10.13.3.9", library=101303),
    files={
        TEGRA: "# R38 (release), REVISION: 4.0, GCID: 1, BOARD: generic, EABI: x",
        "proc/meminfo": "MemTotal: 125000000 kB\nMemAvailable: 115000000 kB",
        **devfreq("gpu-gpc-0", 1575, 1575, 1575),
        **devfreq("bwmgr", 4266, 4266, 4266),
    },
    commands={"nvpmodel -q": CommandOutput(0, "NV Power Mode: MAXN\n0\n")},
)


def built_on(gpu: Gpu) -> str:
    """Returns the description of an engine that TensorRT 10.13.3.9 built on a device."""
    made = BuildEnvironment(
        tensorrt="10.13.3.9",
        capability=gpu.capability,
        device=gpu.name,
        multiprocessors=gpu.multiprocessors,
        kernels="k",
    )
    return render(
        EngineDescription(
            name="verify",
            file="verify.plan",
            sha256="0",
            profile=0,
            inputs={},
            outputs={},
            weights={},
            nodes=(),
            made=made,
        )
    )
