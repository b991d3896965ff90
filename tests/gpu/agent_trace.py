"""Replays a recorded trace on the full-size model with random weights and forced answers, and times
the copies of kept states.

    python tests/gpu/agent_trace.py TRACE.jsonl --tokenizer DIR --accept 4.5 [--also 3.5 5.9]
        [--whole NAME ...] [--copies] [--memory] [--from N] [--conversations N] [--seconds S]
        [--reports DIR]

Times are those of a planner with an assumed acceptance. `--also`: every EVERY-th turn is answered
again with these, from the same state, to see that a cycle takes the same time; totals for them are
computed from the cycles of every turn. `--whole`: at the end some conversations without reuse, in
prefill steps of WHOLE_CHUNK rows. Prints figures, as `thor-dflash bench` does.

Where a call has a time limit, `--seconds` ends a replay in time, and `--from` resumes it with the
conversation that it broke off in; agent_whole.py takes the reports together. `--package` rehearses
with a package of any engine instead; what needs a GPU is then left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.agent_thor import REFERENCE_S, SHARE, VENDOR_S, cycles_of

import thor_dflash
from thor_dflash.calib.replay import replay_report
from thor_dflash.calib.replay.recorded_trace import RecordedTrace, read_trace
from thor_dflash.calib.replay.replay_report import ReplayReport, ReplaySubject, ReplayTurn
from thor_dflash.calib.replay.session_replay import SessionReplay
from thor_dflash.cli.commands.bench import random_session
from thor_dflash.cli.report.replay_page import page
from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.tree import Config
from thor_dflash.core import strict_records
from thor_dflash.core.progress import Progress as Reporter
from thor_dflash.core.progress import choose
from thor_dflash.runtime.decoding.proposers import DflashDrafter
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.engines.cuda.launch_runner import LaunchRunner
from thor_dflash.runtime.measure.bench_report import LINEARS, THOR_READ, Figure, table
from thor_dflash.runtime.measure.cuda_bench import CudaBench
from thor_dflash.runtime.session import Request, Session, open_session
from thor_dflash.runtime.session.turn_cache import Conversation, TurnCache

SHAPE = "qwen3.6-27b"
CHUNK, WHOLE_CHUNK = 128, 512
REUSE = 8 << 30
KV_ROWS = 13_440
"""Rows of the caches that are copied out and in: 105 chunks, the median prompt of the trace."""
CONVERSATIONS, TURNS = 200, 400
"""Of the test of memory."""
ROUNDS = 10
EVERY = 12


@dataclass(frozen=True, slots=True)
class Again:
    """A turn that was answered again from the same state."""

    accept: float
    first: ReplayTurn
    second: ReplayTurn


def replayed(
    session: Session,
    trace: RecordedTrace,
    args: argparse.Namespace,
    until: float,
    *,
    reuse: bool,
) -> tuple[ReplayReport, list[Again]]:
    """Replay until the trace or the time ends."""
    found: list[ReplayTurn] = []
    again: list[Again] = []
    aside = 0.0
    begun = time.perf_counter()
    for turn in SessionReplay(session, args.accept, reuse=reuse).run(trace):
        found.append(turn)
        start = time.perf_counter()
        if start > until:
            break
        if reuse and len(found) % EVERY == 0 and not turn.error:
            again += [Again(a, turn, repeated(session, trace, turn, a)) for a in args.also]
            aside += time.perf_counter() - start
    wall = time.perf_counter() - begun - aside
    subject = ReplaySubject(
        version=thor_dflash.__version__,
        trace=trace.sha256,
        conversations=len(trace.conversations),
        turns=trace.turns,
        target=f"cuda on {session.model.engine.device}",
        forced=f"{args.accept:g}",
        settings={
            "package": SHAPE, "chunk": str(session.model.chunk), "reuse": str(reuse),
            "capacity": str(session.model.capacity),
        },
        notes=(f"{SHAPE} with random weights: times are real, texts are not",),
    )  # fmt: skip
    report = ReplayReport(subject, replay_report.totals(found, trace.turns, wall), tuple(found))
    return report, again


def repeated(session: Session, trace: RecordedTrace, turn: ReplayTurn, accept: float) -> ReplayTurn:
    """Answer a turn again."""
    [conversation] = [one for one in trace.conversations if one.name == turn.conversation]
    replay = SessionReplay(session, accept)
    return replay.answer(conversation, conversation.turns[turn.turn - 1], turn.turn)


def others(report: ReplayReport, again: list[Again]) -> Iterator[Figure]:
    """Decoding with other acceptances: the cycles of every turn, each as long as this turn's."""
    good = [turn for turn in report.turns if turn.cycles and turn.decode_ms]
    for accept in dict.fromkeys(one.accept for one in again):
        section = f"trace with {accept:g} tokens per cycle, computed"
        each = [
            (t.decode_ms or 0.0) / (t.cycles or 1) * cycles_of(t.answer_tokens or 0, accept)
            for t in good
        ]
        mine = [one for one in again if one.accept == accept]
        measured = sum(one.second.decode_ms or 0.0 for one in mine)
        want = sum(
            (one.first.decode_ms or 0.0) / (one.first.cycles or 1) * (one.second.cycles or 0)
            for one in mine
        )
        decode = sum(each) / 1e3
        prefill = report.totals.prefill_s or 0.0
        note = f"{len(mine)} turns answered again took {measured / want:.3f} times what it gives"
        cycles = sum(cycles_of(t.answer_tokens or 0, accept) for t in good)
        yield Figure(section, f"cycles at {accept:g}", cycles, "")
        yield Figure(section, f"decode at {accept:g}", decode, "s", note)
        yield Figure(section, f"prefill and decode at {accept:g}", prefill + decode, "s")


