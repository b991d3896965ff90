"""Compiles kernels with NVRTC: a cubin per source file, constants and architecture, cached on disk.

Nothing here needs a GPU or a driver, so cubins for a board can be made on any machine.
"""

# cuda-python publishes no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from thor_dflash import plugins
from thor_dflash.core.errors import EngineError

ROOT = Path(plugins.__file__).parent
"""The folder that `#include "operator/file.cuh"` is relative to."""

OPTIONS = (
    "--std=c++17",
    "--ptxas-options=-v",
    "--fmad=false",
    "--extra-device-vectorization",
    "--no-cache",
)
"""Multiplications and additions are fused only where a kernel calls fma_rn: otherwise the compiler
might fuse them for some rows of an unrolled loop and not for others, and a row's bits would depend
on its place. NVRTC's own cache, which it has where there is a driver, is off: it returns no log,
and cubins are cached here."""
SOURCES = ("*.cu", "*.cuh", "*launch.py", "partition.py", "layout.py")
"""Names of the files of kernels and launch rules."""
ENDING = ".cubin"
"""End of the name of a compiled kernel's file."""
SEAL = hashlib.sha256().digest_size
"""Bytes of the checksum at the end of a cached cubin."""


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled source file."""

    image: bytes
    log: str
    """The compiler's output; empty if the image came from the cache."""


def architecture(capability: tuple[int, int]) -> str:
    """The NVRTC target of a compute capability: (9, 0) is "sm_90"."""
    major, minor = capability
    return f"sm_{major}{minor}"


def compile_source(source: Path, defines: Mapping[str, int], arch: str) -> Cubin:
    """Compile a source file under plugins/.

    Raises:
        EngineError: NVRTC is missing, does not know `arch`, or the source does not compile.
    """
    nvrtc = _nvrtc()
    headers = _headers()
    program = _check(
        nvrtc.nvrtcCreateProgram(
            source.read_bytes(),
            source.name.encode(),
            len(headers),
            [text for _, text in headers],
            [name.encode() for name, _ in headers],
        ),
        "nvrtcCreateProgram",
    )
    options = [*OPTIONS, f"--gpu-architecture={arch}", *_defines(defines)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise EngineError(f"{source} must compile for {arch} (got: {log.strip() or status.name})")
    image = _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    nvrtc.nvrtcDestroyProgram(program)
    return Cubin(image, log)


def load(source: Path, defines: Mapping[str, int], arch: str, cache: Path) -> Cubin:
    """Returns the cubin from the directory `cache`; if it is missing there or damaged, compiles and
    stores it. Concurrent writers are harmless: all write the same.

    Raises:
        EngineError: as compile_source, or the directory cannot keep it.
    """
    path = cache / f"{digest(source, defines, arch)}{ENDING}"
    if image := _kept(path):
        return Cubin(image, "")
    made = compile_source(source, defines, arch)
    try:
        _keep(path, made.image)
    except OSError as e:
        raise EngineError(
            f"engine.cubins must be a directory that can keep kernels (got {cache}: {e.strerror})"
        ) from e
    return made


def _kept(path: Path) -> bytes:
    """Returns the cached image, or nothing if it is missing or damaged. Without this check a driver
    may read past the end of a truncated image, and runs one in which a byte has changed.
    """
    with contextlib.suppress(OSError):
        read = path.read_bytes()
        image, seal = read[:-SEAL], read[-SEAL:]
        if seal == _seal(path, image):
            return image
    return b""


def _seal(path: Path, image: bytes) -> bytes:
    """Returns the checksum that follows an image, where ELF readers ignore it. It covers the file
    name, so that a renamed file is not accepted.
    """
    return hashlib.sha256(path.name.encode() + image).digest()


def _keep(path: Path, image: bytes) -> None:
    """Writes an image atomically, also with respect to power loss."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, 0o644)  # other users may read the directory's cubins too
            file.write(image + _seal(path, image))
            file.flush()
            os.fsync(handle)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)  # gone if an interrupt came after the renaming
        raise


def digest(source: Path, defines: Mapping[str, int], arch: str) -> str:
    """Returns a hash of all that determines a cubin: source, headers, constants, target, options,
    compiler version.
    """
    nvrtc = _nvrtc()
    version = _check_all(nvrtc.nvrtcVersion(), "nvrtcVersion")
    made = hashlib.sha256(repr((version, arch, OPTIONS, _defines(defines))).encode())
    for name, text in (("", source.read_bytes()), *_headers()):
        made.update(f"\0{name}\0{len(text)}\0".encode() + text)
    return made.hexdigest()


@cache
def sources_digest() -> str:
    """Returns a hash of all that decides which launches there are and what they do: kernels, launch
    rules, options, compiler version.
    """
    version = _check_all(_nvrtc().nvrtcVersion(), "nvrtcVersion")
    made = hashlib.sha256(repr((version, OPTIONS)).encode())
    for path in sorted(p for pattern in SOURCES for p in ROOT.rglob(pattern)):
        text = path.read_bytes()
        made.update(f"\0{path.relative_to(ROOT).as_posix()}\0{len(text)}\0".encode() + text)
    return made.hexdigest()


def _defines(defines: Mapping[str, int]) -> list[str]:
    return [f"-D{name}={value}" for name, value in sorted(defines.items())]


@cache
def _headers() -> tuple[tuple[str, bytes], ...]:
    return tuple(
        (path.relative_to(ROOT).as_posix(), path.read_bytes())
        for path in sorted(ROOT.rglob("*.cuh"))
    )


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as e:
        raise EngineError(
            f"engine cuda must have cuda-python: pip install 'thor-dflash[cuda]' (got: {e})"
        ) from e
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as e:
        raise EngineError(
            f"engine cuda must have NVRTC: pip install 'thor-dflash[cuda]' (got: {e})"
        ) from e
    return nvrtc


def _check(result: Any, what: str) -> Any:
    [value] = _check_all(result, what)
    return value


def _check_all(result: Any, what: str) -> tuple[Any, ...]:
    status, *values = result
    if int(status) != 0:
        raise EngineError(f"{what} must succeed (got {status.name})")
    return tuple(values)


def _bytes(size: Any, get: Any, program: Any) -> bytes:
    buffer: bytes = b"\0" * int(_check(size(program), size.__name__))
    _check_all(get(program, buffer), get.__name__)
    return buffer


def _text(size: Any, get: Any, program: Any) -> str:
    return _bytes(size, get, program).rstrip(b"\0").decode(errors="replace")
