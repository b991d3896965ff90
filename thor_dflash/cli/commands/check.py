"""`thor-dflash check`: compares a package with another engine and each operator's definition."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from thor_dflash.cli import output_files
from thor_dflash.cli.commands import score as score_command
from thor_dflash.cli.input_files import in_vocabulary, read_tokens
from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.tree import Config
from thor_dflash.core.errors import ConfigError, RequestError
from thor_dflash.core.progress import Progress, amount
from thor_dflash.package import manifest as package_manifest

if TYPE_CHECKING:
    from thor_dflash.calib.check.compare import CheckReport, GraphCheck, Logits, Reference
    from thor_dflash.calib.check.tolerance import Deviation
    from thor_dflash.package.manifest import Manifest
    from thor_dflash.runtime.session import Session

ORT = "ort"
"""As a reference: ONNX Runtime running the package's own graphs."""


def run(args: Namespace, config: Config, progress: Progress) -> int:
    """Compare and print; return 1 if something is over its tolerance, else 0."""
    from thor_dflash.calib.check import golden
    from thor_dflash.calib.check.compare import Reference, compare, need, some_tokens, tracer
    from thor_dflash.runtime.session import open_session

    _check(args)
    if args.make_golden:
        output_files.check(args.make_golden, ".npz", "--make-golden")
    given = read_tokens(args.tokens) if args.tokens else None
    held = golden.read(args.golden) if args.golden else None
    found = package_manifest.read(args.package)
    need(found.engine)
    _check_reference(args.reference, found)
    with ExitStack() as stack:
        opened = open_session(args.package, config.engine, progress, choose=True)
        session = stack.enter_context(closing(opened))
        tokens = in_vocabulary(given or some_tokens(session), session.manifest.target.vocab)
        show = tracer(session, args.package)
        if args.make_golden:
            return _make(args, session, tokens, progress)
        if held is not None:
            golden.fits(held, session.model, str(args.golden))
        reference = (
            _reference(args, config.engine, tokens, stack, progress)
            if held is None
            else Reference(held)
        )
        if reference is not None:
            tokens = reference.golden.tokens
        report = compare(session, show, reference, tokens, args.operators, args.tolerance, progress)
    progress.close()
    print(json.dumps(as_table(report), indent=1) if args.json else "\n".join(lines(report)))
    return 0 if report.right else 1


def _check(args: Namespace) -> None:
    """Refuse options that have no meaning without a reference."""
    if args.reference is not None or args.golden is not None:
        return
    if args.operators == "none":
        raise ConfigError("--operators none must go with --reference or --golden (got neither)")
    if args.tolerance is not None:
        raise ConfigError("--tolerance must go with --reference or --golden (got neither)")


def _check_reference(reference: str | None, found: Manifest) -> None:
    """Refuse what cannot be a reference before a package is loaded, which may take minutes."""
    from thor_dflash.calib.check import golden

    if reference == ORT and "verify.onnx" not in found.files:
        raise RequestError(
            f"--reference ort must be for a package that holds ONNX graphs (got engine "
            f"{found.engine}); build the same checkpoints with --engine ort and give that package"
        )
    if reference is not None and reference != ORT:
        other = package_manifest.read(Path(reference))
        golden.same(golden.sources(other), found, reference)


def _make(args: Namespace, session: Session, tokens: tuple[int, ...], progress: Progress) -> int:
    from thor_dflash.calib.check.compare import make, tracer
    from thor_dflash.calib.check.golden import arrays

    golden = make(session, tracer(session, args.package), tokens, progress)
    score_command.write(args.make_golden, arrays(golden))
    progress.close()
    values = f"{len(golden.values)} values of the first block"
    print(f"{args.make_golden}: logits of {len(tokens)} tokens, {values}")
    return 0


def _reference(
    args: Namespace,
    config: EngineConfig,
    tokens: tuple[int, ...],
    stack: ExitStack,
    progress: Progress,
) -> Reference | None:
    from thor_dflash.calib.check.compare import Reference, make, tracer

    if args.reference is None:
        return None
    if args.reference == ORT:
        path, other = args.package, _graphs(args.package, config, progress)
    else:
        path = Path(args.reference)
        other = _other(path, config, progress)
    stack.enter_context(closing(other))
    return Reference(make(other, None, tokens, progress), other, tracer(other, path))


