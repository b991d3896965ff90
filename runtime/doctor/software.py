"""Checks of Python, packages, the CUDA driver, NVRTC and TensorRT."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from thor_dflash.runtime.doctor.facts import (
    Cuda,
    Finding,
    Gpu,
    Nvrtc,
    TensorRT,
    missing,
)
from thor_dflash.runtime.doctor.local_machine import LocalMachine
from thor_dflash.runtime.doctor.probe import NO_BINDINGS

PYTHON = (3, 11)
EXTRAS = {
    "build": {"onnx": "1.19", "safetensors": "0.5"},
    "ort": {"onnxruntime": "1.22"},
    "cuda": {"cuda-bindings": "13.0", "nvidia-cuda-nvrtc": "13.0"},
    "tensorrt": {
        "onnx": "1.19",
        "safetensors": "0.5",
        "cuda-bindings": "13.0",
        "nvidia-cuda-nvrtc": "13.0",
    },
    "serve": {"jsonschema-rs": "0.38"},
    "http": {"starlette": "1.0", "uvicorn": "0.40", "prometheus-client": "0.23"},
    "images": {"pillow": "12.3"},
}
"""Extra of this package -> its distributions and their minimum versions. Those of `engine` are not
among them: without them there is no doctor."""
USES = {
    "build": "to build packages, and to check those of engine ort",
    "ort": "for packages of engine ort",
    "cuda": "for packages of engine cuda",
    "tensorrt": "to build and run packages of engine tensorrt, beside TensorRT itself",
    "serve": "to serve plans",
    "http": "for the HTTP gateway",
    "images": "for images in prompts",
}
CUDA = 13000
"""Minimum CUDA version of the driver."""
CAPABILITIES = {(9, 0): "H100 or H200", (11, 0): "Thor"}
"""Compute capabilities that the kernels are written for."""
LEAST = (9, 0)
PCI = "sys/bus/pci/devices/*/vendor"
ARCH = "sm_110"
"""Target of the trial compilation if there is no device: Thor."""

DRIVER_REMEDIES = {
    "CUDA_ERROR_NO_DEVICE": "nvidia-smi -L",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "sudo reboot",
    "CUDA_ERROR_SYSTEM_NOT_READY": "sudo systemctl restart nvidia-fabricmanager",
    "CUDA_ERROR_UNKNOWN": "sudo reboot",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "nvidia-smi",
    "CUDA_ERROR_OPERATING_SYSTEM": "ls -l /dev/nvidia*",
}
"""Name of the driver error -> the command that diagnoses or fixes it."""

TENSORRT = (10, 13)
"""First TensorRT that the builder is written for, in JetPack 7.0."""


def numbers(version: str) -> tuple[int, ...]:
    """ "10.13.3.9" as (10, 13, 3, 9); stops at a part that does not begin with a digit."""
    found: list[int] = []
    for part in version.split("."):
        digits = re.match(r"\d+", part)
        if digits is None:
            break
        found.append(int(digits.group()))
    return tuple(found)


def python(machine: LocalMachine) -> Finding:
    """Whether the Python version is new enough."""
    text = ".".join(map(str, machine.python)) + f" on {machine.processor}"
    if machine.python >= PYTHON:
        return Finding("python", "ok", text)
    return Finding(
        "python", "wrong", f"{text}; 3.11 or later is needed", "python3.12 -m venv .venv"
    )


def extras(machine: LocalMachine, needed: frozenset[str]) -> Iterator[Finding]:
    """Whether each extra is installed; wrong if a needed one is not."""
    for extra, parts in EXTRAS.items():
        have = {name: machine.version(name) for name in parts}
        lacking = [
            f"{name} {have[name] or 'missing'}"
            for name, least in parts.items()
            if not have[name] or numbers(have[name]) < numbers(least)
        ]
        item, command = f"extra {extra}", f"pip install 'thor-dflash[{extra}]'"
        if not lacking:
            text = ", ".join(f"{name} {version}" for name, version in have.items())
            yield Finding(item, "ok", text)
        else:
            text = f"{', '.join(lacking)}; needed {USES[extra]}"
            yield Finding(item, missing(extra in needed), text, command)


def driver(
    machine: LocalMachine, cuda: Cuda, *, jetson: bool, needed: bool, unused: bool
) -> Finding:
    """Whether the CUDA driver works. `unused`: the package to run does not use a device."""
    if cuda.error:
        found = _no_driver(machine, cuda, jetson, needed)
        return replace(found, state="warn") if unused else found
    text = f"CUDA {version(cuda.driver)}, bindings for CUDA {version(cuda.bindings)}"
    if cuda.driver < CUDA:
        text += f"; the driver must know CUDA {version(CUDA)}"
        return Finding("cuda driver", "wrong" if needed else "warn", text, _new_driver(jetson))
    return Finding("cuda driver", "ok", text)


def _no_driver(machine: LocalMachine, cuda: Cuda, jetson: bool, needed: bool) -> Finding:
    text = f"{cuda.error}; engines cuda and tensorrt cannot run here, engine ort can"
    if cuda.error.startswith(NO_BINDINGS):  # without bindings, nothing is known of the driver
        remedy = "pip install 'thor-dflash[cuda]'"
        return Finding("cuda driver", missing(needed), text, remedy)
    if cuda.error.startswith("no driver"):
        if not jetson and not any(machine.text(path) == "0x10de" for path in machine.paths(PCI)):
            return Finding("cuda driver", missing(needed), f"{text}; there is no NVIDIA device")
        return Finding("cuda driver", "wrong", text, _new_driver(jetson))
    remedy = DRIVER_REMEDIES.get(cuda.error.partition(" ")[0], "nvidia-smi")
    return Finding("cuda driver", "wrong", text, remedy)


def _new_driver(jetson: bool) -> str:
    return (
        "sudo apt install nvidia-jetpack" if jetson else "sudo apt install nvidia-driver-580-open"
    )


def version(number: int) -> str:
    """13020 as "13.2"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def device(index: int, gpu: Gpu) -> Finding:
    """One device: what it is, and whether kernels are written for it."""
    text = (
        f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.multiprocessors} SMs, "
        f"{gpu.memory / 1e9:.1f} GB, {gpu.free / 1e9:.1f} GB free"
        + (", shared with the CPU" if gpu.integrated else "")
    )
    if gpu.capability < LEAST:
        return Finding(f"device {index}", "warn", f"{text}; engine cuda needs 9.0 or later")
    if gpu.capability not in CAPABILITIES:
        known = " and ".join(f"{a}.{b} ({name})" for (a, b), name in CAPABILITIES.items())
        return Finding(f"device {index}", "warn", f"{text}; the kernels are written for {known}")
    return Finding(f"device {index}", "ok", text)


