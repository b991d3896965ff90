"""`thor-dflash replay`: replays recorded conversations, and shows what each turn costs."""

from __future__ import annotations

import json
import os
import time
from argparse import Namespace
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import thor_dflash
from thor_dflash.calib.replay import replay_report
from thor_dflash.calib.replay.recorded_trace import RecordedTrace, read_trace
from thor_dflash.calib.replay.replay_report import ReplayReport, ReplaySubject, ReplayTurn
from thor_dflash.cli import output_files
from thor_dflash.cli.input_files import read_json, read_report
from thor_dflash.config.tree import Config
from thor_dflash.core import strict_records
from thor_dflash.core.errors import ConfigError, PlanError, RequestError, ThorError
from thor_dflash.core.message_text import show
from thor_dflash.core.progress import Progress

if TYPE_CHECKING:
    from thor_dflash.calib.replay.openai_client import OpenAIConnection
    from thor_dflash.runtime.session import Session

REUSE_MB = 4096
"""Default memory for the states of earlier turns, MiB: more than one conversation of the trace
needs at a time."""


def run(args: Namespace, config: Config, progress: Progress) -> int:
    """Replay, and print or draw what was measured. Status 1 if turns are missing."""
    forced = _check(args)
    base = read_report(ReplayReport, args.compare, "replay") if args.compare else None
    trace = read_trace(args.trace).first(args.conversations, args.turns)
    opened = (
        _remote(args, forced, trace) if args.url else _local(args, config, forced, trace, progress)
    )
    with opened as (subject, turns):
        if base and (changes := base.subject.differs(subject)):
            rule = "--compare must be a replay of the same turns"
            raise RequestError(f"{rule} (got {'; '.join(changes)})")
        report, ended = _measure(subject, turns, trace, progress)
    progress.close()
    try:
        _print(args, report, base)
    finally:  # what ended the replay matters more than a report that failed
        if ended is not None:
            raise ended
    if errors := replay_report.failed(report):
        if len(errors) == len(report.turns):
            raise PlanError("internal", f"the server must answer a turn (got: {errors[0][2]})")
        return 1
    return 0


def _print(args: Namespace, report: ReplayReport, base: ReplayReport | None) -> None:
    table = strict_records.encode(report)
    print(json.dumps(table) if args.json else replay_report.text(report, base), flush=True)
    if args.html:
        from thor_dflash.cli.report.replay_page import page

        with output_files.whole(args.html) as file:
            file.write(page(report, base).encode())


def _check(args: Namespace) -> float | Literal["drafter"] | None:
    """Check the options before anything is loaded; return how answers are forced."""
    for option, count in (("conversations", args.conversations), ("turns", args.turns)):
        if count is not None and count < 1:
            raise ConfigError(f"--{option} must be at least 1 (got {count})")
    if args.html:
        output_files.check(args.html, ".html", "--html")
        import_module(
            "thor_dflash.cli.report.replay_page"
        )  # what it lacks is refused before the work
    if args.shape or args.random_weights:
        given = {
            "shape": args.shape,
            "random-weights": args.random_weights,
            "tokenizer": args.tokenizer,
            "forced-accept": args.forced_accept,
        }
        for option in (name for name, value in given.items() if not value):
            others = ", ".join(f"--{name}" for name in given if name != option)
            raise ConfigError(f"--{option} must go with {others} (got none)")
    if args.reuse_mb is not None and args.reuse_mb < 0:
        raise ConfigError(f"--reuse-mb must be at least 0 (got {args.reuse_mb})")
    return _rows(args.forced_accept)


def _rows(given: str | None) -> float | Literal["drafter"] | None:
    if given is None:
        return None
    if given == "drafter":
        return "drafter"
    try:
        found = float(given)
    except ValueError:
        found = 0.0
    if not 1 <= found <= 1024:  # the session knows the rows of its blocks
        raise ConfigError(
            f"--forced-accept must be a number of tokens per cycle, at least 1, or drafter "
            f"(got {show(given)})"
        )
    return found


def _measure(
    subject: ReplaySubject, turns: Iterator[ReplayTurn], trace: RecordedTrace, progress: Progress
) -> tuple[ReplayReport, BaseException | None]:
    """Replay; return the report, and what ended the replay if it did not end by itself."""
    found: list[ReplayTurn] = []
    ended: BaseException | None = None
    begun = time.perf_counter()
    try:
        with progress.task("replaying", trace.turns, "turns") as task:
            for turn in turns:
                found.append(turn)
                task.advance(1)
    except (KeyboardInterrupt, ThorError) as e:
        if not found:
            raise
        ended = e
    wall = time.perf_counter() - begun
    report = ReplayReport(subject, replay_report.totals(found, trace.turns, wall), tuple(found))
    return report, ended


