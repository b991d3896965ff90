"""`thor-dflash profile`: where each millisecond of a request goes on this machine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from argparse import Namespace
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import thor_dflash
from thor_dflash import manifest, records
from thor_dflash.config import Config
from thor_dflash.errors import ConfigError, RequestError
from thor_dflash.progress import Progress
from thor_dflash.verbs.inputs import read_json
from thor_dflash.verbs.question import read_question

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thor_dflash.runtime.profile import Phase, Profile, Spread, Subject
    from thor_dflash.runtime.session import Report, Request, Session

BARS = " ▁▂▃▄▅▆▇█"
TITLES = {
    "ttft_ms": "to the first token, ms",
    "prefill_ms": "reading the prompt, ms",
    "cycle_ms": "a cycle, ms",
    "e2e_ms": "whole answer, ms",
    "tok_s": "decoding, tokens/s",
}


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Answer one prompt many times; print what it took."""
    for option, count, least in (("--runs", args.runs, 1), ("--warmup", args.warmup, 0)):
        if count < least:
            raise ConfigError(f"{option} must be at least {least} (got {count})")
    base = _base(args.compare) if args.compare else None
    from thor_dflash.runtime.profile import profile
    from thor_dflash.runtime.session import open_session

    question = read_question(args)
    with closing(open_session(args.package, config.engine, progress)) as session:
        request = question.request(session, config)
        subject = _subject(session, request, config)
        if base and (told := base.subject.differs(subject)):
            raise RequestError(f"--compare must be a profile of the same (got {'; '.join(told)})")
        reports, answers = _runs(session, request, args, progress)
    progress.close()
    found = profile(subject, args.warmup, reports, answers)
    print(json.dumps(dataclasses.asdict(found)) if args.json else table(found, base))


def _base(path: Path) -> Profile:
    from thor_dflash.runtime.profile import Profile

    found = records.decode(Profile, read_json(path), str(path), RequestError)
    if missing := TITLES.keys() - found.times.keys():
        raise RequestError(f"{path}.times must hold {min(missing)} (got {', '.join(found.times)})")
    return found


def _subject(session: Session, request: Request, config: Config) -> Subject:
    from thor_dflash.runtime.profile import Subject

    text = manifest.render(session.manifest)
    ids = json.dumps(request.prompt)
    return Subject(
        version=thor_dflash.__version__,
        package=hashlib.sha256(text.encode()).hexdigest(),
        engine=session.manifest.engine,
        device=session.model.engine.device,
        prompt=hashlib.sha256(ids.encode()).hexdigest(),
        prompt_tokens=len(request.prompt),
        settings=_settings(config),
    )


def _settings(config: Config) -> dict[str, str]:
    """Where kernels are kept changes no time."""
    every = _flat("engine", records.encode(config.engine))
    every |= _flat("decode", records.encode(config.decode))
    return {key: value for key, value in every.items() if key != "engine.cubins"}


def _flat(name: str, value: object) -> dict[str, str]:
    table = records.as_table(value)
    if table is None:
        return {name: str(value)}
    return {k: v for key, item in table.items() for k, v in _flat(f"{name}.{key}", item).items()}


def _runs(
    session: Session, request: Request, args: Namespace, progress: Progress
) -> tuple[list[Report], list[tuple[int, ...]]]:
    """Of the runs that count: reports, and the answers' tokens."""
    reports: list[Report] = []
    answers: list[tuple[int, ...]] = []
    with progress.task("answering", args.warmup + args.runs, "times") as task:
        for i in range(args.warmup + args.runs):
            tokens = tuple(t for chunk in session.generate(request) for t in chunk.tokens)
            if i >= args.warmup:
                reports.append(session.report())
                answers.append(tokens)
            task.advance(1)
    return reports, answers


# ---- the report ----------------------------------------------------------------------------------
def table(found: Profile, base: Profile | None = None) -> str:
    """A profile as aligned text; beside another one with what became of its medians."""
    subject, spec = found.subject, found.spec
    return "\n".join(
        [
            f"{subject.engine} on {subject.device}; thor-dflash {subject.version}, "
            f"package {subject.package[:12]}",
            f"prompt of {subject.prompt_tokens} tokens, answer of {found.tokens}, ended by "
            f"{found.finish}; {found.runs} runs after {found.warmup} to warm up",
            "",
            *_times(found.times, base.times if base else {}),
            "",
            *_phases(found.phases),
            "",
            f"{spec.cycles} cycles of {spec.accept_len:.2f} tokens; "
            f"{spec.accepted} of {spec.drafted} drafted tokens were right",
            *_histogram(spec.accept_hist),
            *(f"note: {text}" for text in found.warnings),
        ]
    )


def _times(times: Mapping[str, Spread], before: Mapping[str, Spread]) -> list[str]:
    head = "".join(f"{title:>10}" for title in ("median", "least", "90 %", "99 %", "most"))
    lines = [f"{'an answer':<24}{head}"]
    for name, title in TITLES.items():
        s = times[name]
        numbers = "".join(f"{x:10.2f}" for x in (s.median, s.low, s.p90, s.p99, s.high))
        lines.append(f"  {title:<22}{numbers}{_change(s, before.get(name))}")
    return lines


def _phases(phases: Mapping[str, Phase]) -> list[str]:
    wide = max(22, *(len(name) for name in phases))  # graphs that run as one have one long name
    lines = [f"{'where its time goes':<{wide + 2}}{'ms':>10}{'a cycle':>10}{'share':>10}"]
    for name, phase in phases.items():
        cycle = f"{phase.cycle_ms:10.3f}" if phase.cycle_ms else " " * 10
        bar = "█" * round(20 * phase.share)
        lines.append(f"  {name:<{wide}}{phase.ms:10.2f}{cycle}{phase.share:10.1%}  {bar}".rstrip())
    return lines


def _change(now: Spread, before: Spread | None) -> str:
    if before is None or not before.median:
        return ""
    return f"   {now.median / before.median:.3f}x of {before.median:.2f}"


def _histogram(counts: Sequence[int]) -> list[str]:
    most = max(counts, default=0)
    if not most:
        return []
    bars = "".join(BARS[-(-8 * count // most)] for count in counts)
    return [f"  committed tokens a cycle, 1 to {len(counts)}:  |{bars}|"]
