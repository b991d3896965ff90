"""Describes the server's machine, from world-readable files. What a machine lacks is null."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path("/")


@cache
def describe(engine: str, root: Path = ROOT) -> dict[str, Any]:
    """Return what does not change: name of the board, GPU or CPU, and the memory of the host."""
    return {
        "name": _board(root) or (_gpu(root) if engine != "ort" else None) or _cpu(root),
        "engine": engine,
        "cores": _text(root / "proc/cpuinfo").count("processor\t") or None,
        "memory_mb": _memory(root, "MemTotal"),
    }


def now(root: Path = ROOT) -> dict[str, Any]:
    """Return what changes: memory and clocks. Only files that are read without delay: reading a
    sensor may take milliseconds.
    """
    return {
        "memory_available_mb": _memory(root, "MemAvailable"),
        "resident_mb": _resident(root),
        # On a Jetson only; the paths are those of its kernel.
        "gpu_mhz": _mhz(root / "sys/class/devfreq/gpu-gpc-0/cur_freq"),
        "emc_mhz": _mhz(root / "sys/class/devfreq/bwmgr/cur_freq"),
    }


def _board(root: Path) -> str | None:
    return _text(root / "proc/device-tree/model").strip("\0\n ") or None


def _gpu(root: Path) -> str | None:
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        if name := _after(_text(path), "Model"):
            return name
    return None


def _cpu(root: Path) -> str | None:
    return _after(_text(root / "proc/cpuinfo"), "model name")


def _memory(root: Path, name: str) -> int | None:
    """Read a value of /proc/meminfo, MB. For free memory, MemAvailable, which unlike a driver's
    figure counts the page cache as free.
    """
    words = (_after(_text(root / "proc/meminfo"), name) or "").split()
    return int(words[0]) // 1024 if words else None


def _resident(root: Path) -> int | None:
    words = (_after(_text(root / "proc/self/status"), "VmRSS") or "").split()
    return int(words[0]) // 1024 if words else None


def _after(text: str, name: str) -> str | None:
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return None


def _mhz(path: Path) -> int | None:
    try:
        return int(_text(path)) // 1_000_000
    except ValueError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
