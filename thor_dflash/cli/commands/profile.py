"""`thor-dflash profile`: shows where each millisecond of a request goes on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import time
from argparse import Namespace
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import thor_dflash
from thor_dflash.cli import output_files
from thor_dflash.cli.input_files import read_report
from thor_dflash.cli.report.profile_page import page
from thor_dflash.cli.report.profile_text import table
from thor_dflash.cli.requests import read_prompt, unbounded_notes, unused_schema_notes
from thor_dflash.config.tree import Config
from thor_dflash.core import message_text, strict_records
from thor_dflash.core.errors import ConfigError, RequestError, ThorError
from thor_dflash.core.progress import Progress, amount
from thor_dflash.package import manifest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thor_dflash.runtime.doctor.facts import Finding
    from thor_dflash.runtime.measure.profile import (
        CycleBreakdown,
        Profile,
        ProfileRun,
        ProfileSubject,
    )
    from thor_dflash.runtime.session import Request, Session

    Taken = tuple[ProfileRun, tuple[float, float]]
    """A measured run, and its start and end, seconds of `time.perf_counter`."""

RUNS = 15
"""Measured runs if neither their number nor a time is given."""
LONGEST = 6 * 3600
"""Maximum duration of a soak, s; every cycle and sample of it is kept."""
DIRECTORIES = ("engine.cubins", "engine.tunings")
"""Settings that affect no time."""


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Answer one prompt many times; print the times, and draw them if requested."""
    base = _check(args)
    from thor_dflash.runtime.doctor import jetson
    from thor_dflash.runtime.doctor.local_machine import LocalMachine
    from thor_dflash.runtime.measure.power import PowerSampler, find_sensors, junction
    from thor_dflash.runtime.measure.profile import profile, stretches
    from thor_dflash.runtime.session import open_session

    prompt_options = read_prompt(args, config.decode)
    speed = jetson.speed(LocalMachine())
    taken: list[Taken] = []
    inside, ended, tuned = None, None, list[str]()
    check = partial(prompt_options.prompt, decode=config.decode)
    with closing(open_session(args.package, config.engine, progress, check=check)) as session:
        request = prompt_options.request(session, config, progress)
        subject = _subject(session, request, config, speed)
        if base and (changes := base.subject.differs(subject)):
            same = "--compare must be a profile of the same request and settings"
            raise RequestError(f"{same} (got {'; '.join(changes)})")
        watch = PowerSampler(find_sensors(), junction())
        try:
            with watch:
                watch.rest()
                _runs(session, request, args, progress, taken)
            inside = _inside(session, request, config, progress)
            tuned = _tuned(session)
        except (KeyboardInterrupt, ThorError) as e:
            if not taken:
                raise
            ended = e
    progress.close()
    runs, when = [run for run, _ in taken], [times for _, times in taken]
    found = profile(
        subject,
        args.warmup,
        runs,
        inside=inside,
        power=watch.power(when),
        soak=stretches(runs, when, watch.power) if args.soak else (),
        notes=(
            *_early(ended, args, when),
            *_notes(speed),
            *tuned,
            *unbounded_notes(request),
            *unused_schema_notes(request, _text(session, request, runs)),
        ),
    )
    try:
        _tell(found, base, args)
    finally:  # what ended the measurement matters more than a report that failed
        if ended is not None:
            raise ended


def _check(args: Namespace) -> Profile | None:
    """Check the options before anything is loaded; return the profile to compare with, if any."""
    for option, count, least in (("--runs", args.runs, 1), ("--warmup", args.warmup, 0)):
        if count is not None and count < least:
            raise ConfigError(f"{option} must be at least {least} (got {count})")
    if args.soak is not None and not 1 <= args.soak <= LONGEST:
        raise ConfigError(f"--soak must be 1 to {LONGEST} seconds (got {args.soak})")
    for option, out, ending in (("--html", args.html, ".html"), ("--trace", args.trace, ".json")):
        if out:
            output_files.check(out, ending, option)
    _check_outputs(args)
    if not args.compare:
        return None
    from thor_dflash.runtime.measure.profile import Profile

    return read_report(Profile, args.compare, "profile")


def _check_outputs(args: Namespace) -> None:
    """No file that is written may be one that is read."""
    given = {"--tokens": args.tokens, "--messages": args.messages, "--schema": args.schema,
             "--compare": args.compare}  # fmt: skip
    for name, path in given.items():
        for option, out in (("--html", args.html), ("--trace", args.trace)):
            # `resolve` fails on circular links.
            if path and out and os.path.realpath(path) == os.path.realpath(out):
                raise ConfigError(f"{option} must be another file than {name} (got {out})")


def _tell(found: Profile, base: Profile | None, args: Namespace) -> None:
    text = json.dumps(strict_records.encode(found)) if args.json else table(found, base)
    try:
        print(text, flush=True)
    finally:  # also if the reader of stdout has gone
        if args.html:
            with output_files.whole(args.html) as file:
                file.write(page(found, base).encode())
        if args.trace:
            with output_files.whole(args.trace) as file:
                file.write(json.dumps(trace(found)).encode())


def _subject(
    session: Session, request: Request, config: Config, speed: Sequence[Finding]
) -> ProfileSubject:
    from thor_dflash.runtime.measure.profile import ProfileSubject

    ids = json.dumps(request.prompt)
    return ProfileSubject(
        version=thor_dflash.__version__,
        package=manifest.identity(session.manifest),
        engine=session.manifest.engine,
        device=session.model.engine.device,
        prompt=hashlib.sha256(ids.encode()).hexdigest(),
        prompt_tokens=len(request.prompt),
        settings=_settings(session, request, config),
        machine={f.item: f.text for f in speed if "clock" not in f.item},  # clocks vary
    )