def figures(section: str, report: ReplayReport) -> Iterator[Figure]:
    """The totals of a replay."""
    t = report.totals
    values: dict[str, tuple[float | None, str]] = {
        "turns answered": (t.answered, ""),
        "turns missing": (t.missing, ""),
        "wall time": (t.wall_s, "s"),
        "prefill": (t.prefill_s, "s"),
        "decode": (t.decode_s, "s"),
        "prompt tokens": (t.prompt_tokens, ""),
        "prompt tokens read": (t.read_tokens, ""),
        "prefill steps": (t.prefill_steps, ""),
        "answer tokens": (t.answer_tokens, ""),
        "cycles": (t.cycles, ""),
        "tokens per cycle": (t.tokens_per_cycle, ""),
        "enqueuing copies before prefills": (
            sum(turn.swap_ms or 0.0 for turn in report.turns) / 1e3, "s",
        ),
    }  # fmt: skip
    if t.ttft_ms is not None:
        for name in ("p50", "p90", "p99", "high"):
            values[f"time to first token, {name}"] = (vars_of(t.ttft_ms)[name], "ms")
    for name, (value, unit) in values.items():
        if value is not None:
            yield Figure(section, name, value, unit)


def vars_of(spread: replay_report.ReplaySpread) -> dict[str, float]:
    """Its fields."""
    return dataclasses.asdict(spread)


def predicted(session: Session, report: ReplayReport) -> Iterator[Figure]:
    """A Thor's time for the same bytes. Reading bounds a cycle; a prefill step of 128 rows is
    bound by arithmetic as well, for which nothing was measured on a Thor: the bytes give the least.
    """
    engine = session.model.engine
    if not isinstance(engine, CudaEngine):
        return
    runner = LaunchRunner(engine.driver, Config().engine.cubins_directory)
    bench = CudaBench(engine, session.model, runner, {}, 0)
    weights = sum(bench.bytes(name, LINEARS) for name in ("verify", "propose", "observe"))
    fixed, per_token = weights + bench.state_bytes(), bench.cache_bytes()
    reads = sum(
        (t.cycles or 0) * (fixed + per_token * (t.prompt_tokens or 0)) for t in report.turns
    )
    prefill = bench.bytes("verify", LINEARS) + bench.state_bytes()
    steps = sum(
        (t.prefill_steps or 0) * (prefill + per_token * (t.prompt_tokens or 0))
        for t in report.turns
    )
    section = "predicted on a Jetson Thor"
    per_cycle = reads / max(1, sum(t.cycles or 0 for t in report.turns))
    yield Figure(section, "bytes of a cycle, mean", per_cycle / 1e9, "GB")
    yield Figure(section, "bytes of all cycles", reads / 1e12, "TB")
    yield Figure(section, "bytes of all prefill steps", steps / 1e12, "TB")
    for label, share in (("at the share of an H100", SHARE), ("at the whole read rate", 1.0)):
        decode, read = reads / THOR_READ / share, steps / THOR_READ / share
        yield Figure(section, f"decode {label}", decode / 60, "min")
        yield Figure(section, f"prefill {label}, at least", read / 60, "min")
        yield Figure(section, f"both {label}, at least", (decode + read) / 60, "min")
    yield Figure(section, "MLPerf's reference on a Thor", REFERENCE_S / 60, "min", "llama.cpp, Q4")
    yield Figure(
        section, "a vendor's, implied", VENDOR_S / 60, "min", "6.4 times that, if meant so"
    )


