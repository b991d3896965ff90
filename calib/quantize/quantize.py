"""Runs a plan: reads each unit of work twice (the largest value, then the codes), writes it, notes
it. Memory holds a few chunks of rows and the codes that wait to be written.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import ParamSpec, TypeVar

import numpy as np

from thor_dflash.builders.checkpoint.quantized_matrix import WeightFormat, finite
from thor_dflash.calib.quantize import fp8, nvfp4
from thor_dflash.calib.quantize.cuda_encoder import CHUNK as GPU_CHUNK
from thor_dflash.calib.quantize.cuda_encoder import CudaEncoder, Scaling
from thor_dflash.calib.quantize.linear_rows import LinearRows, TensorReader
from thor_dflash.calib.quantize.plan import QuantizePlan, WorkUnit
from thor_dflash.calib.quantize.staged_checkpoint import Row, StagedCheckpoint
from thor_dflash.calib.quantize.statistics import input_of
from thor_dflash.calib.quantize.tensors import OutputTensor
from thor_dflash.calib.quantize.unit_processes import Advance, run_units
from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.quantize import QuantizeConfig
from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.progress import Progress, ProgressTask
from thor_dflash.core.tensors import DType

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

COPY_PIECE = 1 << 20
"""Bytes copied at a time."""
AHEAD = 4
"""Chunks of rows per thread that may wait to be written."""
UNHASHED = 16
"""Parts of a tensor that may wait for their hash."""
MOST_PROCESSES = 16
"""Each has some 40 MB, and more of them than this wait for the disk."""
MOST_THREADS = 4
"""More wait for Python's lock and are slower: measured on 64 cores."""
SMALL = 1 << 26
"""Bytes of a source for which processes are not worth their start."""


def processes(config: QuantizeConfig) -> int:
    """Return how many processes encode."""
    return config.threads or min(MOST_PROCESSES, len(os.sched_getaffinity(0)))


