"""Compares a package with another engine and with the definitions; names the first fault."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from thor_dflash.calib.check.golden import REMAKE, Golden, device, rounds, sources
from thor_dflash.calib.check.graph_inputs import walks
from thor_dflash.calib.check.tolerance import (
    NOTHING,
    Deviation,
    Drift,
    against_definition,
    distance,
    drift,
    jumps,
    share,
)
from thor_dflash.calib.check.trace_record import Outputs, StepTracer, TracedStep
from thor_dflash.core.errors import RequestError
from thor_dflash.core.extras import extra
from thor_dflash.core.progress import Progress
from thor_dflash.core.tensors import Array
from thor_dflash.plugins.contract import NEXT
from thor_dflash.runtime.engines.protocol import Engine
from thor_dflash.runtime.measure.score import score, shapes
from thor_dflash.runtime.session import Session

LENGTH = 3
"""Default number of blocks of tokens: enough to cover folding and a second tile of rows."""
EXACT, ROUNDED = 2e-3, 0.06
"""Default tolerances for logits, as a share of the largest logit: if both engines keep float32, and
if one rounds activations or caches. See docs/design/numerics.md for measurements."""


@dataclass(frozen=True, slots=True)
class Logits:
    """Teacher-forced logits of two engines."""

    rows: int
    worst: float
    """Largest difference, as a share of the largest logit."""
    limit: float
    row: int
    """Row of the largest difference."""
    first: int
    """First row over the limit; -1 for none."""
    choices: int
    """Number of rows where the two engines choose different tokens."""
    regret: float
    """Largest shortfall of the package's choice against the reference's, by the reference's logits,
    as a share of the largest logit."""


@dataclass(frozen=True, slots=True)
class GraphCheck:
    """The results of checking a graph operator by operator."""

    graph: str
    block: int
    operators: int
    """Number of operators compared with their definitions."""
    wrong: Deviation | None
    """The first operator that deviates from its definition."""
    parts: Drift | None
    """The first operator that adds a difference of its own: see `jumps`, with the tolerance of
    logits as the least."""
    furthest: Drift | None
    """The operator furthest from the reference."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Everything that was compared."""

    logits: Logits | None
    taps: Sequence[tuple[int, float]] = ()
    """Tapped layers in order, each with its largest difference."""
    walks: Sequence[GraphCheck] = ()
    notes: Sequence[str] = field(default_factory=tuple[str, ...])

    @property
    def right(self) -> bool:
        """Whether nothing is over its tolerance. A step that differs from the reference is not a
        fault by itself, as caches with fewer bits cause that, too. It explains why logits differ.
        """
        wrong = any(walk.wrong for walk in self.walks)
        return not wrong and (self.logits is None or self.logits.first < 0)


def some_tokens(session: Session) -> tuple[int, ...]:
    """Return pseudo-random token ids, the same on every machine."""
    rng = np.random.default_rng(0)
    count = min(LENGTH * session.model.block, session.model.limit)
    return tuple(int(t) for t in rng.integers(0, session.manifest.vocab_limit, count))


def need(engine: str) -> None:
    """Import what tracing the steps of an engine needs, so that it is missed before a package is
    loaded.

    Raises:
        ConfigError: it is not installed.
    """
    if engine == "ort":
        with extra("build"):
            importlib.import_module("thor_dflash.calib.check.ort_trace")


def tracer(session: Session, package: Path) -> StepTracer | None:
    """Return the tracer of a session's engine, or None if that engine's steps cannot be traced."""
    made = _TRACERS.get(type(session.model.engine).__name__)
    return made(package, session.model.engine) if made else None


def _nodes(package: Path, engine: Engine) -> StepTracer:
    from thor_dflash.runtime.engines.ort import OrtEngine

    with extra("build"):
        from thor_dflash.calib.check.ort_trace import OrtTracer

    assert isinstance(engine, OrtEngine)
    return OrtTracer(package, engine)


def _programs(package: Path, engine: Engine) -> StepTracer:
    from thor_dflash.calib.check.cuda_trace import CudaTracer
    from thor_dflash.calib.check.step_runner import StepRunner
    from thor_dflash.runtime.engines.cuda.engine import CudaEngine

    del package
    assert isinstance(engine, CudaEngine)
    return CudaTracer(StepRunner(engine))