def _other(package: Path, config: EngineConfig, progress: Progress) -> Session:
    """Another package, with its own prefill steps, which are not compared, and with the requested
    block if it has that width: packages of other widths may be compared, too.
    """
    from thor_dflash.runtime.session import open_session

    found = package_manifest.read(package)
    block = config.block if config.block in found.widths else 0
    try:
        return open_session(package, replace(config, chunk=0, block=block), progress)
    except ConfigError as e:
        raise ConfigError(f"{package}: {e}") from e


def _graphs(package: Path, config: EngineConfig, progress: Progress) -> Session:
    """The package's own graphs on ONNX Runtime, whatever engine it was built for."""
    from thor_dflash.core.extras import extra
    from thor_dflash.runtime.decoding.model_runner import ModelRunner
    from thor_dflash.runtime.session import Session

    with extra("ort"):
        from thor_dflash.runtime.engines.ort import OrtEngine

    found = package_manifest.read(package)
    capacity, block = config.capacity or found.capacity, config.block or found.block
    engine = OrtEngine(package, config.threads)
    own = replace(found, engine="ort")
    chunks = (config.chunk or found.chunk,)
    return Session(ModelRunner(engine, own, capacity, block, chunks, progress=progress), None)


def lines(report: CheckReport) -> Iterator[str]:
    """The report as text."""
    if report.logits is not None:
        yield _logits(report.logits)
    for layer, error in report.taps:
        yield f"       after layer {layer}: values differ by at most {error:.2g} of the largest"
    for walk in report.walks:
        yield from _walk(walk)
    for note in report.notes:
        yield f"       {note}"
    yield "the same within tolerance" if report.right else "NOT the same"


def _logits(found: Logits) -> str:
    state = "ok   " if found.first < 0 else "wrong"
    first = "" if found.first < 0 else f", over it first at token {found.first}"
    return (
        f"{state}  logits of {found.rows} tokens: they differ by at most {found.worst:.2g} of the "
        f"largest, at token {found.row} (limit {found.limit:.2g}){first}; the choice of the next "
        f"token differs at {found.choices} of them and costs at most {found.regret:.2g}"
    )


def _walk(walk: GraphCheck) -> Iterator[str]:
    where = f"{walk.graph}, block {walk.block}"
    if walk.wrong is None:
        yield f"ok     {where}: {amount(walk.operators, 'operators')} as defined"
    else:
        off = walk.wrong
        yield (
            f"wrong  {where}, operator {walk.operators}: {off.step} ({off.op}): {off.output} "
            f"{_off(off)}"
        )
    if walk.parts is not None:
        yield (
            f"       {where}: {walk.parts.step} is the first operator to part from the reference: "
            f"its output differs by {walk.parts.left:.2g}, its inputs by at most "
            f"{walk.parts.read:.2g}; its weights, attributes or element types are not those of the "
            "reference, or it is wrong"
        )
    elif walk.furthest is not None:
        furthest = walk.furthest
        yield f"       furthest from the reference: {furthest.step}, by {furthest.left:.2g}"


def _off(off: Deviation) -> str:
    if off.shapes is not None:
        have, want = off.shapes
        return f"is of shape {list(have)}, not {list(want)}"
    return (
        f"at {list(off.at)} is {off.have:.6g}, not {off.want:.6g}: off by {off.error:.2g} of "
        f"the largest (limit {off.limit:.2g})"
    )


def as_table(report: CheckReport) -> dict[str, object]:
    """The report for JSON, with null for infinities and NaN, which JSON lacks."""
    return {"right": report.right, **_finite(asdict(report))}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        table = cast("dict[str, object]", value)
        return {name: _finite(item) for name, item in table.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in cast("list[object]", value)]
    return None if isinstance(value, float) and not isfinite(value) else value
