"""Whether a package can run on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote

from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import ConfigError, PackageError, ThorError
from thor_dflash.core.progress import amount
from thor_dflash.package import manifest as package_manifest
from thor_dflash.package import trt_engine as package_plan
from thor_dflash.package.manifest import REBUILD, Manifest
from thor_dflash.plugins.cuda.driver import DeviceInfo
from thor_dflash.plugins.launch import Device
from thor_dflash.runtime.doctor import jetson
from thor_dflash.runtime.doctor.facts import Cuda, Finding, Gpu, TensorRT, missing
from thor_dflash.runtime.doctor.local_machine import LocalMachine
from thor_dflash.runtime.doctor.software import LEAST
from thor_dflash.runtime.engines import resolve_options
from thor_dflash.runtime.engines.cuda.arena import RESERVE
from thor_dflash.runtime.engines.cuda.tuning_record import (
    POWER_MODE,
    package_name,
    tuning_file,
)
from thor_dflash.runtime.engines.memory_estimate import needs, shorter

ON_SITE = "thor-dflash build --engine tensorrt ... --out PKG"
"""TensorRT engines work only where they were built."""
ON_DEVICE = ("cuda", "tensorrt")
"""Engines that need a CUDA device."""


def read(path: Path) -> tuple[Manifest | None, Finding]:
    """Return the manifest and a finding about the package's files. Does not check hashes; opening
    the package does.
    """
    try:
        found = package_manifest.read(path)
        package_manifest.check_files(path, found)
    except PackageError as e:
        # What is unreadable, a link or strange needs to be looked at, not built again.
        build = REBUILD in str(e) or not path.exists()
        remedy = "thor-dflash build --help" if build else f"ls -lR {quote(str(path))}"
        return None, Finding("package", "wrong", str(e), remedy)
    size = sum(entry.bytes for entry in found.files.values())
    text = (
        f"engine {found.engine}, format {found.format}, built by {found.tool}, "
        f"{len(found.files)} files, {amount(size, 'bytes')}{', sees images' * bool(found.vision)}"
    )
    return found, Finding("package", "ok", text)


def fits(
    machine: LocalMachine, cuda: Cuda, manifest: Manifest, config: EngineConfig
) -> Iterator[Finding]:
    """Whether the package's engine, the sizes requested of it and its memory fit this machine."""
    gpu = _gpu(cuda, config.device)
    if manifest.engine in ON_DEVICE:
        yield _on_device(manifest, cuda, gpu, config)
    refused = dict(_refused(manifest, config))
    yield from refused.values()
    if "capacity" not in refused:
        capacity = resolve_options.capacity(config, manifest)
        block = manifest.block if "block" in refused else resolve_options.block(config, manifest)
        on = gpu if manifest.engine in ON_DEVICE else None
        yield _memory(machine, on, manifest, capacity, block)


def threads(config: EngineConfig) -> Iterator[Finding]:
    """The refusal of a number of threads with which no package could be opened."""
    try:
        resolve_options.threads(config)
    except ConfigError as e:
        yield Finding("threads", "wrong", str(e), "--set engine.threads=0")


def _refused(manifest: Manifest, config: EngineConfig) -> Iterator[tuple[str, Finding]]:
    """Yield the sizes that opening the package would refuse, and the refusals."""
    sizes: tuple[tuple[str, str, int, Callable[[EngineConfig, Manifest], int]], ...] = (
        ("capacity", "context", manifest.capacity, resolve_options.capacity),
        ("block", "block", manifest.block, resolve_options.block),
        ("chunk", "prefill step", manifest.chunk, resolve_options.chunk),
    )
    for name, item, own, resolve in sizes:
        try:
            resolve(config, manifest)
        except ConfigError as e:
            yield name, Finding(item, "wrong", str(e), f"--set engine.{name}={own}")


