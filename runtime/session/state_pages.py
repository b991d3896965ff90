"""The memory that a turn cache keeps states in: pages of equal size, and what goes into each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.sequence_state import is_record
from thor_dflash.runtime.engines.protocol import Tensor, TensorRows


@dataclass(slots=True)
class StatePages:
    """Pages of equal size in the reserved memory. Each holds the rows of one chunk of every cache,
    or a part of a light state.
    """

    nbytes: int
    """Size of a page, bytes."""
    count: int
    """Page i begins at byte i * nbytes of the reserved memory."""
    free: list[int]
    """Ascending."""
    caches: tuple[Tensor, ...]
    """[heads, rows, width] each, rows by position."""
    cache_bytes: int
    """Bytes of one chunk of all of them."""
    light: tuple[tuple[TensorRows, ...], ...]
    """The tensors of a light state, page by page."""
    light_bytes: int
    """Bytes of all of them."""

    @classmethod
    def of(cls, model: ModelRunner) -> StatePages:
        """Pages of one model's states; `model.chunk` must not change any more."""
        layers = model.manifest.drafter.layers if model.manifest.drafter else ()
        full = tuple(f"drafter.{i}." for i, layer in enumerate(layers) if not layer.window)
        caches: list[Tensor] = []
        light: list[TensorRows] = []
        for name, tensor in model.state.tensors.items():
            if name.startswith(("attention.", *full)):
                caches.append(tensor)
            elif not is_record(name):
                light.append(TensorRows(tensor))
        cache_bytes = sum(TensorRows(tensor, 0, model.chunk).nbytes for tensor in caches)
        nbytes = max([cache_bytes, *(rows.nbytes for rows in light)])
        packed: list[list[TensorRows]] = []
        for rows in sorted(light, key=lambda rows: -rows.nbytes):
            fits = (page for page in packed if _size(page) + rows.nbytes <= nbytes)
            if (page := next(fits, None)) is not None:
                page.append(rows)
            else:
                packed.append([rows])
        count = model.reuse // nbytes
        return cls(
            nbytes=nbytes,
            count=count,
            free=list(range(count)),
            caches=tuple(caches),
            cache_bytes=cache_bytes,
            light=tuple(tuple(page) for page in packed),
            light_bytes=_size(light),
        )

    def release(self, pages: Sequence[int]) -> None:
        """Make pages free again. Free ones stay in order, so that neighbours are taken together."""
        self.free.extend(pages)
        self.free.sort()

    def chunk_rows(self, index: int, chunk: int) -> list[TensorRows]:
        """The rows of one chunk of every cache."""
        return [TensorRows(tensor, index * chunk, (index + 1) * chunk) for tensor in self.caches]


def _size(parts: Sequence[TensorRows]) -> int:
    return sum(rows.nbytes for rows in parts)


def page_runs(indexes: Sequence[int], pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the longest runs of chunks and pages that are neighbours in both orders: the first
    chunk, the first page, their number. The chunk `indexes[i]`, which ascend, is in `pages[i]`.
    """
    begin = 0
    for end in range(1, len(indexes) + 1):
        last = end == len(indexes)
        if last or {indexes[end] - indexes[end - 1], pages[end] - pages[end - 1]} != {1}:
            yield indexes[begin], pages[begin], end - begin
            begin = end
