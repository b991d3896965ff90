"""`thor-dflash quality`: compares a package with its reference, and judges what quantising cost."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from thor_dflash.cli import exit_status, output_files
from thor_dflash.config.tree import Config
from thor_dflash.core import strict_records
from thor_dflash.core.errors import ConfigError, RequestError
from thor_dflash.core.progress import Progress, amount

if TYPE_CHECKING:
    from thor_dflash.calib.quality.quality_report import LinearDrift, QualityReport
    from thor_dflash.calib.quality.reference_logits import LiveReference, LogitsFile
    from thor_dflash.calib.quality.scored_texts import ScoredText
    from thor_dflash.config.quality import QualityConfig
    from thor_dflash.runtime.session import Session

RESERVE = 1 << 26
"""Bytes of the disk that stay free."""
LINEARS = 10
"""Linears that are printed."""


def run(args: Namespace, config: Config, progress: Progress) -> int:
    """Compare and print, or store the reference. Status 1 if a gate fails."""
    from thor_dflash.calib.quality import compare
    from thor_dflash.runtime.session import open_session

    _check(args)
    linears = _linears(args, progress)
    with ExitStack() as stack:
        reference = _reference(args, config, stack, progress)
        if args.store:
            _store(args.store, reference, progress)
            return exit_status.OK
        opened = open_session(args.package, config.engine, progress)
        session = stack.enter_context(closing(opened))
        report = compare.compare(
            reference, bool(args.stored), session, args.package, linears, config.quality, progress
        )
    progress.close()
    _print(args, report)
    return exit_status.WRONG if report.verdict in ("fail", "not measured") else exit_status.OK


def _check(args: Namespace) -> None:
    """Check the options before anything is loaded."""
    if (args.target is None) != (args.reference_target is None):
        given = "--target" if args.target else "--reference-target"
        raise ConfigError(f"--target and --reference-target must go together (got {given} alone)")
    if args.html:
        output_files.check(args.html, ".html", "--html")
    if args.store:
        output_files.check(args.store, ".npz", "--store")


def _linears(args: Namespace, progress: Progress) -> list[LinearDrift]:
    from thor_dflash.core.extras import extra

    if args.target is None:
        return []
    with extra("build"):
        from thor_dflash.calib.quality.linear_drift import drift_of_linears

    return drift_of_linears(args.reference_target, args.target, progress)


def _reference(
    args: Namespace, config: Config, stack: ExitStack, progress: Progress
) -> LiveReference | LogitsFile:
    from thor_dflash.calib.quality.compare import reference_of
    from thor_dflash.calib.quality.reference_logits import LiveReference, LogitsFile
    from thor_dflash.runtime.session import open_session

    if args.stored:
        return stack.enter_context(closing(LogitsFile(args.stored)))
    opened = open_session(args.reference, config.engine, progress)
    session = stack.enter_context(closing(opened))
    texts = _texts(session, args.data, config.quality)
    return LiveReference(
        session, reference_of(session, args.reference, texts, config.quality, progress)
    )


def _texts(session: Session, data: Path | None, config: QualityConfig) -> list[ScoredText]:
    """The documents of a file, else the prose that comes with the program."""
    from thor_dflash.calib.documents import TokenDocument, read_documents
    from thor_dflash.calib.quality.scored_texts import PROSE, parts_of_text

    name = "text"
    if data is not None:
        ids = session.manifest.vocab_limit
        documents = read_documents(data, session.tokenizer, ids)
    elif session.tokenizer is not None:
        name = "prose"
        text = PROSE.read_text(encoding="utf-8")
        documents = [TokenDocument("prose", tuple(session.tokenizer.encode(text)))]
    else:
        documents = []
    limit = session.model.limit
    return [
        part
        for i, document in enumerate(documents, 1)
        for part in parts_of_text(f"{name} {i}", document.label, document.tokens, config, limit)
    ]


def _store(out: Path, reference: LiveReference | LogitsFile, progress: Progress) -> None:
    from thor_dflash.calib.quality.reference_logits import bytes_of, store

    header = reference.header
    need, free = bytes_of(header.texts, header.ids) + RESERVE, shutil.disk_usage(out.parent).free
    if free < need:
        raise RequestError(
            f"--store must be on a disk with {amount(need, 'bytes')} free "
            f"(got {amount(free, 'bytes')})"
        )
    with output_files.whole(out) as file:
        store(file, reference, progress)
    progress.close()
    tokens = sum(len(text.tokens) - text.begin for text in header.texts)
    print(
        f"{out}: logits before {amount(tokens, 'tokens')} of {amount(len(header.texts), 'texts')}, "
        f"{amount(out.stat().st_size, 'bytes')}"
    )


def _print(args: Namespace, report: QualityReport) -> None:
    if args.html:
        from thor_dflash.cli.report.quality_page import page

        with output_files.whole(args.html) as file:
            file.write(page(report).encode())
    table = strict_records.encode(report)
    print(json.dumps(table, allow_nan=False) if args.json else "\n".join(lines(report)), flush=True)


def lines(report: QualityReport) -> Iterator[str]:
    """The report as text."""
    from thor_dflash.calib.quality.quality_text import class_rows, gate_rows, plan_rows
    from thor_dflash.core.text_table import columns

    reference, candidate = report.reference, report.candidate
    yield f"reference {reference.name}: {reference.engine}, cache {reference.kv}"
    yield f"package   {candidate.name}: {candidate.engine}, cache {candidate.kv}"
    yield ""
    yield from columns(gate_rows(report))
    yield ""
    yield from columns(class_rows(report))
    if rows := plan_rows(report):
        yield ""
        yield from columns(rows)
    if report.linears:
        yield ""
        worst = [(one.name, one.format, f"{one.error:.4f}") for one in report.linears[:LINEARS]]
        yield from columns([("worst linears", "stored as", "relative error"), *worst])
    if report.layers:
        yield ""
        drifts = [(f"after layer {one.layer}", f"{one.error:.4f}") for one in report.layers]
        yield from columns([("residual stream", "relative error"), *drifts])
    yield ""
    yield from (f"note: {gate.title}: {gate.note}" for gate in report.gates if gate.note)
    yield from (f"note: {note}" for note in report.notes)
    yield f"verdict: {report.verdict}"