def _settings(session: Session, request: Request, config: Config) -> dict[str, str]:
    """The settings that affect times: all but directories. What is left to the package is given as
    the package has it, as it would be if it were set.
    """
    model, grammar = session.model, request.grammar
    engine = replace(config.engine, capacity=model.capacity, block=model.block, chunk=model.chunk)
    every = _flat("engine", strict_records.encode(engine))
    every |= _flat("decode", strict_records.encode(replace(config.decode, drafter=request.drafter)))
    if grammar is not None:
        every["schema"] = hashlib.sha256(grammar.source.encode()).hexdigest()[:12]
    return {key: value for key, value in every.items() if key not in DIRECTORIES}


def _flat(name: str, value: object) -> dict[str, str]:
    table = strict_records.as_table(value)
    if table is None:
        return {name: str(value)}
    return {k: v for key, item in table.items() for k, v in _flat(f"{name}.{key}", item).items()}


def _early(
    ended: BaseException | None, args: Namespace, when: Sequence[tuple[float, float]]
) -> list[str]:
    """What ended the measurement, if it did not end by itself."""
    if ended is None:
        return []
    why = (
        "interrupted" if isinstance(ended, KeyboardInterrupt) else message_text.one_line(str(ended))
    )
    if args.soak:
        return [f"ended after {when[-1][1] - when[0][0]:.0f} of {args.soak} s: {why}"]
    return [f"ended after {len(when)} of {amount(args.runs or RUNS, 'runs')}: {why}"]


def _notes(speed: Sequence[Finding]) -> list[str]:
    """The findings that make this machine slower than it could be."""
    return [
        f"{f.item}: {f.text}" + (f" ({f.remedy})" if f.remedy else "")
        for f in speed
        if f.state != "ok"
    ]


def _tuned(session: Session) -> list[str]:
    """The launches that are not the rules'."""
    if session.manifest.engine != "cuda":
        return []
    from thor_dflash.runtime.engines.cuda.engine import CudaEngine

    engine = session.model.engine
    assert isinstance(engine, CudaEngine)
    return [f"tuned launch: {one.name}: {one.text}" for one in engine.tuned_launches]


def _runs(
    session: Session, request: Request, args: Namespace, progress: Progress, taken: list[Taken]
) -> None:
    """Append the measured runs to `taken`, where an error or an interrupt leaves them."""
    if args.warmup:
        with progress.task("warming up", args.warmup, "times") as task:
            for _ in range(args.warmup):
                _answer(session, request)
                task.advance(1)
    total, unit = (args.soak, "s") if args.soak else (args.runs or RUNS, "times")
    begun, done = time.perf_counter(), 0
    with progress.task("answering", total, unit) as task:
        while done < total:
            start = time.perf_counter()
            run, end = _answer(session, request), time.perf_counter()
            taken.append((run, (start, end)))
            now = int(end - begun) if args.soak else len(taken)
            task.advance(min(now, total) - done)
            done = now


def _answer(session: Session, request: Request) -> ProfileRun:
    from thor_dflash.runtime.measure.profile import ProfileRun, StepEnd

    tokens: list[int] = []
    start = time.perf_counter()
    beats = [StepEnd(0.0, 0)]
    for chunk in session.generate(request):
        committed = len(chunk.tokens) + (chunk.finish == "stop")  # plus the hidden stop id
        beats.append(StepEnd(1e3 * (time.perf_counter() - start), committed))
        tokens += chunk.tokens
    return ProfileRun(session.report(), tuple(tokens), tuple(beats))


def _text(session: Session, request: Request, runs: Sequence[ProfileRun]) -> str:
    """The last answer after its thinking; empty if the package has no tokenizer."""
    from thor_dflash.runtime.text.tokenizer import Answer

    if session.tokenizer is None:
        return ""
    answer = Answer(session.tokenizer, request.prompt)
    answer.feed(runs[-1].tokens)
    return answer.text()


def _inside(
    session: Session, request: Request, config: Config, progress: Progress
) -> CycleBreakdown | None:
    """Times of a cycle's parts, for the engine that runs a cycle as one graph and can split it."""
    if session.manifest.engine != "cuda":
        return None
    from thor_dflash.runtime.engines.cuda.engine import CudaEngine
    from thor_dflash.runtime.measure.cycle_breakdown import take_apart

    engine = session.model.engine
    assert isinstance(engine, CudaEngine)
    accept = "accept_masked" if request.grammar else "accept"
    plain = request.drafter in ("lookup", "none") or session.manifest.drafter is None
    graphs = ("verify", accept) if plain else ("propose", "verify", accept, "observe")
    cubins = config.engine.cubins_directory
    return take_apart(engine, session.model, graphs, cubins, progress)


def trace(found: Profile) -> dict[str, Any]:
    """The last answer as trace events for ui.perfetto.dev and Chrome."""
    from thor_dflash.runtime.measure.profile import steps

    events: list[dict[str, Any]] = []
    for name, start, end in steps(found):
        event = {"name": name, "pid": 1, "tid": "answer", "ts": 1e3 * start.ms,
                 "args": {"tokens": end.tokens}}  # fmt: skip
        events.append({**event, "ph": "X", "dur": 1e3 * (end.ms - start.ms)})
        if end.tokens:
            events.append({**event, "ph": "C", "name": "committed tokens"})
    about = strict_records.encode(found.subject)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
