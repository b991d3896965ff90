"""The figures of a bench: their targets and verdicts, and a prediction of the same bytes' time on a
Jetson Thor.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from thor_dflash.core.progress import Progress
from thor_dflash.runtime.measure.cuda_bench import BATCH, CudaBench, operators

CONTEXT, LONG = 2048, (8192, 32768)
"""Tokens in the cache."""
ROUNDS = 6
"""Rounds of a comparison of two contexts; even, so that each comes first equally often."""
PROMPT, CYCLES = 2048, 100
REPEATED = 5.0
"""Seconds of cycles without rest."""
WIDTHS = (1, 32)
"""Rows of the other verify steps that the verify is compared with."""
CYCLE = ("propose", "verify", "accept", "observe")
LINEARS = ("linear", "head")
DRAFTS = ("draft_conv", "selector")
"""Operators of DFlash2."""
THOR_READ = 259.7e9
"""Bytes per second a Jetson Thor reads in a long stream. Source: ApxInf, doc/THOR-ROOFLINE.md."""

Verdict = Literal["", "missed", "reached", "aim"]


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """The required and the desired value of a figure."""

    must: float
    aim: float
    at_least: bool = False
    """True: both are lower limits. False: both are upper limits."""


TARGETS: Mapping[str, BenchTarget] = {
    "linears of a verify, share of read rate": BenchTarget(85, 92, at_least=True),
    "the same linears at 1 row": BenchTarget(1.02, 1.02),
    "the same linears at 32 rows": BenchTarget(1.15, 1.15),
    "gdn of a verify": BenchTarget(0.40, 0.25),
    f"verify at {CONTEXT}": BenchTarget(6.1, 5.4),
    f"cycle at {CONTEXT}": BenchTarget(7.0, 6.1),
    "plain step": BenchTarget(1.02, 1.02),
    **{f"growth from {CONTEXT} to {length}": BenchTarget(1.15, 1.10) for length in LONG},
    f"prefill of {PROMPT} tokens": BenchTarget(0.40, 0.20),
    "host time of a cycle outside the graph": BenchTarget(3, 1),
}
"""Source: the issue that asked for the engine, for Qwen3.6-27B in NVFP4 on an H100."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    section: str
    name: str
    value: float
    unit: str
    note: str = ""
    must: float | None = None
    aim: float | None = None
    verdict: Verdict = ""


def judged(name: str, value: float, unit: str, note: str = "") -> Figure:
    """A figure that has a target."""
    target = TARGETS[name]
    return judge(Figure("figures", name, value, unit, note), target)


def judge(figure: Figure, target: BenchTarget) -> Figure:
    """Add a target and its verdict to a figure."""
    sign = -1 if target.at_least else 1
    verdict: Verdict = "missed"
    if sign * figure.value <= sign * target.must:
        verdict = "reached"
    if sign * figure.value <= sign * target.aim:
        verdict = "aim"
    return dataclasses.replace(figure, must=target.must, aim=target.aim, verdict=verdict)


def figures(bench: CudaBench, progress: Progress) -> Iterator[Figure]:
    """Measure everything in one process: the real loop first, while nothing else is captured, then
    the steps and their parts.
    """
    with progress.task("measuring the loop"):
        loop = [*_loop(bench)]
    captured = bench.captured()
    with progress.task("measuring the read rate"):
        read = bench.bandwidth()
    yield Figure("device", bench.device, read / 1e9, "GB/s", "read bandwidth of this process")
    with progress.task("measuring the steps"):
        bench.at(CONTEXT, bench.block)
        times = {name: bench.steps([name]).median for name in CYCLE}
        times["linears"] = bench.steps(["verify"], operators(*LINEARS)).median
        times["gdn"] = bench.steps(["verify"], operators("gdn")).median
        times["attention"] = bench.steps(["verify"], operators("verify_attention")).median
        times["cycle"] = bench.steps(CYCLE).median
        yield from _steps(bench, times, read)
    yield from loop
    with progress.task("measuring without rest"):
        yield _without_rest(bench)
    with progress.task("measuring each operator and the weights"):
        yield from _operators(bench, times)
        yield from _kinds(bench, read)
    with progress.task("measuring long contexts"):
        yield from _contexts(bench, read)
    yield from _memory(bench, captured)
    yield from _tuned(bench)
    yield from predicted(bench, times, read)


