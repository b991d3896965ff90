"""Whether a package can run on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from thor_dflash import manifest as package_manifest
from thor_dflash import plan as package_plan
from thor_dflash.config import EngineConfig
from thor_dflash.dims import longest_context
from thor_dflash.errors import PackageError
from thor_dflash.manifest import REBUILD, Manifest
from thor_dflash.progress import amount
from thor_dflash.runtime.doctor import board
from thor_dflash.runtime.doctor.facts import Cuda, Finding, Gpu, Machine, TensorRT
from thor_dflash.runtime.doctor.needs import needs, shorter
from thor_dflash.runtime.doctor.software import LEAST
from thor_dflash.runtime.engines.cuda.memory import RESERVE

ON_SITE = "thor-dflash build --engine tensorrt ... --out PKG"
"""Engines of TensorRT work where they were built."""
ON_DEVICE = ("cuda", "tensorrt")
"""Engines that need a CUDA device."""


def read(path: Path) -> tuple[Manifest | None, Finding]:
    """The manifest, and what there is to say of the package's files. Nothing is hashed: opening
    the package does that.
    """
    try:
        found = package_manifest.read(path)
    except PackageError as e:
        return None, Finding("package", "wrong", str(e), "thor-dflash build --help")
    size = sum(entry.bytes for entry in found.files.values())
    text = (
        f"engine {found.engine}, format {found.format}, built by {found.tool}, "
        f"{len(found.files)} files, {amount(size, 'bytes')}"
    )
    off = [name for name, entry in found.files.items() if _size(path / name) != entry.bytes]
    if off:
        text += f"; {off[0]} is not as it was built" + _more(len(off) - 1)
        return None, Finding("package", "wrong", f"{text}; {REBUILD}", "thor-dflash build --help")
    return found, Finding("package", "ok", text)


def _more(count: int) -> str:
    return f", and {count} more" if count else ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def fits(
    machine: Machine, cuda: Cuda, manifest: Manifest, config: EngineConfig
) -> Iterator[Finding]:
    """Whether its engine, its context and its memory fit this machine."""
    gpu = _gpu(cuda, config.device)
    if manifest.engine in ON_DEVICE:
        yield _on_device(manifest, cuda, gpu, config)
    capacity = config.capacity or manifest.capacity
    longest = longest_context(manifest.target, manifest.drafter)
    if not manifest.block < capacity <= longest:
        text = f"{capacity} tokens; it must be {manifest.block + 1} to {longest}"
        yield Finding("context", "wrong", text, f"--set engine.capacity={manifest.capacity}")
        return
    yield _memory(machine, gpu if manifest.engine in ON_DEVICE else None, manifest, capacity)


def plan(path: Path, cuda: Cuda, tensorrt: TensorRT, device: int) -> Finding:
    """Whether TensorRT's engines were built by this TensorRT for this device."""
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


def _gpu(cuda: Cuda, index: int) -> Gpu | None:
    return cuda.devices[index] if index < len(cuda.devices) else None


def _on_device(manifest: Manifest, cuda: Cuda, gpu: Gpu | None, config: EngineConfig) -> Finding:
    item = f"engine {manifest.engine}"
    if gpu is None:
        count = len(cuda.devices)
        text = f"the package needs a CUDA device {config.device} (got {count} devices)"
        remedy = (
            "--set engine.device=0" if count else "thor-dflash build --engine ort ... --out PKG"
        )
        return Finding(item, "wrong", text, remedy)
    if gpu.capability < LEAST:
        text = f"{gpu.name} has compute capability {gpu.major}.{gpu.minor}, not 9.0 or later"
        return Finding(item, "wrong", text, "thor-dflash build --engine ort ... --out PKG")
    return Finding(item, "ok", f"on device {config.device}, {gpu.name}")


def _memory(machine: Machine, gpu: Gpu | None, manifest: Manifest, capacity: int) -> Finding:
    """The byte table, against what there is."""
    kinds = needs(manifest, capacity)
    total = sum(kinds.values()) + RESERVE
    # What the driver of a board calls free leaves out the page cache, which it does get.
    free = gpu.free if gpu and not gpu.integrated else board.available(machine)
    table = ", ".join(f"{kind} {amount(size, 'bytes')}" for kind, size in kinds.items())
    text = (
        f"{table}, {amount(RESERVE, 'bytes')} kept free: {amount(total, 'bytes')} "
        f"and activations, of {amount(free, 'bytes')} free, for {capacity} tokens"
    )
    if total <= free:
        return Finding("package memory", "ok", text)
    if fits := shorter(manifest, capacity, total - free):
        return Finding("package memory", "wrong", text, f"--set engine.capacity={fits}")
    return Finding("package memory", "wrong", f"{text}; no context is short enough", "free memory")
