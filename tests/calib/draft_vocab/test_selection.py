"""A reduced draft vocabulary: what must be in it, its order, and when it is not worth it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from support.planner_nano import NANO

from thor_dflash.builders.checkpoint.draft_vocab import read_draft_ids
from thor_dflash.calib.draft_vocab import selection, trade
from thor_dflash.calib.draft_vocab.selection import AnswerTokens, Candidates, Coverage, candidates
from thor_dflash.calib.planbench import heldout
from thor_dflash.cli import main
from thor_dflash.config.build import CLOSING_MESSAGE
from thor_dflash.core.errors import RequestError
from thor_dflash.package.tokenizer_files import addressed_ids
from thor_dflash.runtime.text.tokenizer import Tokenizer

TARGET, DRAFTER = NANO / "target", NANO / "drafter"
KEPT = AnswerTokens("plan", (1001, 1001, 1002))
"""An answer that is counted, and one that is not."""
HELD = next(a for i in range(100) if (a := AnswerTokens("plan", (1001, i))).held)


@pytest.fixture(scope="module")
def text() -> Tokenizer:
    return Tokenizer.load(TARGET)


@pytest.fixture(scope="module")
def few_plans() -> Iterator[None]:
    """All tokens of plans come up in the first few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "PLANS", 24)
        yield


@pytest.fixture(scope="module")
def found(few_plans: None) -> Candidates:
    assert not KEPT.held
    return candidates(TARGET, [KEPT, HELD], [{"properties": {"qzx_jump": {"enum": ["wvv_up"]}}}])


def test_every_byte_special_and_plan_can_be_drafted(found: Candidates, text: Tokenizer) -> None:
    least = len(found.forced) + len(found.forced) % 2
    ids = set(found.list_of(least))
    assert {text.bytes_of(i) for i in ids} >= {bytes([b]) for b in range(256)}
    written = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<|im_start|>")
    for word in (CLOSING_MESSAGE, *written):
        assert ids.issuperset(text.encode(word)), word
    for task in heldout(12):  # their nouns are in no training task: bytes and pieces spell them
        plan = json.loads(task.plan)
        skills = {step["skill"] for step in plan["steps"]}
        for word in (*map(json.dumps, skills), '{"goal":', '"needs_clarification": null}'):
            assert ids.issuperset(text.encode(word)), word
    assert ids.issuperset(text.encode('"qzx_jump"') + text.encode('"wvv_up"'))


def test_marks_of_images_are_never_drafted(found: Candidates, text: Tokenizer) -> None:
    out = {i for word in ("<|vision_start|>", "<|audio_start|>") for i in text.encode(word)}
    assert len(out) == 2
    assert not out & set(found.ids)
    assert max(found.ids) < addressed_ids(TARGET)


def test_counts_then_lowest_ids_decide(found: Candidates, few_plans: None) -> None:
    free = [i for i in range(1200) if i not in found.forced][:5]
    drawn = (AnswerTokens("plan", (free[4],) * n + (free[3], free[2])) for n in range(2, 99))
    answer = next(one for one in drawn if not one.held)
    ids = candidates(TARGET, [answer, HELD]).ids
    rest = [i for i in ids if i not in found.forced and i < 1200]
    assert rest[:5] == [free[4], free[2], free[3], free[0], free[1]]
    assert rest[3:] == sorted(rest[3:])
    assert len(set(ids)) == len(ids)


def test_a_list_that_cannot_be_is_refused(found: Candidates, few_plans: None) -> None:
    least = len(found.forced)
    for size in (0, -2, least - 2 + least % 2, least + 1 - least % 2, len(found.ids) + 2):
        with pytest.raises(RequestError, match="--size must be an even number"):
            found.list_of(size)
    unseen = AnswerTokens("plan", KEPT.tokens, unseen=True)
    assert unseen.held
    for answers in ([], [AnswerTokens("plan", ())], [KEPT], [HELD], [unseen]):
        with pytest.raises(RequestError, match="must have answers to count"):
            candidates(TARGET, answers)


def test_coverage_is_of_answers_that_were_not_counted() -> None:
    one = Candidates(
        frozenset(), (3, 4, 5, 6), [AnswerTokens("plan", (3, 3, 6)), AnswerTokens("text", (9,))]
    )
    assert one.coverage(2) == {
        "all": Coverage(4, 2), "plan": Coverage(3, 2), "text": Coverage(1, 0),
    }  # fmt: skip
    shares = [one.coverage(size)["all"].share for size in (1, 2, 4)]
    assert shares == sorted(shares)