_TRACERS: dict[str, Callable[[Path, Engine], StepTracer]] = {
    "OrtEngine": _nodes,
    "CudaEngine": _programs,
}
"""Engine -> its tracer. They import lazily: a device has no ONNX Runtime, a laptop no driver."""


def make(
    session: Session, show: StepTracer | None, tokens: Sequence[int], progress: Progress
) -> Golden:
    """Record the outputs of this package as golden values. Resets the session's sequence."""
    taps = session.manifest.drafter is not None
    found = score(session, tokens, taps, progress)
    values = _values(session, show, tokens, 0) if show else {}
    return Golden(
        sources(session.manifest),
        device(session),
        session.model.block,
        rounds(session.manifest),
        tuple(tokens),
        found["logits"],
        found.get("taps"),
        values,
    )


def _values(session: Session, show: StepTracer, tokens: Sequence[int], at: int) -> dict[str, Array]:
    """Return every value inside a verify, except state."""
    found: dict[str, Array] = {}
    for seen in show.steps(walks(session.model)["verify"](tokens, at)):
        found |= {n: x for n, x in seen.inputs.items() if not _state(session, n)}
        found |= {n: x for n, x in seen.outputs.items() if not _state(session, n)}
    session.model.state.reset()
    return found


def _state(session: Session, name: str) -> bool:
    return name.startswith(NEXT) or name in session.model.state.tensors


def logits(have: Array, want: Array, limit: float) -> Logits:
    """Compare float32 [T, V]."""
    # Scaled by finite values only: one row of NaN or infinity would make all rows wrong.
    scale = max(float(np.abs(want[np.isfinite(want)]).max(initial=0.0)), NOTHING)
    by_row = [distance(a, b) / scale for a, b in zip(have, want, strict=True)]
    chosen, best = have.argmax(1), want.argmax(1)
    over = [row for row, error in enumerate(by_row) if error > limit]
    return Logits(
        len(want),
        max(by_row),
        limit,
        int(np.argmax(by_row)),
        over[0] if over else -1,
        int((chosen != best).sum()),
        _regret(want, chosen, best) / scale,
    )


def _regret(want: Array, chosen: Array, best: Array) -> float:
    """Return the largest loss in logits by different choices; infinite if it is NaN."""
    rows = np.flatnonzero(chosen != best)
    with np.errstate(invalid="ignore"):  # infinity minus infinity is NaN
        lost = want[rows, best[rows]] - want[rows, chosen[rows]]
    return float(np.where(np.isnan(lost), np.inf, lost).max(initial=0.0))


def by_tap(session: Session, have: Array, want: Array) -> list[tuple[int, float]]:
    """Return the difference of the residual stream after each tapped layer, in layer order."""
    drafter = session.manifest.drafter
    assert drafter is not None
    width = session.manifest.target.hidden
    parts = [slice(i * width, (i + 1) * width) for i in range(len(drafter.taps))]
    found = {tap: share(have[:, p], want[:, p]) for tap, p in zip(drafter.taps, parts, strict=True)}
    return sorted(found.items())


def walk(
    session: Session,
    show: StepTracer,
    graph: str,
    tokens: Sequence[int],
    at: int,
    other: Outputs,
    least: float,
    progress: Progress,
) -> GraphCheck:
    """Check the operators of one graph up to the first that deviates from its definition."""
    count, parts, furthest = 0, None, None
    wrong: Deviation | None = None
    with progress.task(f"checking {graph}", None, "operators") as task:
        for seen in show.steps(walks(session.model)[graph](tokens, at)):
            count += 1
            task.advance(1)
            apart = drift(_stateless(session, seen), other) if other else None
            if apart and (furthest is None or apart.left > furthest.left):
                furthest = apart
            if apart and parts is None and jumps(apart, least):
                parts = apart
            if wrong := against_definition(seen):
                break
    session.model.state.reset()
    return GraphCheck(graph, at, count, wrong, parts, furthest)


def _stateless(session: Session, seen: TracedStep) -> TracedStep:
    def kept(values: Outputs) -> Outputs:
        return {n: x for n, x in values.items() if not _state(session, n)}

    return replace(seen, inputs=kept(seen.inputs), outputs=kept(seen.outputs))


