"""Whole comparisons of two small packages: every figure against one computed plainly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support import constrained_model
from support.checkpoints import GEOMETRIES, dequantised, write_target
from support.seeing_model import seeing_package, seeing_session

from thor_dflash.calib.quality import compare, linear_drift
from thor_dflash.calib.quality.quality_report import QualityReport
from thor_dflash.calib.quality.reference_logits import (
    LiveReference,
    LogitsFile,
    store,
)
from thor_dflash.calib.quality.scored_texts import ScoredText, Span, parts_of_text
from thor_dflash.cli.commands.quality import lines
from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.quality import QualityConfig
from thor_dflash.core.errors import CheckpointError, RequestError
from thor_dflash.core.progress import Silent
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.measure.score import score
from thor_dflash.runtime.session import Session, open_session

CONFIG = QualityConfig(tasks=0, skip=4)
TEXTS = (
    ScoredText("own", tuple(range(5, 60)), (Span("thinking", 20, 31), Span("plan", 31, 55)), True),
    ScoredText("given", tuple(range(90, 130)), (Span("text", 4, 40),)),
)


@cache
def candidate() -> Session:
    """Another model of the same sizes."""
    package = constrained_model.package(seed=6)
    return open_session(package, EngineConfig(threads=1), Silent())


def reference(texts: tuple[ScoredText, ...] = TEXTS) -> LiveReference:
    session = constrained_model.session()
    header = compare.reference_of(session, Path("r"), texts, CONFIG, Silent())
    return LiveReference(session, header)


@pytest.fixture(scope="module")
def report() -> QualityReport:
    return compare.compare(reference(), False, candidate(), Path("c"), (), CONFIG, Silent())


def log_p(session: Session, text: ScoredText) -> Array:
    """Log probabilities before every scored token, in extended precision."""
    rows = score(session, text.tokens, taps=False, progress=Silent())["logits"]
    x = rows[text.begin - 1 : -1, : session.manifest.vocab_limit].astype(np.longdouble)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


@cache
def plain() -> tuple[tuple[Array, Array], ...]:
    return tuple((log_p(constrained_model.session(), t), log_p(candidate(), t)) for t in TEXTS)


def test_the_figures_are_those_of_the_logits(report: QualityReport) -> None:
    # Prompts are read by prefill steps here and by blocks there, which round differently.
    kl = [(np.exp(p) * (p - q)).sum(1).astype(float) for p, q in plain()]
    whole = np.concatenate(kl)
    near = {"rel": 1e-3}
    assert report.whole.kl.value == pytest.approx(whole.mean(), **near)
    assert report.whole.median == pytest.approx(np.median(whole), **near)
    assert report.whole.most == pytest.approx(whole.max(), **near)
    assert report.whole.p99 == pytest.approx(np.quantile(whole, 0.99), **near)
    same = np.concatenate([p.argmax(1) == q.argmax(1) for p, q in plain()])
    assert report.whole.top1.value == pytest.approx(same.mean())
    by = {one.label: one for one in report.classes}
    assert {label: one.tokens for label, one in by.items()} == {
        "thinking": 11, "plan": 24, "text": 36,
    }  # fmt: skip
    assert by["thinking"].kl.value == pytest.approx(kl[0][:11].mean(), **near)
    assert by["plan"].kl.value == pytest.approx(kl[0][11:].mean(), **near)
    p, q = plain()[1]
    rows, following = np.arange(36), np.array(TEXTS[1].tokens[4:])
    nll = [-float(x[rows, following].mean()) for x in (p, q)]
    assert by["text"].perplexity_reference == pytest.approx(np.exp(nll[0]), **near)
    assert by["text"].perplexity_ratio.value == pytest.approx(np.exp(nll[1] - nll[0]), **near)
    assert sum(report.histogram) == sum(n for _, n, _ in report.by_position) == 71


@pytest.mark.slow
def test_a_model_that_sees_is_measured_on_texts_alone(report: QualityReport) -> None:
    text, own = (ScoredText("t", tuple(range(5, 30)), (Span("text", 4, 20),)),), Path("r")
    with closing(open_session(seeing_package(), EngineConfig(threads=1), Silent())) as session:
        header = compare.reference_of(session, own, text, CONFIG, Silent())
        live = LiveReference(session, header)
        seen = compare.compare(live, False, seeing_session(), own, (), CONFIG, Silent())
    assert (report.notes, seen.notes) == ((), (compare.NO_IMAGES,))
    assert f"note: {compare.NO_IMAGES}" in lines(seen)


def test_the_worst_places_are_found(report: QualityReport) -> None:
    kl = np.concatenate([(np.exp(p) * (p - q)).sum(1) for p, q in plain()]).astype(float)
    places = [(t.name, t.begin + i) for t in TEXTS for i in range(len(t.tokens) - t.begin)]
    want = [places[i] for i in np.argsort(-kl)[:10]]
    assert [(one.text, one.position) for one in report.worst] == want
    first = report.worst[0]
    p, q = plain()[[t.name for t in TEXTS].index(first.text)]
    row = first.position - TEXTS[[t.name for t in TEXTS].index(first.text)].begin
    assert first.reference[0][1] == pytest.approx(float(np.exp(p[row].max())), rel=1e-3)
    assert first.candidate[0][1] == pytest.approx(float(np.exp(q[row].max())), rel=1e-3)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    with (tmp_path / "r.npz").open("wb") as file:
        store(file, reference(), Silent())
    return tmp_path / "r.npz"


def test_stored_logits_give_the_same_figures(stored: Path, report: QualityReport) -> None:
    with closing(LogitsFile(stored)) as held:
        found = compare.compare(held, True, candidate(), Path("c"), (), CONFIG, Silent())
    assert found.whole.kl.value == pytest.approx(report.whole.kl.value, rel=1e-4)
    assert found.texts_sha256 == report.texts_sha256
    assert [one.position for one in found.worst] == [one.position for one in report.worst]
    with np.load(stored) as arrays:
        rows = arrays["1"]
    ids = constrained_model.session().manifest.vocab_limit
    assert (rows.shape, rows.dtype) == ((36, ids), np.float16)


def test_a_package_equals_itself(stored: Path, report: QualityReport) -> None:
    session = constrained_model.session()
    with closing(LogitsFile(stored)) as held:
        own = compare.compare(held, True, session, Path("c"), (), CONFIG, Silent())
    assert own.whole.most < 1e-5  # float16
    assert own.whole.top1.value == 1.0
    assert own.verdict == "pass"
    assert own.layers == ()
    assert [layer.layer for layer in report.layers] == [0, 1]
    assert all(0.1 < layer.error < 10 for layer in report.layers)
    assert report.verdict == "fail"


def test_the_cache_alone_is_distinguished_from_other_weights() -> None:
    f32 = reference().header.package
    manifest = replace(constrained_model.session().manifest, kv="fp8")
    fp8 = compare.package_of(manifest, "cpu", Path("c"))
    assert fp8.model_sha256 == f32.model_sha256
    assert fp8.sha256 != f32.sha256
    assert compare.cache_alone(f32, fp8)
    assert not compare.cache_alone(fp8, f32)
    assert not compare.cache_alone(f32, f32)
    other = compare.package_of(candidate().manifest, "cpu", Path("c"))
    assert not compare.cache_alone(f32, replace(other, kv="fp8"))


def broken(data: bytes) -> Iterator[tuple[bytes, str]]:
    yield b"", "stored logits"
    yield b"{}", "stored logits"
    yield data[: len(data) // 2], "stored logits"
    for at in (data.index(b"1.npy") + 400, data.index(b"0.npy") + 300):
        yield data[:at] + bytes([data[at] ^ 64]) + data[at + 1 :], "undamaged"
    yield data.replace(b'"version": 1', b'"version": 2'), "version|stored"
    yield data.replace(b'"own", "tokens"', b'"own", "tokenz"'), "unknown|stored"


def test_a_damaged_file_is_refused(stored: Path) -> None:
    for data, rule in broken(stored.read_bytes()):
        stored.write_bytes(data)
        with pytest.raises(RequestError, match=rule), closing(LogitsFile(stored)) as held:
            compare.compare(held, True, candidate(), Path("c"), (), CONFIG, Silent())


def test_models_of_other_tokens_are_refused() -> None:
    live = reference()
    for change, rule in (
        ({"ids": 5}, "5 ids"),
        ({"tokenizer": "0" * 64}, "tokenizer.json"),
        ({"texts": (ScoredText("long", (1,) * 4000, (Span("text", 4, 4000),)),)}, "4000 tokens"),
    ):
        other = LiveReference(constrained_model.session(), replace(live.header, **change))
        with pytest.raises(RequestError, match=rule):
            compare.compare(other, False, candidate(), Path("c"), (), CONFIG, Silent())
    with pytest.raises(RequestError, match="must have tokens to score"):
        reference(())


def test_long_texts_are_cut() -> None:
    config = QualityConfig(skip=4, window=50)
    parts = parts_of_text("t", "", range(119), config, 1000)
    assert [len(part.tokens) for part in parts] == [50, 50]  # 19 are too few
    assert parts[1].tokens[0] == 50
    assert parts[1].spans == (Span("text", 4, 50),)
    assert [len(p.tokens) for p in parts_of_text("t", "a", range(100), config, 40)] == [40, 40, 20]
    assert [len(p.tokens) for p in parts_of_text("t", "a", range(5), config, 40)] == [5]
    with pytest.raises(RequestError, match="t must have more than 4 tokens"):
        parts_of_text("t", "a", range(4), config, 40)


def test_linears_are_compared_as_stored(tmp_path: Path) -> None:
    plain, packed = tmp_path / "bf16", tmp_path / "nvfp4"
    write_target(plain, GEOMETRIES["27b"], 3)
    write_target(packed, GEOMETRIES["27b"], 3, "modelopt")
    want, have = dequantised(plain), dequantised(packed)
    found = linear_drift.drift_of_linears(plain, packed, Silent())
    assert [one.error for one in found] == sorted((one.error for one in found), reverse=True)
    assert {one.format for one in found} >= {"nvfp4", "bf16"}
    for one in found:
        name = next(n for n in want if n.endswith(f"{one.name}.weight"))
        off = np.linalg.norm(have[name] - want[name]) / np.linalg.norm(want[name])
        assert one.error == pytest.approx(float(off), rel=1e-5, abs=1e-9), one.name
        assert (one.error > 0.05) == (one.format == "nvfp4"), one.name
    other = tmp_path / "other"
    write_target(other, replace(GEOMETRIES["27b"], intermediate=80), 3)
    with pytest.raises(CheckpointError, match="must have the linears of"):
        linear_drift.drift_of_linears(plain, other, Silent())
