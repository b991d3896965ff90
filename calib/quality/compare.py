"""Makes the report: answers, texts, the comparison, and the gates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import thor_dflash
from thor_dflash.calib.quality import gates as quality_gates
from thor_dflash.calib.quality import intervals, measure, scored_texts
from thor_dflash.calib.quality.divergence import RowDivergence, join
from thor_dflash.calib.quality.intervals import Interval
from thor_dflash.calib.quality.quality_report import (
    HISTOGRAM,
    ClassDivergence,
    LinearDrift,
    PlanComparison,
    QualityPackage,
    QualityReport,
    TextResult,
)
from thor_dflash.calib.quality.reference_logits import ReferenceLogits, StoredReference, same_model
from thor_dflash.calib.quality.scored_texts import PlanAnswer, PlanOutcome, ScoredText
from thor_dflash.config.quality import QualityConfig
from thor_dflash.core.errors import RequestError
from thor_dflash.core.progress import Progress
from thor_dflash.package import manifest
from thor_dflash.package.manifest import KvScales, Manifest
from thor_dflash.package.tokenizer_files import TOKENIZER
from thor_dflash.runtime.session import Session

ALL = "all"
RANGE = 256
"""Positions of a bar of the chart by position."""
NO_IMAGES = "only texts were read: what quantising has cost with images is not measured"


def package_of(found: Manifest, device: str, path: Path) -> QualityPackage:
    """Describe a package that runs on a device."""
    weights = {
        f"{label}, {kind}": total.bytes
        for label, kinds in found.quantisation.items()
        for kind, total in kinds.items()
    }
    plain = replace(found, kv="f32", kv_scales=KvScales())
    return QualityPackage(
        name=path.name or str(path),
        sha256=manifest.identity(found),
        model_sha256=manifest.identity(plain),
        engine=found.engine,
        device=device,
        kv=found.kv,
        activations=found.activations,
        weights=weights,
    )


def tokenizer_sha256(session: Session) -> str:
    """Of the package's tokenizer.json; "" for none."""
    entry = session.manifest.files.get(TOKENIZER)
    return entry.sha256 if entry else ""


def reference_of(
    session: Session,
    path: Path,
    documents: Sequence[ScoredText],
    config: QualityConfig,
    progress: Progress,
) -> StoredReference:
    """Answer the tasks, and list what is scored: the answers and the documents.

    Raises:
        RequestError: there is nothing to score.
    """
    answers = _answers(session, config, "reference", progress)
    end = session.tokenizer.end_think if session.tokenizer else None
    texts = [scored_texts.text_of_answer(answer, end) for answer in answers if answer.tokens]
    texts += documents
    if not texts:
        raise RequestError("quality must have tokens to score: tasks or --data (got neither)")
    return StoredReference(
        package=package_of(session.manifest, session.model.engine.device, path),
        tokenizer=tokenizer_sha256(session),
        ids=session.manifest.vocab_limit,
        texts=tuple(texts),
        outcomes=tuple(answer.outcome for answer in answers),
    )


def _answers(
    session: Session, config: QualityConfig, label: str, progress: Progress
) -> list[PlanAnswer]:
    if not config.tasks or session.tokenizer is None or not session.tokenizer.chats:
        return []
    return scored_texts.answer_tasks(session, config, label, progress)


def compare(
    reference: ReferenceLogits,
    stored: bool,
    candidate: Session,
    path: Path,
    linears: Sequence[LinearDrift],
    config: QualityConfig,
    progress: Progress,
) -> QualityReport:
    """Compare a candidate with a reference.

    Raises:
        RequestError: they have different tokens.
        ModelFault: a logit is NaN or infinite.
    """
    header = reference.header
    same_model(header, candidate, tokenizer_sha256(candidate))
    tasks = replace(config, tasks=len(header.outcomes))
    outcomes = [a.outcome for a in _answers(candidate, tasks, "package", progress)]
    plans = plan_comparison(header.outcomes, outcomes) if outcomes else None
    found = measure.compare(reference, candidate, progress)
    package = package_of(candidate.manifest, candidate.model.engine.device, path)
    whole = divergence(ALL, [[rows] for rows in found.rows])
    given = [[rows] for text, rows in zip(header.texts, found.rows, strict=True) if not text.own]
    results = tuple(
        quality_gates.gates(
            config.gates,
            whole,
            divergence("texts", given) if given else None,
            plans,
            found.cache,
            only_cache=cache_alone(header.package, package),
        )
    )
    return QualityReport(
        tool=thor_dflash.__version__,
        verdict=quality_gates.overall(results),
        reference=header.package,
        candidate=package,
        stored=stored,
        texts_sha256=scored_texts.sha256(header.texts),
        gates=results,
        whole=whole,
        classes=by_class(header.texts, found.rows),
        plans=plans,
        cache=tuple(found.cache),
        layers=tuple(found.layers),
        linears=tuple(linears),
        worst=tuple(found.worst),
        histogram=histogram(join(found.rows)),
        by_position=by_position(header.texts, found.rows),
        texts=text_results(header.texts, found.rows),
        settings={"skip": str(config.skip), "window": str(config.window)},
        notes=(NO_IMAGES,) if candidate.manifest.vision else (),
    )


