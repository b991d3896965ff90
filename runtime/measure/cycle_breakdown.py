"""Times the parts of a cycle of a loaded package: each graph, and each kind of call in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from thor_dflash.core.progress import Progress
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.engines.cuda.launch_runner import LaunchRunner
from thor_dflash.runtime.measure.cuda_bench import CudaBench, operators
from thor_dflash.runtime.measure.profile import CycleBreakdown, ProfilePart

PRODUCTS = ("linear", "head")
"""Operators whose calls are listed by kind."""
KNOWN = ("gdn", "verify_attention", "draft_attention", "draft_conv", "selector")
"""Operators that are listed by themselves; all others are listed together."""
ENOUGH = 512 << 20
"""Fewest bytes of weights to measure the read rate with: ten times the L2 cache of an H100."""


def take_apart(
    engine: CudaEngine, model: ModelRunner, graphs: Sequence[str], cubins: Path, progress: Progress
) -> CycleBreakdown:
    """Time the parts of a cycle at the sequence's current context. Destroys the sequence's state.

    Args:
        graphs: The graphs of a cycle, in order.
        cubins: Directory of compiled kernels.
    """
    bench = CudaBench(engine, model, LaunchRunner(engine.driver, cubins), {}, 0)
    context = model.state.length
    bench.at(context, model.state.accepted)
    with progress.task("taking a cycle apart"):
        read = bench.bandwidth() if engine.memory["weights"] >= ENOUGH else 0.0
        cycle = bench.steps(graphs).median
        parts = tuple(part for graph in graphs for part in _parts(bench, graph, context))
    return CycleBreakdown(context, cycle, read, parts)


def _parts(bench: CudaBench, graph: str, context: int) -> Iterator[ProfilePart]:
    sizes = {"gdn": bench.state_bytes(), "verify_attention": bench.cache_bytes() * context}
    here = bench.operators(graph)
    sizes = {op: size for op, size in sizes.items() if op in here}
    whole = bench.bytes(graph, PRODUCTS) + sum(sizes.values())
    yield ProfilePart(graph, "", bench.steps([graph]).median, whole)
    if len(here) == 1:
        return
    for kind, share in bench.shares(graph, PRODUCTS).items():
        yield ProfilePart(
            graph, kind, bench.steps([graph], share.__contains__).median, share.nbytes
        )
    for op in KNOWN:
        if op in here:
            ms = bench.steps([graph], operators(op)).median
            yield ProfilePart(graph, op, ms, sizes.get(op, 0))
    if others := [op for op in here if op not in (*PRODUCTS, *KNOWN)]:
        ms = bench.steps([graph], operators(*others)).median
        yield ProfilePart(graph, ", ".join(others), ms, 0)