def _loop(bench: CudaBench) -> Iterator[Figure]:
    seconds = bench.prefill(PROMPT)
    note = f"{PROMPT / seconds:.0f} tokens/s in chunks of {bench.chunk}"
    yield judged(f"prefill of {PROMPT} tokens", seconds, "s", note)
    loop = bench.loop(CONTEXT, CYCLES)
    yield judged(
        "host time of a cycle outside the graph",
        100 * loop.host / loop.clock,
        "%",
        f"{1e6 * loop.host:.0f} us (mean {1e6 * loop.mean:.0f}); {1e3 * loop.clock:.3f} ms by the "
        f"clock, {1e3 * loop.graph:.3f} ms in the graph",
    )


def _without_rest(bench: CudaBench) -> Figure:
    """The sustained time of a cycle; all other steps are timed after a rest."""
    found = bench.repeated(CYCLE, REPEATED)
    note = f"{found.low:.3f} to {found.high:.3f} ms, medians of {BATCH} in {REPEATED:.0f} s"
    return Figure("without rest", f"cycle at {CONTEXT}", found.median, "ms", note)


def _steps(bench: CudaBench, times: Mapping[str, float], read: float) -> Iterator[Figure]:
    size, linears, verify = bench.bytes("verify", LINEARS), times["linears"], times["verify"]
    count = bench.launches(["verify"])
    yield judged(
        "linears of a verify, share of read rate",
        100 * size / linears * 1e3 / read,
        "%",
        f"{linears:.3f} ms for {size / 1e9:.2f} GB",
    )
    for rows in WIDTHS:
        other = bench.steps([f"verify.{rows}"], operators(*LINEARS)).median
        name = f"the same linears at {rows} row" + "s" * (rows > 1)
        yield judged(name, other / linears, "x", f"{other:.3f} ms, against {bench.block} rows")
    state = bench.state_bytes()
    yield judged("gdn of a verify", times["gdn"], "ms", f"{state / 1e6:.0f} MB of state")
    yield judged(f"verify at {CONTEXT}", verify, "ms", f"{count} launches")
    yield judged(
        f"cycle at {CONTEXT}", times["cycle"], "ms", f"{bench.launches(CYCLE)} launches, one graph"
    )
    plain = bench.steps(["verify", "accept"]).median
    yield judged("plain step", plain / verify, "x", f"{plain:.3f} ms, against the verify")


def _contexts(bench: CudaBench, read: float) -> Iterator[Figure]:
    """Compare a verify with a long context and one with a short, ROUNDS times, back to back: their
    difference is smaller than the drift of a verify's time with the clocks over minutes.
    """
    each, whole = bench.cache_bytes(), _verify_bytes(bench)
    for length in LONG:
        rounds = [_pair(bench, length, longer_first=i % 2 == 1) for i in range(ROUNDS)]
        grown = statistics.median(longer - short for short, longer in rounds)
        times = statistics.median(longer / short for short, longer in rounds)
        longer = statistics.median(longer for _, longer in rounds)
        more = each * (length - CONTEXT)
        least = more / read * 1e3
        yield judged(
            f"growth from {CONTEXT} to {length}",
            grown / least,
            "x",
            f"verify {longer:.3f} ms, +{grown:.3f} for {more / 1e6:.0f} MB of cache, {least:.3f} "
            f"at read rate; {times:.3f} times as long for {1 + more / whole:.3f} times the bytes",
        )


def _pair(bench: CudaBench, length: int, *, longer_first: bool) -> tuple[float, float]:
    """Milliseconds of a verify at CONTEXT and at `length`."""
    found: dict[int, float] = {}
    for at in (length, CONTEXT) if longer_first else (CONTEXT, length):
        bench.at(at, bench.block)
        found[at] = bench.steps(["verify"]).median
    return found[CONTEXT], found[length]


def _operators(bench: CudaBench, times: Mapping[str, float]) -> Iterator[Figure]:
    parts = {"gdn": times["gdn"], "verify_attention": times["attention"]}
    parts |= {op: bench.steps(["verify"], operators(op)).median for op in LINEARS}
    parts["embed, concat"] = bench.steps(["verify"], operators("embed", "concat")).median
    for op, ms in parts.items():
        yield Figure("operators, each alone", f"verify: {op}", ms, "ms")
    used = bench.operators("propose")
    for op in (o for o in ("linear", "head", "draft_attention", *DRAFTS) if o in used):
        ms = bench.steps(["propose"], operators(op)).median
        yield Figure("operators, each alone", f"propose: {op}", ms, "ms")
    for name in ("propose", "accept", "observe"):
        note = f"{bench.launches([name])} launches"
        yield Figure("operators, each alone", name, times[name], "ms", note)