def nvrtc(found: Nvrtc, arch: str, driver: int, *, needed: bool) -> Finding:
    """Whether a kernel compiles and, if there is a device, loads. `driver`: its CUDA version."""
    if found.error:
        state = missing(needed)
        remedy = "pip install --upgrade 'thor-dflash[cuda]'"
        # A driver may refuse the output of a compiler newer than itself.
        if driver and numbers(found.version)[:2] > numbers(version(driver)):
            remedy = f"pip install 'nvidia-cuda-nvrtc=={version(driver)}.*'"
        return Finding("nvrtc", state, found.error, remedy)
    text = f"{found.version}: compiled a kernel for {arch} in {found.seconds:.1f} s"
    return Finding("nvrtc", "ok", text + (", and the device loads it" if found.loaded else ""))


def tensorrt(found: TensorRT, *, jetson: bool, needed: bool, unused: bool) -> Finding:
    """Whether TensorRT's bindings and library work and have the same version. `unused`: the package
    to run is of another engine.
    """
    if found.error:
        text = f"{found.error}; needed for packages of engine tensorrt"
        return Finding("tensorrt", missing(needed), text, _tensorrt_remedy(jetson))
    if text := mixed(found):
        return Finding("tensorrt", missing(not unused), text, _tensorrt_remedy(jetson))
    text = _versions(found)
    if numbers(found.bindings) < TENSORRT:
        text += "; 10.13 or later is needed"
        return Finding("tensorrt", "warn", text, _tensorrt_remedy(jetson))
    return Finding("tensorrt", "ok", text)


def mixed(found: TensorRT) -> str:
    """That bindings and library are of different versions; empty if they are not."""
    library = _library(found.library)
    if not library or numbers(found.bindings)[:3] == library:
        return ""
    return f"{_versions(found)}: they must be of one version"


def _versions(found: TensorRT) -> str:
    library = ".".join(map(str, _library(found.library))) or "unknown"
    return f"bindings {found.bindings}, libnvinfer {library}"


def _library(number: int) -> tuple[int, ...]:
    """101303 as (10, 13, 3)."""
    return (number // 10000, number // 100 % 100, number % 100) if number else ()


def _tensorrt_remedy(jetson: bool) -> str:
    if jetson:
        # Wheels from a package index do not match the board's own library.
        return (
            "sudo apt install --reinstall tensorrt python3-libnvinfer && "
            "python3 -m venv --system-site-packages .venv"
        )
    return "pip install --upgrade tensorrt"