def _assumed(forced: float | Literal["drafter"] | None) -> str:
    """The report's word for how answers were forced; empty: they were not."""
    return forced if isinstance(forced, str) else "" if forced is None else f"{forced:g}"


def _subject(args: Namespace, trace: RecordedTrace, target: str, **more: Any) -> ReplaySubject:
    return ReplaySubject(
        version=thor_dflash.__version__,
        trace=trace.sha256,
        conversations=len(trace.conversations),
        turns=trace.turns,
        target=target,
        thinking=args.thinking == "on",
        **more,
    )


# ---- over HTTP -----------------------------------------------------------------------------------
Run = tuple[ReplaySubject, Iterator[ReplayTurn]]


def key_headers(path: Path | None) -> dict[str, str]:
    """The header with the key in a file; none without a file.

    Raises:
        RequestError: it cannot be read.
    """
    if path is None:
        return {}
    try:
        return {"Authorization": f"Bearer {strict_records.read_text(path).strip()}"}
    except (OSError, ValueError) as e:
        got = e.strerror if isinstance(e, OSError) else e
        raise RequestError(f"--key-file must be a readable text (got: {got})") from e


@contextmanager
def connected(args: Namespace) -> Generator[tuple[OpenAIConnection, str]]:
    """A connection to `--url`, and the model to ask for."""
    from thor_dflash.calib.replay.openai_client import OpenAIConnection

    with closing(OpenAIConnection(args.url, key_headers(args.key_file))) as connection:
        yield connection, args.model or connection.model()


@contextmanager
def _remote(
    args: Namespace, forced: float | Literal["drafter"] | None, trace: RecordedTrace
) -> Generator[Run]:
    from thor_dflash.calib.replay.http_replay import HttpReplay

    extra: Mapping[str, Any] = {}
    if args.body:
        table = strict_records.as_table(value := read_json(args.body))
        if table is None:
            raise RequestError(f"--body must be a JSON object (got {show(value)})")
        extra = table
    if args.thinking == "on":
        extra = {"chat_template_kwargs": {"enable_thinking": True}, **extra}
    with connected(args) as (connection, model):
        replay = HttpReplay(connection, model, plain=args.plain, extra=extra, forced=forced)
        settings = {"model": model, "plain": str(args.plain), "body": json.dumps(extra)}
        subject = _subject(args, trace, args.url, forced=_assumed(forced), settings=settings)
        yield subject, replay.run(trace)


# ---- in process ----------------------------------------------------------------------------------
@contextmanager
def _local(
    args: Namespace,
    config: Config,
    forced: float | Literal["drafter"] | None,
    trace: RecordedTrace,
    progress: Progress,
) -> Generator[Run]:
    from thor_dflash.calib.replay.session_replay import SessionReplay
    from thor_dflash.cli.commands.bench import random_session

    megabytes = REUSE_MB if args.reuse_mb is None else args.reuse_mb
    opened = (
        random_session(args.shape, args.tokenizer, config, megabytes << 20, progress)
        if args.shape
        else _packaged(args, config, trace, megabytes << 20, progress)
    )
    with opened as session:
        replay = SessionReplay(session, forced, args.thinking == "on", reuse=megabytes > 0)
        model = session.model
        notes = ["in process: no server, no network"]
        if args.shape:
            notes.append(f"{args.shape} with random weights: times are real, texts are not")
        subject = _subject(
            args,
            trace,
            f"{session.manifest.engine} on {model.engine.device}",
            forced=_assumed(forced),
            settings={
                "package": args.shape or os.fspath(args.package),
                "drafter": session.drafter,
                "chunk": str(model.chunk),
                "block": str(model.block),
                "capacity": str(model.capacity),
                "reuse, MB": str(model.reuse >> 20),
            },
            notes=tuple(notes),
        )
        yield subject, replay.run(trace)


@contextmanager
def _packaged(
    args: Namespace, config: Config, trace: RecordedTrace, reuse: int, progress: Progress
) -> Generator[Session]:
    from thor_dflash.calib.replay.session_replay import check_fits
    from thor_dflash.runtime.session import open_session

    check = partial(check_fits, trace=trace, thinking=args.thinking == "on")
    opened = open_session(args.package, config.engine, progress, reuse=reuse, check=check)
    with closing(opened) as session:
        yield session