@pytest.mark.parametrize(("right", "block"), [*product((0.0, 0.5, 0.95, 1.0), (2, 8, 16))])
def test_the_accept_length_of_independent_drafts(right: float, block: int) -> None:
    # By its definition: one token, and each draft if all before it were right.
    want = 1 + sum(right**k for k in range(1, block))
    assert trade.accept_length(right, block) == pytest.approx(want, rel=1e-12)
    assert trade.accept_length(trade.probability(want, block), block) == pytest.approx(want)


def test_the_loss_is_that_of_the_published_figures() -> None:
    # At accept length 6.2 a coverage of .9975 costs 1.1 %.
    assert trade.loss(6.2, 0.9975, 16) == pytest.approx(0.011, abs=5e-4)
    assert trade.loss(6.2, 0.999, 16) == pytest.approx(0.004, abs=5e-4)
    assert trade.loss(14.3, 0.9975, 16) == pytest.approx(0.018, abs=5e-4)
    assert trade.loss(6.2, 1.0, 16) == pytest.approx(0.0, abs=1e-9)


def row(gain: float, loss: float, size: int = 2) -> trade.TradeOff:
    return trade.TradeOff(size, {}, 0.0, gain, loss)


def test_a_loss_is_never_recommended() -> None:
    assert trade.best([row(0.02, 0.02), row(0.03, 0.031)]) is None
    assert trade.best([row(0.02, 0.01, 4), row(0.031, 0.03, 2)]) == row(0.02, 0.01, 4)


def test_the_head_is_counted_as_it_is_read() -> None:
    cost = trade.cycle_cost(TARGET, DRAFTER)
    # Tied: BF16 rows of 320; both passes read them.
    assert (cost.ids, cost.row, cost.block) == (1280, 640.0, 16)
    files = sum((d / "model.safetensors").stat().st_size for d in (TARGET, DRAFTER))
    assert cost.cycle == pytest.approx(files + 1280 * 640, rel=0.02)
    assert cost.saved(1280) == 0.0
    assert cost.saved(640) == pytest.approx(640 * 640 / cost.cycle)


def corpus(directory: Path, rare: bool) -> Path:
    rng = np.random.default_rng(0)
    high = 1200 if rare else 300
    rows = [{"tokens": rng.integers(0, high, 60).tolist(), "class": "plan"} for _ in range(40)] + [
        {"messages": [{"role": "user", "content": "only a request"}]}
    ]
    path = directory / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_the_command_writes_what_build_reads_or_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], few_plans: None
) -> None:
    out = tmp_path / "ids.json"
    base = ["draft-vocab", "--target", str(TARGET), "--drafter", str(DRAFTER), "--out", str(out)]
    args = [*base, "--corpus", str(corpus(tmp_path, rare=False)), "--accept-length", "13.9"]
    assert main.main(args) == 0
    ids = read_draft_ids(out, 1280)
    assert len(ids) % 2 == 0
    assert "predicted speed 1.0" in capsys.readouterr().out
    out.unlink()
    args = [*base, "--corpus", str(corpus(tmp_path, rare=True)), "--accept-length", "13.9"]
    assert main.main(args) == 1
    assert "every size loses" in capsys.readouterr().out
    assert not out.exists()
    assert main.main([*args, "--size", "800"]) == 1
    assert not out.exists()
    assert main.main([*args, "--size", "800", "--force"]) == 0
    assert len(read_draft_ids(out, 1280)) == 800


@pytest.mark.parametrize(
    ("args", "rule"),
    [
        ("", "--corpus or --package must be given"),
        ("--corpus none.jsonl", "--accept-length must be given"),
        ("--corpus none.jsonl --accept-length 5", "none.jsonl must be a readable file"),
        ("--corpus none.jsonl --accept-length 0.5", "--accept-length must be 1 to"),
        ("--corpus none.jsonl --accept-length nan", "--accept-length must be 1 to"),
        ("--package p --rollouts 0", "--rollouts must be at least 1"),
        ("--package p --force", "--force must go with --size"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: str, rule: str
) -> None:
    base = ["draft-vocab", "--target", str(TARGET), "--drafter", str(DRAFTER)]
    assert main.main([*base, "--out", str(tmp_path / "x.json"), *args.split()]) == 2
    assert rule in capsys.readouterr().err.splitlines()[-1]


def test_a_corpus_of_requests_alone_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "go"}]}')
    base = ["draft-vocab", "--target", str(TARGET), "--drafter", str(DRAFTER)]
    more = ["--corpus", str(path), "--accept-length", "5", "--out", str(tmp_path / "x.json")]
    assert main.main([*base, *more]) == 2
    assert "must hold an answer" in capsys.readouterr().err
