"""The key of a build, by which a killed build is resumed: a hash of all that determines what it
writes. Two builds with the same key write the same bytes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from thor_dflash import builders, config, core, package, plugins
from thor_dflash.config.build import BuildConfig

if TYPE_CHECKING:
    from thor_dflash.builders.tensorrt.engine import TensorRTBuilder

_READ = (".json", ".safetensors", ".jinja")
"""Suffixes of the checkpoint files that a build reads."""
_CODE = (".py", ".cu", ".cuh")
_LIBRARIES = ("ml-dtypes", "numpy", "onnx")
"""Libraries that convert weights and write graphs."""


def build_key(
    config: BuildConfig,
    checkpoints: Iterable[Path],
    draft_ids: NDArray[np.int32] | None,
    by: TensorRTBuilder | None,
) -> str:
    """Hash the configuration, the code, the draft ids, and path, size and time of each file of the
    checkpoints; for a TensorRT package also its version and the device.
    """
    device = (by.version, by.device.name, by.device.device) if by else ()
    digest = hashlib.sha256(repr((config, code(), device)).encode())
    if draft_ids is not None:
        digest.update(draft_ids.tobytes())
    for directory in checkpoints:
        for line in inventory(directory):
            digest.update(os.fsencode(line))
    return digest.hexdigest()


@cache
def code(*more: Path) -> str:
    """Hash the sources, and those in `more` folders: the version alone does not change with each
    edit of a checkout.
    """
    digest = hashlib.sha256()
    for name in _LIBRARIES:
        digest.update(f"{name} {importlib.metadata.version(name)}\n".encode())
    folders = [Path(each.__path__[0]) for each in (config, core, package, builders, plugins)]
    for path in sorted(path for folder in (*folders, *more) for path in folder.rglob("*")):
        if path.suffix in _CODE:
            text = path.read_bytes()
            digest.update(f"\0{path.name}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


def inventory(directory: Path) -> Iterator[str]:
    """Yield a line with path, size and time of each file of a checkpoint that a build reads."""
    for path in sorted(directory.iterdir()):
        if path.suffix not in _READ:
            continue  # a log, or the package itself, as with `--target . --out planner`
        # A dangling link is not followed: it may be a file that the build does not need.
        stat = path.stat() if path.exists() else path.lstat()
        yield f"{os.path.realpath(path)} {stat.st_size} {stat.st_mtime_ns}\n"