# ---- copies and memory ---------------------------------------------------------------------------
def timed(session: Session, work: Callable[[], None]) -> tuple[float, float]:
    """Median milliseconds on the device and of the host alone."""
    engine = session.model.engine
    assert isinstance(engine, CudaEngine)
    whole: list[float] = []
    host: list[float] = []
    for _ in range(ROUNDS + 2):
        engine.driver.synchronize()
        start = time.perf_counter()
        work()
        host.append(1e3 * (time.perf_counter() - start))
        engine.driver.synchronize()
        whole.append(1e3 * (time.perf_counter() - start))
    return statistics.median(whole[2:]), statistics.median(host[2:])


def copies(session: Session) -> Iterator[Figure]:
    """The light state and the caches of KV_ROWS tokens, each out and in."""
    engine, pages = session.model.engine, session.turns.layout()
    chunks = KV_ROWS // session.model.chunk

    def light(copy: Callable[..., None]) -> None:
        for page_at, parts in enumerate(pages.light):
            copy(page_at * pages.nbytes, parts)

    def caches(copy: Callable[..., None]) -> None:
        copy(0, pages.chunk_rows(0, session.model.chunk), chunks, pages.nbytes)

    for name, work, size in (
        ("light state", light, pages.light_bytes),
        (f"caches of {KV_ROWS:,} tokens", caches, chunks * pages.cache_bytes),
    ):
        yield Figure("copies", f"{name}, bytes", size / 1e6, "MB")
        for label, copy in (("out", engine.swap_out), ("in", engine.swap_in)):
            ms, host = timed(session, lambda work=work, copy=copy: work(copy))
            rate = 2 * size / ms / 1e6
            note = f"{rate:.0f} GB/s read and written; {host:.2f} ms of them on the host"
            yield Figure("copies", f"{name}, {label}", ms, "ms", note)


def memory(session: Session) -> Iterator[Figure]:
    """Turns of many conversations in random order, in REUSE bytes."""
    engine, random = session.model.engine, Random(7)
    assert isinstance(engine, CudaEngine)
    texts = [[random.randrange(200_000) for _ in range(random.randint(40, 200))]
             for _ in range(CONVERSATIONS)]  # fmt: skip
    free: list[int] = []
    for turn in range(TURNS):
        who = random.randrange(CONVERSATIONS)
        ids = texts[who]
        ids += [random.randrange(200_000) for _ in range(random.randint(20, 130))]
        conversation = Conversation(boundaries=((len(ids), "prompt"),), session=f"c{who}")
        request = Request(prompt=tuple(ids), max_tokens=2, conversation=conversation)
        for _ in session.run(request, DflashDrafter()):
            pass
        if turn % 20 == 19:
            free.append(engine.driver.free_memory())
    totals, pages = session.turns.totals, session.turns.layout()
    change = f"least change of free memory over {TURNS} turns"
    yield Figure("memory", f"{change} after the first 20", (free[0] - free[-1]) / 1e6, "MB")
    yield Figure("memory", "conversations", CONVERSATIONS, "")
    yield Figure("memory", "reserved for reuse", pages.count * pages.nbytes / 1e9, "GB")
    yield Figure("memory", "in use", session.turns.bytes / 1e9, "GB")
    yield Figure("memory", "boundaries kept", len(session.turns), "")
    yield Figure("memory", "boundaries evicted", sum(totals.evicted.values()), "")
    yield Figure("memory", "swapped out", totals.swapped_out / 1e9, "GB")
    yield Figure("memory", "swapped in", totals.swapped_in / 1e9, "GB")
    yield Figure("memory", "tokens not read", totals.hits, "", f"of {totals.queries:,}")


