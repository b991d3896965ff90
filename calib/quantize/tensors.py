"""The tensors of a quantised linear in both dialects: names, types and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from thor_dflash.builders.checkpoint.quantized_matrix import WeightFormat
from thor_dflash.builders.checkpoint.shards import TYPES
from thor_dflash.plugins.numpy_math import NVFP4_GROUP

TYPE_NAMES = {dtype: name for name, dtype in TYPES.items()}
"""Element type -> its name in a safetensors header."""


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of the checkpoint to write."""

    name: str
    dtype: str
    """As in a safetensors header."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size, bytes."""
        return TYPES[self.dtype].itemsize * prod(self.shape)


def quantised(
    stem: str, kind: WeightFormat, shape: tuple[int, int], dialect: str, *, calibrated: bool
) -> Iterator[OutputTensor]:
    """Yield the tensors of the linear `stem` of `shape` [N, K]: its codes; for NVFP4 its block
    scales; its scale, but not of BF16; if `calibrated`, that of its rows, which FP8 of
    compressed-tensors never has.
    """
    rows, columns = shape
    if kind is WeightFormat.BF16:
        yield OutputTensor(f"{stem}.weight", "BF16", shape)
        return
    theirs = dialect == "compressed-tensors"
    if kind is WeightFormat.FP8:
        yield OutputTensor(f"{stem}.weight", "F8_E4M3", shape)
        yield OutputTensor(f"{stem}.weight_scale", "F32", (rows, 1) if theirs else ())
        if calibrated and not theirs:
            yield OutputTensor(f"{stem}.input_scale", "F32", ())
        return
    suffix, scale = ("_packed", "weight_global_scale") if theirs else ("", "weight_scale_2")
    yield OutputTensor(f"{stem}.weight{suffix}", "U8", (rows, columns // 2))
    yield OutputTensor(f"{stem}.weight_scale", "F8_E4M3", (rows, columns // NVFP4_GROUP))
    yield OutputTensor(f"{stem}.{scale}", "F32", (1,) if theirs else ())
    if calibrated:
        name = "input_global_scale" if theirs else "input_scale"
        yield OutputTensor(f"{stem}.{name}", "F32", (1,) if theirs else ())