@dataclass(frozen=True, slots=True)
class Reference:
    """What a package is compared with: a golden file, or another engine, which can be traced."""

    golden: Golden
    session: Session | None = None
    show: StepTracer | None = None

    def values(self, block: int, at: int) -> Outputs:
        """Return the values inside the verify of a block; empty if they are not available."""
        if self.golden.block != block:
            return {}
        if self.session is None or self.show is None:
            return self.golden.values if at == 0 else {}
        return _values(self.session, self.show, self.golden.tokens, at)


Operators = Literal["auto", "all", "none"]


def compare(
    session: Session,
    show: StepTracer | None,
    reference: Reference | None,
    tokens: Sequence[int],
    operators: Operators,
    tolerance: float | None,
    progress: Progress,
) -> CheckReport:
    """Compare logits, then operators: those of the verify of the first block that differs; with
    `all` or without a reference, those of every graph.

    Raises:
        RequestError: there is nothing to compare with, or the tokens do not fit in the context.
    """
    if show is None and reference is None:
        raise RequestError(
            f"check of engine {session.manifest.engine}, which shows nothing inside its steps, "
            "must go with --reference or --golden (got neither)"
        )
    report = CheckReport(None)
    limit = _limit(session, reference) if tolerance is None else tolerance
    shapes(session, tokens, taps=False)
    if reference is not None:
        notes = _made_by(session, reference, limit)
        if session.manifest.image_patches and operators != "all":
            notes = (*notes, NO_TOWER)
        report = replace(_outside(session, reference, limit, progress), notes=notes)
    differs = report.logits is not None and report.logits.first >= 0
    if show is None:
        return replace(report, notes=(*report.notes, UNSEEN.format(session.manifest.engine)))
    if operators == "none" or (operators == "auto" and reference is not None and not differs):
        return report
    at = report.logits.first // session.model.block if report.logits and differs else 0
    places = [("verify", at)]
    if operators == "all" or reference is None:
        last = (len(tokens) - 1) // session.model.block
        places += [("verify", last)] * (last != at)
        places += [(graph, at) for graph in walks(session.model) if graph != "verify"]
    return replace(report, walks=_walked(session, show, reference, tokens, places, limit, progress))


NO_TOWER = "the vision tower was not compared; with --operators all it is"
UNSEEN = (
    "engine {} shows nothing inside its steps; the lines for layers, if any, tell where it begins "
    "to differ"
)


def _made_by(session: Session, reference: Reference, limit: float) -> tuple[str, ...]:
    """Notes about where a golden file was made, if that was not here.

    Raises:
        RequestError: equal bits are wanted, which no other device or tuning has.
    """
    here, there = device(session), reference.golden.device or "an unknown device"
    if reference.session is not None or here == there:
        return ()
    if limit == 0:
        raise RequestError(
            f"--tolerance 0 must go with a golden file made by {here} (got one by {there}); "
            f"{REMAKE}"
        )
    return (f"the golden file was made by {there}; this is {here}",)


def _limit(session: Session, reference: Reference | None) -> float:
    rounded = rounds(session.manifest) or (reference is not None and reference.golden.rounds)
    return ROUNDED if rounded else EXACT


def _outside(
    session: Session, reference: Reference, limit: float, progress: Progress
) -> CheckReport:
    golden = reference.golden
    taps = golden.taps is not None and session.manifest.drafter is not None
    found = score(session, golden.tokens, taps, progress)
    layers: Sequence[tuple[int, float]] = ()
    if golden.taps is not None and taps:
        layers = by_tap(session, found["taps"], golden.taps)
    return CheckReport(logits(found["logits"], golden.logits, limit), layers)


def _walked(
    session: Session,
    show: StepTracer,
    reference: Reference | None,
    tokens: Sequence[int],
    places: Sequence[tuple[str, int]],
    limit: float,
    progress: Progress,
) -> list[GraphCheck]:
    done: list[GraphCheck] = []
    for graph, at in places:
        other: Outputs = {}
        if reference is not None and graph == "verify":
            other = reference.values(session.model.block, at)
        done.append(walk(session, show, graph, tokens, at, other, limit, progress))
    return done