# ---- main ----------------------------------------------------------------------------------------
def measure(args: argparse.Namespace, reporter: Reporter) -> Iterator[Figure]:
    """Everything that was asked for."""
    until = time.perf_counter() + args.seconds
    trace = read_trace(args.trace)
    last = None if args.conversations is None else args.begin + args.conversations
    part = RecordedTrace(trace.sha256, trace.conversations[args.begin : last])
    with opened(args, reporter) as session:
        steps_of(session, CHUNK)
        if args.copies:
            yield from copies(session)
        if args.memory:
            yield from memory(session)
            steps_of(session, CHUNK)
        if part.conversations:
            yield from with_reuse(session, part, args, until, reporter)
        for name in args.whole:
            found = tuple(one for one in trace.conversations if one.name == name)
            steps_of(session, WHOLE_CHUNK)
            with reporter.task(f"{name} without reuse"):
                one = RecordedTrace(trace.sha256, found)
                whole, _ = replayed(session, one, args, until, reuse=False)
            save(args, f"whole-{name}", whole)
            yield from figures(f"{name} without reuse, steps of {session.model.chunk}", whole)


@contextmanager
def opened(args: argparse.Namespace, reporter: Reporter) -> Generator[Session]:
    """The full size with random weights, or a package."""
    if args.package:
        config = EngineConfig(threads=1)
        with closing(open_session(args.package, config, reporter, reuse=REUSE >> 9)) as session:
            yield session
        return
    config = Config()
    engine = dataclasses.replace(config.engine, chunk=WHOLE_CHUNK)
    config = dataclasses.replace(config, engine=engine)
    with random_session(SHAPE, args.tokenizer, config, REUSE, reporter) as session:
        yield session


def with_reuse(
    session: Session,
    trace: RecordedTrace,
    args: argparse.Namespace,
    until: float,
    reporter: Reporter,
) -> Iterator[Figure]:
    """Replay conversations, and what follows from it."""
    with reporter.task("replaying"):
        report, again = replayed(session, trace, args, until, reuse=True)
    save(args, f"accept-{args.accept:g}" + (f"-from-{args.begin}" if args.begin else ""), report)
    yield from figures(f"trace, steps of {session.model.chunk}", report)
    totals = session.turns.totals
    yield Figure("trace", "swapped out", totals.swapped_out / 1e9, "GB")
    yield Figure("trace", "swapped in", totals.swapped_in / 1e9, "GB")
    yield from others(report, again)
    yield from predicted(session, report)


def steps_of(session: Session, rows: int) -> None:
    """Read prompts in other steps, with nothing kept."""
    session.model.chunk = min(rows, max(session.model.chunks))
    session.turns = TurnCache(session.model)
    session.model.state.log.chunks.clear()


def save(args: argparse.Namespace, name: str, report: ReplayReport) -> None:
    """Write a whole report and its page to `--reports`."""
    if args.reports:
        args.reports.mkdir(exist_ok=True)
        text = json.dumps(strict_records.encode(report))
        (args.reports / f"{name}.json").write_text(text, encoding="utf-8")
        (args.reports / f"{name}.html").write_text(page(report), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--accept", type=float, required=True)
    parser.add_argument("--also", type=float, nargs="*", default=[])
    parser.add_argument("--whole", nargs="*", default=[])
    parser.add_argument("--package", type=Path)
    parser.add_argument("--from", type=int, default=0, dest="begin")
    parser.add_argument("--conversations", type=int)
    parser.add_argument("--copies", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--reports", type=Path)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args(arguments)
    known = [one.name for one in read_trace(args.trace).conversations]
    if unknown := [name for name in args.whole if name not in known]:
        parser.error(f"--whole must be conversations of the trace (got {unknown[0]})")
    if (args.tokenizer is None) == (args.package is None):
        parser.error("either --tokenizer or --package must be given")
    reporter = choose(sys.stderr)
    rows = list(measure(args, reporter))
    reporter.close()
    print(json.dumps([dataclasses.asdict(r) for r in rows], indent=1) if args.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
