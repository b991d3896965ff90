"""Time to quantise one full-size layer of Qwen3.6-27B by each method: of one thread, or of a GPU.

python -m thor_dflash.calib.studies.quantize_layer [--rows N] [--device cuda] [--json]

The weights are random and made on the way, outside the clock; nothing is read or written. Without
--rows, every row of the layer's linears is quantised.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from thor_dflash.builders.synthetic import QWEN36_27B
from thor_dflash.calib.quantize import fp8, nvfp4
from thor_dflash.calib.quantize.classes import class_of
from thor_dflash.calib.quantize.cuda_encoder import CHUNK as GPU_CHUNK
from thor_dflash.calib.quantize.cuda_encoder import CudaEncoder, Scaling
from thor_dflash.calib.quantize.linear_rows import CHUNK, LinearRows
from thor_dflash.calib.studies import script
from thor_dflash.calib.synthetic.random_tensors import RandomReader, random_target
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Progress, choose
from thor_dflash.core.tensors import DType

METHODS = ("rtn", "mse", "act", "fp8")
RUNS = 10
"""Runs of the kernel for each linear."""
WHOLE = 25.6e9
"""Weights of the 27B's linears."""
LAYER = "layers.0."
"""A GDN layer: three of four are."""


def linears(rows: int | None) -> Iterator[LinearRows]:
    """Yield the quantised linears of the layer, cut to so many rows."""
    target = random_target(replace(QWEN36_27B, layers=QWEN36_27B.layers[:4]))
    reader = RandomReader(target.shards, drafter=False)
    for name, linear in target.linears.items():
        if name.startswith(LAYER) and class_of(name):
            found = LinearRows.of(reader, linear)
            count, columns = found.shape
            yield replace(found, shape=(min(rows or count, count), columns))


def seconds(linear: LinearRows, method: str) -> float:
    """Return the CPU time of quantising a linear, less that of making its weights."""
    energy = np.random.default_rng(0).lognormal(0, 1, linear.shape[1]).astype(np.float32)
    weights = nvfp4.channel_weights(energy) if method == "act" else None
    amax = max(linear.amax(*span) for span in linear.chunks(CHUNK * 64))
    second, spent = nvfp4.tensor_scale(amax), 0.0
    for span in linear.chunks():
        rows = linear.read(*span)
        start = time.thread_time()
        if method == "fp8":
            fp8.encode(rows, fp8.row_scales(rows), DType.F32.numpy)
        else:
            blocks = nvfp4.as_blocks(rows)
            scales = nvfp4.rounded_scales(blocks, second)
            if method != "rtn":
                scales = nvfp4.searched_scales(blocks, np.float32(amax), weights)
            nvfp4.encode(blocks, scales, second)
        spent += time.thread_time() - start
    return spent


def measure(found: Sequence[LinearRows], reporter: Progress) -> script.Table:
    """A row for each method."""
    count = weights_of(found)
    table: list[tuple[object, ...]] = [
        ("method", "weights, M", "CPU s", "ns a weight", "27B, CPU min")
    ]
    with reporter.task("quantising", len(METHODS) * len(found), "linears") as task:
        for method in METHODS:
            spent = 0.0
            for linear in found:
                spent += seconds(linear, method)
                task.advance(1)
            each = spent / count
            table.append((method, count / 1e6, spent, each * 1e9, each * WHOLE / 60))
    return table


def weights_of(found: Sequence[LinearRows]) -> int:
    """Weights of some linears."""
    return sum(linear.shape[0] * linear.shape[1] for linear in found)


def measure_gpu(found: Sequence[LinearRows], gpu: CudaEncoder, reporter: Progress) -> script.Table:
    """A row for each method of NVFP4: the kernel alone, and with copies of BF16 rows to the device
    and of codes and scales back, in pieces as `quantize` makes them.
    """
    count = weights_of(found)
    moved = count * (2 + 1 / 2 + 1 / 16)  # BF16 is read, codes and scales are written
    spent = dict.fromkeys(METHODS[:-1], (0.0, 0.0))
    with reporter.task("quantising", len(found), "linears") as task:
        for linear in found:
            rows = linear.narrow(0, linear.shape[0])
            energy = np.random.default_rng(0).lognormal(0, 1, linear.shape[1]).astype(np.float32)
            for method, (kernel, whole) in spent.items():
                factors = nvfp4.channel_weights(energy) if method == "act" else None
                scaling = Scaling.of(method, float(np.abs(rows).max()), factors)
                kernel += gpu.seconds(rows, scaling, RUNS)
                start = time.perf_counter()
                for first, last in linear.chunks(GPU_CHUNK):
                    gpu.encode(rows[first:last], scaling)
                spent[method] = kernel, whole + time.perf_counter() - start
            task.advance(1)
    return [
        ("method", "weights, M", "kernel, ms", "GB/s", "27B, s", "with copies, ms", "27B, s, all"),
        *(
            (
                method, count / 1e6, kernel * 1e3, moved / kernel / 1e9, kernel / count * WHOLE,
                whole * 1e3, whole / count * WHOLE,
            )
            for method, (kernel, whole) in spent.items()
        ),
    ]  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = script.parser(__doc__, package=False)
    parser.add_argument("--rows", type=script.count, default=None, metavar="N")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    reporter = choose(sys.stderr)
    found = list(linears(args.rows))
    if args.device == "cpu":
        tables = [("one layer", measure(found, reporter))]
    else:
        config = EngineConfig()
        with CudaEncoder(config.device, config.cubins_directory) as gpu:
            tables = [("one layer, GPU", measure_gpu(found, gpu, reporter))]
    reporter.close()
    script.show(tables, as_json=args.json)


if __name__ == "__main__":
    sys.exit(script.run(main))