def plan(path: Path, cuda: Cuda, tensorrt: TensorRT, device: int) -> Finding:
    """Whether the package's engines were built with this TensorRT on a device like this one."""
    item = "plans"
    try:
        made = package_plan.read(path, "verify").made
    except PackageError as e:
        return Finding(item, "wrong", str(e), ON_SITE)
    gpu = _gpu(cuda, device)
    here = (
        ("TensorRT", made.tensorrt, tensorrt.bindings),
        ("compute capability", made.capability, gpu.capability if gpu else None),
        ("SMs", made.multiprocessors, gpu.multiprocessors if gpu else None),
    )
    other = [f"{what} {was}, here {now}" for what, was, now in here if was != now]
    if other:
        return Finding(item, "wrong", f"built with {', '.join(other)}", ON_SITE)
    return Finding(item, "ok", f"built with TensorRT {made.tensorrt} on {made.device}")


def tuning(
    machine: LocalMachine, path: Path, cuda: Cuda, found: Manifest, config: EngineConfig
) -> Iterator[Finding]:
    """Whether the launches of a package of engine cuda were measured on the device, if there is
    one.
    """
    if gpu := _gpu(cuda, config.device):
        yield _tuning(machine, path, gpu, cuda.driver, found, config)


def _tuning(
    machine: LocalMachine, path: Path, gpu: Gpu, driver: int, found: Manifest, config: EngineConfig
) -> Finding:
    item = "launches"
    if config.tune == "off":
        return Finding(item, "ok", "by the rules: engine.tune is off")
    remedy, state = f"thor-dflash tune --package {path}", missing(config.tune == "required")
    mode = POWER_MODE.search(machine.run("nvpmodel", "-q").text)
    info = DeviceInfo(
        gpu.name,
        Device(gpu.capability, gpu.multiprocessors),
        gpu.memory,
        gpu.integrated,
        driver,
    )
    try:
        file = tuning_file(config.tunings_directory, info, mode[1] if mode else "")
        record, name = file.read(), package_name(config, found)
    except ThorError as e:
        return Finding(item, "wrong", str(e), remedy)
    if record is None or name not in record.packages:
        return Finding(item, state, "not measured on this device: launched by the rules", remedy)
    text = f"{len(record.launches)} measured, {len(record.choices())} not by the rules"
    if record.power != file.power:
        return Finding(item, "warn", f"{text}; in power mode {record.power}", remedy)
    return Finding(item, "ok", text)


def _gpu(cuda: Cuda, index: int) -> Gpu | None:
    return cuda.devices[index] if index < len(cuda.devices) else None


def _on_device(manifest: Manifest, cuda: Cuda, gpu: Gpu | None, config: EngineConfig) -> Finding:
    item = f"engine {manifest.engine}"
    if gpu is None:
        count = len(cuda.devices)
        text = f"the package needs CUDA device {config.device} (got {amount(count, 'devices')})"
        remedy = (
            "--set engine.device=0" if count else "thor-dflash build --engine ort ... --out PKG"
        )
        return Finding(item, "wrong", text, remedy)
    if gpu.capability < LEAST:
        text = f"{gpu.name} has compute capability {gpu.major}.{gpu.minor}, not 9.0 or later"
        return Finding(item, "wrong", text, "thor-dflash build --engine ort ... --out PKG")
    return Finding(item, "ok", f"on device {config.device}, {gpu.name}")


def _memory(
    machine: LocalMachine, gpu: Gpu | None, manifest: Manifest, capacity: int, block: int
) -> Finding:
    """Compare the memory that the package needs with the free memory."""
    kinds = needs(manifest, capacity, block)
    total = sum(kinds.values()) + RESERVE
    # On a board, the driver's free memory excludes the page cache, which it can still allocate.
    free = gpu.free if gpu and not gpu.integrated else jetson.available(machine)
    table = ", ".join(f"{kind} {amount(size, 'bytes')}" for kind, size in kinds.items())
    text = (
        f"{amount(total, 'bytes')} and activations are needed for {capacity} tokens, of "
        f"{amount(free, 'bytes')} free: {table}, kept free {amount(RESERVE, 'bytes')}"
    )
    if total <= free:
        return Finding("package memory", "ok", text)
    if fits := shorter(manifest, capacity, total - free):
        return Finding("package memory", "wrong", text, f"--set engine.capacity={fits}")
    return Finding("package memory", "wrong", f"{text}; no context is short enough", "free memory")