@dataclass(slots=True)
class Workers:
    """Threads that work on chunks in order. numpy's loops run beside each other."""

    pool: Executor
    count: int

    def each(self, work: Callable[[T], S], items: Iterable[T]) -> Iterator[S]:
        """Yield work(item) in the order of the items, with few results waiting."""
        waiting: deque[Future[S]] = deque()
        for item in items:
            waiting.append(self.pool.submit(work, item))
            if len(waiting) >= AHEAD * self.count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class _Inline(Executor):
    """Runs at once what it is given: a process of several needs no threads."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = Future[T]()
        future.set_result(fn(*args, **kwargs))
        return future


class _Output:
    """One tensor being written from its beginning to its end."""

    def __init__(self, stage: StagedCheckpoint, tensor: OutputTensor, hashing: Executor) -> None:
        self._stage, self.tensor, self._hashing = stage, tensor, hashing
        self._at, self._hash = 0, hashlib.sha256()
        self._waiting: deque[Future[None]] = deque()

    def write(self, data: bytes) -> None:
        self._waiting.append(self._hashing.submit(self._hash.update, data))
        self._stage.write(self.tensor.name, self._at, data)
        self._at += len(data)
        if len(self._waiting) > UNHASHED:
            self._waiting.popleft().result()

    def entry(self) -> list[object]:
        while self._waiting:
            self._waiting.popleft().result()
        return [self._at, self._hash.hexdigest()]


def quantize(
    plan: QuantizePlan,
    reader: TensorReader,
    stage: StagedCheckpoint,
    progress: Progress,
    gpu: CudaEncoder | None = None,
) -> tuple[Row, ...]:
    """Write all units that an earlier run has not written; return the journal's line of each.

    gpu: encodes NVFP4; None: the CPU does.
    Raises: CheckpointError for a weight that is infinite or NaN; EngineError of the GPU, or if a
        process is killed.
    """
    done = stage.finished(progress)
    left = [unit for unit in plan.units if unit.label not in done]
    total = sum(unit.reads for unit in plan.units)
    count, reads = processes(plan.config), sum(unit.reads for unit in left)
    kept = all(kind in (None, WeightFormat.BF16) for kind in plan.kinds.values())
    label = "writing" if kept else "quantising"
    with progress.task(label, total, "bytes") as task:
        task.advance(total - reads)
        if gpu or count == 1 or reads < SMALL:
            rows = _in_threads(left, min(count, MOST_THREADS), plan, reader, stage, task, gpu)
        else:
            rows = _in_processes(left, min(count, len(left)), plan, reader, stage, task)
    done |= {row["unit"]: row for row in rows}
    return tuple(done[unit.label] for unit in plan.units)


def _in_processes(
    left: Sequence[WorkUnit],
    count: int,
    plan: QuantizePlan,
    reader: TensorReader,
    stage: StagedCheckpoint,
    task: ProgressTask,
) -> list[Row]:
    def work(unit: WorkUnit, advance: Advance) -> Row:
        inline = _Inline()
        row = _Runner(plan, stage, reader, Workers(inline, 1), inline, advance, None).run(unit)
        stage.flush(row)
        return row

    rows: list[Row] = []

    def finished(row: Row) -> None:
        stage.note(row)
        rows.append(row)

    run_units(left, count, stage.leave_lock, work, task, finished)
    return rows


def _in_threads(
    left: Sequence[WorkUnit],
    count: int,
    plan: QuantizePlan,
    reader: TensorReader,
    stage: StagedCheckpoint,
    task: ProgressTask,
    gpu: CudaEncoder | None,
) -> list[Row]:
    rows: list[Row] = []
    with (
        ThreadPoolExecutor(count) as pool,
        ThreadPoolExecutor(2) as disk,
        ThreadPoolExecutor(1) as hashing,
    ):
        runner = _Runner(plan, stage, reader, Workers(pool, count), hashing, task, gpu)
        flushed: Future[None] | None = None
        for unit, following in zip_longest(left, left[1:]):
            # While a unit is encoded, the disk writes the one before and reads the next one.
            if following:
                disk.submit(reader.prefetch, runner.sources(following))
            rows.append(runner.run(unit))
            if flushed:
                flushed.result()
            flushed = disk.submit(stage.finish_unit, rows[-1])
        if flushed:
            flushed.result()
    return rows


def encoder(plan: QuantizePlan) -> AbstractContextManager[CudaEncoder | None]:
    """Return the GPU that a plan wants, or None.

    Raises: EngineError: there is no such device, driver or compiler.
    """
    config = EngineConfig()
    if plan.config.device == "cpu" or WeightFormat.NVFP4 not in plan.kinds.values():
        return nullcontext()
    return CudaEncoder(config.device, config.cubins_directory)


@dataclass(frozen=True, slots=True)
class _Runner:
    plan: QuantizePlan
    stage: StagedCheckpoint
    reader: TensorReader
    workers: Workers
    hashing: Executor
    """Of one thread, so that the parts of a tensor keep their order."""
    task: Advance
    gpu: CudaEncoder | None

    def sources(self, unit: WorkUnit) -> list[str]:
        """The stored tensors that a unit reads."""
        names = [self.plan.source.linears[name].codes for name in unit.linears]
        copied = () if unit.kind else unit.tensors
        return names + [tensor.name for tensor in copied if tensor.name not in self.plan.scalars]

    def run(self, unit: WorkUnit) -> Row:
        outputs = {
            tensor.name: _Output(self.stage, tensor, self.hashing) for tensor in unit.tensors
        }
        flushed, zero, tiny = dict[str, int](), list[str](), list[str]()
        if unit.kind is None:
            for name, output in outputs.items():
                if name in self.plan.scalars:
                    output.write(np.float32(self.plan.scalars[name]).tobytes())
                else:
                    self._copy(output)
        linears = {n: LinearRows.of(self.reader, self.plan.source.linears[n]) for n in unit.linears}
        amax = {name: self._amax(rows) for name, rows in linears.items()}
        largest = max(amax.values(), default=0.0)
        parts = iter(outputs.values())
        for name, rows in linears.items():
            if unit.kind is WeightFormat.NVFP4:
                codes, scales, scale2 = next(parts), next(parts), next(parts)
                flushed[name] = self._nvfp4(rows, largest, codes, scales, scale2)
                tiny += [name] * bool(0 < largest < nvfp4.LEAST_AMAX)
            elif unit.kind is WeightFormat.FP8:
                self._fp8(rows, amax[name], next(parts), next(parts))
            else:
                self._bf16(rows, next(parts))
            if unit.kind in self.plan.calibrated:
                next(parts).write(self._input_scale(name, unit.kind).tobytes())
            zero += [name] * (amax[name] == 0)
        return {
            "unit": unit.label,
            "tensors": {name: output.entry() for name, output in outputs.items()},
            "flushed": {name: n for name, n in flushed.items() if n},
            "zero": zero,
            "tiny": tiny,
        }

    def _input_scale(self, name: str, kind: WeightFormat) -> np.float32:
        assert self.plan.statistics is not None
        amax = self.plan.statistics.inputs[input_of(name)].amax
        if kind is WeightFormat.FP8:
            return fp8.tensor_scale(amax)
        return self._written(nvfp4.tensor_scale(amax), f"activations of {name}", amax)

    def _written(self, scale: np.float32, what: str, amax: float) -> np.float32:
        """Return a second scale of NVFP4 as the dialect stores it.

        Raises: CheckpointError if its reciprocal is infinite.
        """
        if self.plan.config.dialect == "modelopt":
            return scale
        with np.errstate(over="ignore"):
            divisor = np.float32(1) / scale
        if not np.isfinite(divisor):
            raise CheckpointError(
                f"{what} must have a largest value whose scale is no subnormal number for "
                f"compressed-tensors (got {amax})"
            )
        return divisor

    def _copy(self, output: _Output) -> None:
        name, size = output.tensor.name, output.tensor.nbytes
        dtype = self.reader.shards.entry(name).dtype

        def piece(at: int) -> bytes:
            data = self.reader.read(name, at, min(COPY_PIECE, size - at))
            where = f"{self.reader.shards.placed(name)}, from value {at // dtype.itemsize} on,"
            finite(np.frombuffer(data, dtype), where)
            return data

        for data in self.workers.each(piece, range(0, size, COPY_PIECE)):
            output.write(data)
            self.task.advance(len(data))

    def _amax(self, rows: LinearRows) -> float:
        return max(self.workers.each(lambda span: rows.amax(*span), rows.chunks()))

    def _nvfp4(
        self,
        rows: LinearRows,
        largest: float,
        codes: _Output,
        scales: _Output,
        scale2: _Output,
    ) -> int:
        """Write one linear; return how many of its blocks may have lost their values."""
        flushed = 0
        for made in self._encoded(rows, largest):
            codes.write(made.codes.tobytes())
            scales.write(made.scales.tobytes())
            flushed += made.flushed
            self._advance(rows, len(made.codes))
        placed = self.reader.shards.placed(rows.linear.codes)
        scale2.write(self._written(nvfp4.tensor_scale(largest), placed, largest).tobytes())
        return flushed

    def _encoded(self, rows: LinearRows, largest: float) -> Iterator[nvfp4.EncodedRows]:
        method, weights = self.plan.config.method, None
        second = nvfp4.tensor_scale(largest)
        if method == "act" and self.plan.statistics:
            inputs = self.plan.statistics.inputs[input_of(rows.linear.name)]
            weights = nvfp4.channel_weights(inputs.energy)

        def encode(span: tuple[int, int]) -> nvfp4.EncodedRows:
            if not largest:
                return nvfp4.zero_rows(span[1] - span[0], rows.shape[1])
            blocks = nvfp4.as_blocks(rows.read(*span))
            found = nvfp4.rounded_scales(blocks, second)
            if method != "rtn":
                found = nvfp4.searched_scales(blocks, np.float32(largest), weights)
            return nvfp4.encode(blocks, found, second)

        if self.gpu is None or not largest:
            yield from self.workers.each(encode, rows.chunks())
            return
        scaling = Scaling.of(method, largest, weights)
        for part in self.workers.each(lambda span: rows.narrow(*span), rows.chunks(GPU_CHUNK)):
            yield self.gpu.encode(part, scaling)

    def _fp8(self, rows: LinearRows, amax: float, codes: _Output, scale: _Output) -> None:
        theirs = self.plan.config.dialect == "compressed-tensors"
        whole = fp8.tensor_scale(amax)
        dtype = self.reader.shards.entry(rows.linear.codes).dtype
        # Only modelopt divides in the type of the weights.
        quotient = np.dtype(np.float32) if theirs or rows.scale is not None else dtype

        def encode(span: tuple[int, int]) -> tuple[bytes, bytes, int]:
            weights = rows.read(*span)
            own = fp8.row_scales(weights) if theirs else whole
            kept = own.tobytes() if theirs else b""
            return fp8.encode(weights, own, quotient).tobytes(), kept, len(weights)

        for made, kept, count in self.workers.each(encode, rows.chunks()):
            codes.write(made)
            scale.write(kept)
            self._advance(rows, count)
        if not theirs:
            scale.write(whole.tobytes())

    def _bf16(self, rows: LinearRows, codes: _Output) -> None:
        def convert(span: tuple[int, int]) -> tuple[bytes, int]:
            weights = rows.read(*span).astype(DType.BF16.numpy)
            return weights.tobytes(), len(weights)

        for made, count in self.workers.each(convert, rows.chunks()):
            codes.write(made)
            self._advance(rows, count)

    def _advance(self, rows: LinearRows, count: int) -> None:
        entry = self.reader.shards.entry(rows.linear.codes)
        self.task.advance((entry.end - entry.begin) // rows.shape[0] * count)
