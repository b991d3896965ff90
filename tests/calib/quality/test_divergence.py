"""Divergence, intervals and gates, against plain computations and published values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from thor_dflash.calib.quality import gates, intervals, measure
from thor_dflash.calib.quality.compare import divergence, histogram, plan_comparison
from thor_dflash.calib.quality.divergence import RowDivergence, best, compare_rows
from thor_dflash.calib.quality.quality_report import HISTOGRAM, CacheLayer
from thor_dflash.calib.quality.reference_logits import LOGITS
from thor_dflash.calib.quality.scored_texts import PlanOutcome
from thor_dflash.config.quality import GateConfig
from thor_dflash.core.errors import ConfigError, ModelFault
from thor_dflash.core.tensors import Array


def plain(p: Array, q: Array) -> float:
    """KL of two rows of logits, as the definition has it, in extended precision."""
    a, b = (np.exp(x.astype(np.longdouble)) for x in (p, q))
    a, b = a / a.sum(), b / b.sum()
    return float((a * np.log(a / b)).sum())


def test_rows_are_as_defined() -> None:
    rng = np.random.default_rng(1)
    p, q = rng.normal(0, 5, (2, 40, 97)).astype(np.float32)
    q[:5] = p[:5] + rng.normal(0, 1e-3, (5, 97)).astype(np.float32)
    following = rng.integers(0, 97, 40)
    found = compare_rows(p, q, following.tolist())
    want = [plain(a, b) for a, b in zip(p, q, strict=True)]
    # Terms of size 1e-3 cancel in the small ones.
    np.testing.assert_allclose(found.kl, want, rtol=1e-9, atol=1e-15)
    for rows, nll in ((p, found.reference_nll), (q, found.nll)):
        a = np.exp(rows.astype(np.longdouble))
        wanted = -np.log(a[np.arange(40), following] / a.sum(1))
        np.testing.assert_allclose(nll, wanted.astype(float), rtol=1e-12)
    assert found.same.tolist() == [a.argmax() == b.argmax() for a, b in zip(p, q, strict=True)]
    tops = np.sort(p, axis=1)
    assert found.sure.tolist() == (tops[:, -1] - tops[:, -2] > 1).tolist()


def test_a_case_by_hand_and_the_direction() -> None:
    p, q = np.log([[0.5, 0.25, 0.25]]), np.log([[0.25, 0.5, 0.25]])
    found = compare_rows(p.astype(np.float32), q.astype(np.float32), [0])
    assert found.kl[0] == pytest.approx(0.25 * math.log(2), rel=1e-6)
    r = np.log([[0.8, 0.1, 0.1]]).astype(np.float32)
    forth, back = compare_rows(p, r, [0]).kl[0], compare_rows(r, p, [0]).kl[0]
    assert forth == pytest.approx(0.5 * math.log(5 / 8) + 0.5 * math.log(2.5), rel=1e-6)
    assert back == pytest.approx(0.8 * math.log(1.6) + 0.2 * math.log(0.4), rel=1e-6)


def test_logits_may_be_large_and_shifted_but_not_nan() -> None:
    p = np.array([[3e4, 2.9999e4, -6e4]], np.float32)
    assert compare_rows(p, p - 1e4, [2]).kl[0] == 0.0
    assert compare_rows(p, p, [2]).nll[0] == pytest.approx(
        9e4 + math.log(1 + math.exp(-1)), rel=1e-6
    )
    for wrong in (np.nan, np.inf, -np.inf):
        q = p.copy()
        q[0, 1] = wrong
        with pytest.raises(ModelFault):
            compare_rows(p, q, [0])


def test_the_best_of_equal_tokens_is_the_first() -> None:
    row = np.zeros(6, np.float32)
    row[[4, 2]] = 1.0
    assert [i for i, _ in best(row, 3)] == [2, 4, 0]
    assert sum(p for _, p in best(row, 6)) == pytest.approx(1.0)


@pytest.mark.parametrize("sizes", [((3, 4, 1), (8,)), ((1,) * 8, (5, 3)), ((4, 4), (4, 4))])
def test_blocks_of_other_sizes_meet_row_by_row(sizes: tuple[tuple[int, ...], ...]) -> None:
    def blocks(cut: tuple[int, ...]) -> Iterator[dict[str, Array]]:
        pairs = zip(cut, np.cumsum(cut).tolist(), strict=True)
        return iter([{LOGITS: np.arange(end - n, end)[:, None]} for n, end in pairs])

    pairs = list(measure.aligned(blocks(sizes[0]), blocks(sizes[1])))
    for side in (0, 1):
        assert np.concatenate([pair[side][LOGITS] for pair in pairs])[:, 0].tolist() == [*range(8)]
    assert all(len(a[LOGITS]) == len(b[LOGITS]) for a, b in pairs)


def test_only_the_largest_number_of_e4m3_is_saturated() -> None:
    bits = np.array([0x7E, 0xFE, 0x7D, 0x7F, 0xFF, 0x00], np.uint8)
    assert measure.saturated(bits) == 2


def test_an_interval_is_over_texts() -> None:
    even = intervals.ratio_of_sums([2.0] * 50, [4.0] * 50)
    assert even == intervals.Interval(0.5, 0.5, 0.5)
    rng = np.random.default_rng(2)
    sums = rng.normal(10, 2, 400)
    found = intervals.ratio_of_sums(sums.tolist(), [10.0] * 400)
    assert found is not None
    # The standard error of a mean of 400.
    wide = 2 * 1.96 * sums.std() / 20 / 10
    assert found.high - found.low == pytest.approx(wide, rel=0.1)
    assert found.low < found.value < found.high
    assert intervals.ratio_of_sums([1.0], [0.0]) is None


def test_paired_successes() -> None:
    # Exact binomial tails.
    for pair, p in {(0, 0): 1.0, (1, 5): 14 / 64, (6, 0): 2 / 64, (3, 3): 1.0}.items():
        assert intervals.paired_p(*pair) == pytest.approx(p)


def test_the_interval_of_a_share() -> None:
    # 0 of 10 is the example of Brown, Cai and DasGupta (2001).
    found = intervals.share(59, 60)
    assert (found.low, found.high) == pytest.approx((0.9114, 0.9971), abs=1e-4)
    assert (intervals.share(0, 10).low, intervals.share(0, 10).high) == pytest.approx(
        (0.0, 0.2775), abs=1e-4
    )


def outcomes(valid: str, committed: int, cycles: int) -> list[PlanOutcome]:
    return [
        PlanOutcome(task=str(i), tokens=20, committed=committed, cycles=cycles, valid=v == "1")
        for i, v in enumerate(valid)
    ]


def test_own_answers_are_paired() -> None:
    found = plan_comparison(outcomes("11110", 120, 10), outcomes("10001", 60, 10))
    assert (found.valid_reference, found.valid) == (4, 2)
    assert (found.only_reference, found.only_candidate) == (3, 1)
    assert found.accept_ratio == intervals.Interval(0.5, 0.5, 0.5)
    plainly = plan_comparison(outcomes("1", 10, 10), outcomes("1", 10, 10))
    assert plainly.accept_ratio is None


def rows_of(kl: list[float]) -> RowDivergence:
    ones = np.ones(len(kl))
    found = compare_rows(np.zeros((len(kl), 3)), np.zeros((len(kl), 3)), [0] * len(kl))
    return replace(found, kl=np.array(kl), reference_nll=ones, nll=2 * ones)


def test_gates_at_their_limits() -> None:
    config = GateConfig(mean_kl=(0.1, 0.2), perplexity=(2.0, 3.0), saturated=(0.0, 0.1))
    cache = [CacheLayer(layer=3, values=50, k=1, v=9)]

    def verdicts(kl: float, only_cache: bool = False, valid: str = "1" * 8) -> dict[str, str]:
        whole = divergence("all", [[rows_of([kl, kl])]])
        plans = plan_comparison(outcomes("1" * 8, 9, 3), outcomes(valid, 9, 3))
        every = gates.gates(config, whole, whole, plans, cache, only_cache=only_cache)
        return {gate.name: gate.verdict for gate in every}

    found = verdicts(0.1)
    assert found["mean_kl"] == "pass"
    assert found["perplexity"] == "warn"  # e = 2.7
    assert found["saturated"] == "warn"  # 10 of 100: at the limit
    assert found["cache_kl"] == "not measured"
    assert found["top1"] == "pass"
    assert found["accept_length"] == "pass"
    assert verdicts(0.2)["mean_kl"] == "warn"
    assert verdicts(np.nextafter(0.2, 1))["mean_kl"] == "fail"
    assert verdicts(0.02, only_cache=True)["cache_kl"] == "warn"
    assert verdicts(0.0, valid="0" * 2 + "1" * 6)["plans"] == "pass"  # p = 0.5: chance
    assert verdicts(0.0, valid="0" * 7 + "1")["plans"] == "fail"


@pytest.mark.parametrize(("value", "want"), [(0.93, "pass"), (0.9299, "warn"), (0.8999, "fail")])
def test_a_gate_that_wants_large_values(value: float, want: str) -> None:
    assert gates.verdict("top1", value, GateConfig().top1) == want


@pytest.mark.parametrize("limits", [(0.2, 0.1), (-1.0, 1.0), (0.0, math.inf), (math.nan, 1.0)])
def test_limits_that_make_no_sense_are_refused(limits: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match=r"quality\.gates\.mean_kl"):
        GateConfig(mean_kl=limits)
    with pytest.raises(ConfigError, match=r"quality\.gates\.top1"):
        GateConfig(top1=(0.5, 0.6))


def test_every_row_is_in_one_bin() -> None:
    counts = histogram(rows_of([0.0, HISTOGRAM[0], 1e-3, HISTOGRAM[-1], 1e9]))
    assert sum(counts) == 5
    assert (counts[0], counts[-2], counts[-1]) == (2, 1, 1)
