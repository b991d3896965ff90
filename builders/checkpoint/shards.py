"""The safetensors files of a directory: every tensor by name, memory-mapped, none loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from thor_dflash.builders.checkpoint.json_fields import Fields, check_directory, shown
from thor_dflash.builders.checkpoint.safetensors_header import TensorEntry, read_header
from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.tensors import Array
from thor_dflash.package.tokenizer_files import present

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Shards:
    """The tensors of a directory. A file stays mapped as long as any of its arrays exists."""

    directory: Path
    stored: Mapping[str, TensorEntry]
    """Stored name -> location."""
    maps: Mapping[Path, NDArray[np.uint8]]
    """File -> its bytes, mapped read-only."""

    @classmethod
    def open(cls, directory: Path) -> Shards:
        """Read and check every header. Raises CheckpointError naming file and tensor."""
        check_directory(directory)
        index = directory / INDEX
        stored = _indexed(directory, index) if present(index) else _alone(directory)
        files = {entry.file for entry in stored.values()}
        return cls(directory, stored, {file: _mapped(file) for file in sorted(files)})

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def placed(self, name: str) -> str:
        """Name a tensor and its file, for messages about its values."""
        return f"{self.entry(name).file}: {name}"

    def entry(self, name: str) -> TensorEntry:
        """Return type, shape and location of a tensor."""
        if name not in self.stored:
            raise CheckpointError(f"{name} must be in the checkpoint (got nothing)")
        return self.stored[name]

    def array(self, name: str) -> Array:
        """Return the tensor as stored: a read-only view of the mapped file."""
        entry = self.entry(name)
        mapped = self.maps[entry.file][entry.begin : entry.end]
        return cast("Array", mapped.view(entry.dtype).reshape(entry.shape))


def _mapped(file: Path) -> NDArray[np.uint8]:
    try:
        return np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} must be readable (got {error})") from error


def _alone(directory: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a directory without an index: those of its only safetensors file, or
    of `model.safetensors` and the files beside it, such as a prediction head.
    """
    files = sorted(directory.glob("*.safetensors"))
    if len(files) > 1 and directory / SINGLE in files:
        stored: dict[str, TensorEntry] = {}
        for file in files:
            _merge(stored, read_header(file))
        return stored
    if len(files) != 1:
        found = ", ".join(file.name for file in files[:3]) or "no .safetensors file"
        more = f" and {len(files) - 3} more" if len(files) > 3 else ""
        raise CheckpointError(
            f"{directory} must hold one {SINGLE}, or several shards with {INDEX}"
            f" (got {found}{more})"
        )
    return read_header(files[0])


def _indexed(directory: Path, index: Path) -> dict[str, TensorEntry]:
    """Return the tensors that an index names, each from the shard that the index gives."""
    places = _weight_map(index)
    files = sorted(set(places.values()))
    if (directory / SINGLE).exists() and SINGLE not in files:
        raise CheckpointError(f"{directory} must hold either {SINGLE} or {INDEX} (got both)")
    stored: dict[str, TensorEntry] = {}
    for file in files:
        _merge(stored, _shard(directory / file, index))
    for name, file in places.items():
        _check_place(name, file, stored, index)
    extra = [name for name in stored if name not in places]
    if extra:
        raise CheckpointError(
            f"{index} must name every tensor of its shards (got {_few(extra)} in"
            f" {stored[extra[0]].file.name}, not in the index)"
        )
    return stored


def _weight_map(index: Path) -> dict[str, str]:
    section = Fields.read(index).section("weight_map")
    for name in section.values:
        file = section.text(name)
        # A shard must be beside its index: a path could name any file on the machine.
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise section.wrong(name, "the name of a .safetensors file beside the index")
    if not section.values:
        raise CheckpointError(f"{index}: weight_map must name tensors (got none)")
    return cast("dict[str, str]", dict(section.values))


def _shard(file: Path, index: Path) -> dict[str, TensorEntry]:
    if not file.is_file():
        raise CheckpointError(f"{file} must be there, {index.name} names it (got nothing)")
    return read_header(file)


def _merge(stored: dict[str, TensorEntry], more: Mapping[str, TensorEntry]) -> None:
    for name, entry in more.items():
        if name in stored:
            files = f"{stored[name].file.name} and {entry.file.name}"
            raise CheckpointError(f"{entry.file}: {name} must be in one shard (got {files})")
        stored[name] = entry


def _check_place(name: str, file: str, stored: Mapping[str, TensorEntry], index: Path) -> None:
    found = stored[name].file.name if name in stored else None
    if found != file:
        raise CheckpointError(f"{index}: {name} must be in {file} (got {shown(found)})")


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    return listed[0] if len(listed) == 1 else f"{listed[0]} and {len(listed) - 1} more"