def cache_alone(reference: QualityPackage, candidate: QualityPackage) -> bool:
    """Whether a package differs from the reference by its FP8 cache alone."""
    same = candidate.model_sha256 == reference.model_sha256
    return same and candidate.kv == "fp8" != reference.kv


def divergence(label: str, texts: Sequence[Sequence[RowDivergence]]) -> ClassDivergence:
    """Summarise the rows of some texts, each in parts."""
    each = [join(parts) for parts in texts]
    rows = join(each)
    counts = [float(len(one.kl)) for one in each]
    kl = _mean([one.kl.sum() for one in each], counts)
    top1 = _mean([float(one.same.sum()) for one in each], counts)
    rise = _mean([(one.nll - one.reference_nll).sum() for one in each], counts)
    return ClassDivergence(
        label=label,
        texts=len(each),
        tokens=len(rows.kl),
        kl=kl,
        median=float(np.median(rows.kl)),
        p99=float(np.quantile(rows.kl, 0.99)),
        most=float(rows.kl.max()),
        top1=top1,
        top1_sure=float(rows.same[rows.sure].mean()) if rows.sure.any() else None,
        perplexity_reference=float(np.exp(rows.reference_nll.mean())),
        perplexity=float(np.exp(rows.nll.mean())),
        perplexity_ratio=Interval(*np.exp([rise.value, rise.low, rise.high]).tolist()),
    )


def _mean(sums: Sequence[float], counts: Sequence[float]) -> Interval:
    found = intervals.ratio_of_sums(sums, counts)
    assert found is not None, "every text has scored tokens"
    return found


def by_class(
    texts: Sequence[ScoredText], rows: Sequence[RowDivergence]
) -> tuple[ClassDivergence, ...]:
    """Summarise each class of tokens."""
    found: dict[str, list[list[RowDivergence]]] = defaultdict(list)
    for text, all_rows in zip(texts, rows, strict=True):
        by: dict[str, list[RowDivergence]] = defaultdict(list)
        for span in text.spans:
            by[span.label].append(part(all_rows, span.begin - text.begin, span.end - text.begin))
        for label, parts in by.items():
            found[label].append(parts)
    return tuple(divergence(label, some) for label, some in found.items())


def part(rows: RowDivergence, begin: int, end: int) -> RowDivergence:
    """Some consecutive rows."""
    return RowDivergence(
        rows.kl[begin:end],
        rows.reference_nll[begin:end],
        rows.nll[begin:end],
        rows.same[begin:end],
        rows.sure[begin:end],
    )


def plan_comparison(
    reference: Sequence[PlanOutcome], candidate: Sequence[PlanOutcome]
) -> PlanComparison:
    """Compare the answers to the same tasks."""
    pairs = list(zip(reference, candidate, strict=True))
    only_reference = sum(a.valid and not b.valid for a, b in pairs)
    only_candidate = sum(b.valid and not a.valid for a, b in pairs)
    lengths = [_length(reference), _length(candidate)]
    drafted = all(length is not None and length > 1 for length in lengths)
    return PlanComparison(
        tasks=len(pairs),
        valid_reference=sum(a.valid for a in reference),
        valid=sum(b.valid for b in candidate),
        only_reference=only_reference,
        only_candidate=only_candidate,
        p=intervals.paired_p(only_reference, only_candidate),
        accept_length_reference=lengths[0],
        accept_length=lengths[1],
        accept_ratio=intervals.ratio_of_ratios(
            [b.committed for b in candidate],
            [b.cycles for b in candidate],
            [a.committed for a in reference],
            [a.cycles for a in reference],
        )
        if drafted
        else None,
        length_ratio=intervals.ratio_of_sums(
            [b.tokens for b in candidate], [a.tokens for a in reference]
        ),
    )


def _length(outcomes: Sequence[PlanOutcome]) -> float | None:
    cycles = sum(outcome.cycles for outcome in outcomes)
    return sum(outcome.committed for outcome in outcomes) / cycles if cycles else None


def histogram(rows: RowDivergence) -> tuple[int, ...]:
    """Rows in each bin of HISTOGRAM, and beyond the last."""
    bins = np.searchsorted(HISTOGRAM, rows.kl)
    return tuple(np.bincount(bins, minlength=len(HISTOGRAM) + 1).tolist())


def by_position(
    texts: Sequence[ScoredText], rows: Sequence[RowDivergence]
) -> tuple[tuple[int, int, float], ...]:
    """Mean divergence of the tokens of each range of positions."""
    at = np.concatenate([np.arange(text.begin, len(text.tokens)) for text in texts]) // RANGE
    kl = join(rows).kl
    counts, sums = np.bincount(at), np.bincount(at, kl)
    return tuple(
        (RANGE * i, int(count), float(sums[i] / count)) for i, count in enumerate(counts) if count
    )


def text_results(
    texts: Sequence[ScoredText], rows: Sequence[RowDivergence]
) -> tuple[TextResult, ...]:
    """One row a text."""
    return tuple(
        TextResult(
            name=text.name,
            label="+".join(span.label for span in text.spans),
            tokens=len(one.kl),
            kl=float(one.kl.mean()),
            top1=float(one.same.mean()),
        )
        for text, one in zip(texts, rows, strict=True)
    )