def _kinds(bench: CudaBench, read: float) -> Iterator[Figure]:
    for kind, share in bench.shares("verify", LINEARS).items():
        ms = bench.steps(["verify"], share.__contains__).median
        count = len(share.names)
        rate = share.nbytes / ms * 1e3 / read
        note = f"{count} x {share.nbytes / count / 1e6:.1f} MB, {rate:.0%} of read rate"
        yield Figure("linears of a verify, one by one", kind, 1e3 * ms / count, "us", note)


def _memory(bench: CudaBench, captured: int) -> Iterator[Figure]:
    parts = {**bench.memory, "graphs": captured}
    for kind, size in parts.items():
        yield Figure("memory", kind, size / 1e6, "MB")
    yield Figure("memory", "together", sum(parts.values()) / 1e6, "MB")


def _tuned(bench: CudaBench) -> Iterator[Figure]:
    """The launches that are not the rules', and by how much each was faster when it was tuned."""
    for one in bench.engine.tuned_launches:
        yield Figure("tuned launches, gain of each", one.name, one.gain, "us", one.text)


def _verify_bytes(bench: CudaBench) -> int:
    """What a verify at CONTEXT must read: weights, state and cache."""
    cache = bench.cache_bytes() * CONTEXT
    return bench.bytes("verify", LINEARS) + bench.state_bytes() + cache


def predicted(bench: CudaBench, times: Mapping[str, float], read: float) -> Iterator[Figure]:
    """Predict times at the share of the read rate that was measured here. The fixed cost of a
    launch is scaled like bytes, so the prediction for short kernels is pessimistic.
    """
    linears, state = bench.bytes("verify", LINEARS), bench.state_bytes()
    cache = bench.cache_bytes() * CONTEXT
    draft = bench.bytes("propose", LINEARS)
    context = bench.bytes("observe", LINEARS)
    verify = _verify_bytes(bench)
    for name, key, size in (
        ("linears of a verify", "linears", linears),
        ("gdn of a verify", "gdn", state),
        (f"attention at {CONTEXT}", "attention", cache),
        (f"verify at {CONTEXT}", "verify", verify),
        ("propose", "propose", draft),
        (f"cycle at {CONTEXT}", "cycle", verify + draft + context),
    ):
        share = size / times[key] * 1e3 / read
        least = 1e3 * size / THOR_READ
        note = f"{size / 1e9:.3f} GB, {share:.1%} of read rate; at all of it {least:.2f} ms"
        yield Figure("predicted on a Jetson Thor", name, least / share, "ms", note)


def brief(bench: CudaBench, label: str, whole: Mapping[str, float]) -> Iterator[Figure]:
    """Times of a verify and a cycle with one feature left out, relative to those in `whole`."""
    bench.at(CONTEXT, bench.block)
    for name, steps in (("verify", ("verify",)), ("cycle", CYCLE)):
        ms = bench.steps(steps).median
        note = f"{ms / whole[name]:.2f}x, {bench.launches(steps)} launches"
        yield Figure("ablations", f"{label}: {name}", ms, "ms", note)


def table(rows: Sequence[Figure]) -> str:
    """The figures as aligned text, by section in order of first appearance."""
    wide = max((len(row.name) for row in rows), default=0)
    lines: list[str] = []
    for section in dict.fromkeys(row.section for row in rows):
        here = [row for row in rows if row.section == section]
        head = f"{'value':>10}" + (f"{'must':>12}{'aim':>8}" if here[0].must is not None else "")
        lines += ["", f"{section:<{wide + 2}}{head}"]
        lines += [f"  {row.name:<{wide}}{_line(row)}".rstrip() for row in here]
    return "\n".join(lines[1:])


def _line(row: Figure) -> str:
    text = f"{row.value:>10.3f} {row.unit:<4}"
    if row.must is not None:
        text += f"{row.must:>7g}{row.aim:>8g}  {row.verdict:<8}"
    return f"{text} {row.note}"
