"""A reduced draft vocabulary: what must be in it, its order, and when it is not worth it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.planner_nano import NANO

from thor_dflash.builders.checkpoint.draft_vocab import read_draft_ids
from thor_dflash.calib.draft_vocab import rollouts, selection, trade
from thor_dflash.calib.draft_vocab.selection import AnswerTokens, Candidates, Coverage, candidates
from thor_dflash.calib.planbench import heldout
from thor_dflash.cli import main
from thor_dflash.config.build import CLOSING_MESSAGE
from thor_dflash.core.errors import RequestError
from thor_dflash.package import manifest
from thor_dflash.package.manifest import FileEntry
from thor_dflash.package.tokenizer_files import TOKENIZER, addressed_ids
from thor_dflash.runtime.decoding.telemetry import BlockDrafts
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
    held = [AnswerTokens("plan", (4, 9, 3, 3, 6), thought=2), AnswerTokens("text", (9,))]
    one = Candidates(frozenset(), (3, 4, 5, 6), held)
    assert one.coverage(2) == {
        "all": Coverage(6, 3), "thinking": Coverage(2, 1), "plan": Coverage(3, 2),
        "text": Coverage(1, 0),
    }  # fmt: skip
    shares = [one.coverage(size)["all"].share for size in (1, 2, 4)]
    assert shares == sorted(shares)


@pytest.mark.parametrize(("right", "block"), [*product((0.0, 0.5, 0.95, 1.0), (2, 8, 16))])
def test_the_accept_length_of_independent_drafts(right: float, block: int) -> None:
    # By its definition: one token, and each draft if all before it were right.
    want = 1 + sum(right**k for k in range(1, block))
    assert trade.accept_length(right, block) == pytest.approx(want, rel=1e-12)
    assert trade.accept_length(trade.probability(want, block), block) == pytest.approx(want)


def test_a_cycle_ends_where_a_draft_is_wrong_or_missing() -> None:
    answer = AnswerTokens("plan", (1, 2, 9, 1, 1, 1, 1, 1, 1), refused=(1,))
    # Blocks of 4: 1 2 | 9 1 1 1 | 1 1 1, where the last of four is the target's own.
    assert trade.cycles(answer, range(100), 4) == 3
    assert trade.cycles(answer, {1, 2}, 4) == 4  # 1 2 | 9 | 1 1 1 1 | 1 1
    assert trade.cycles(answer, range(100), 1) == 9
    # The token after the drafts costs nothing if it is missing.
    assert trade.cycles(AnswerTokens("plan", (1, 1, 1, 9, 1)), {1}, 4) == 2


@pytest.mark.parametrize(("length", "share"), [(6.2, 0.99), (14.3, 0.9975), (2.0, 0.9)])
def test_independent_drafts_lose_what_their_law_says(length: float, share: float) -> None:
    rng = np.random.default_rng(1)
    text = tuple((rng.random(60_000) < share).tolist())  # True: in the list
    held = [trade.drawn(AnswerTokens("plan", text), length, 16, seed=0)]
    assert len(text) / trade.cycles(held[0], range(2), 16) == pytest.approx(length, rel=0.01)
    right = trade.probability(length, 16)
    want = 1 - trade.accept_length(right * share, 16) / length
    one = Candidates(frozenset(), (1, 0), held)
    assert trade.loss(one, 1, 16) == pytest.approx(want, abs=0.004)
    assert trade.loss(one, 2, 16) == 0.0


def test_drafts_that_were_wrong_are_where_a_block_ended_early() -> None:
    blocks = [BlockDrafts("drafter", *one) for one in ((3, 3), (3, 1), (3, 0), (0, 0), (3, 2))]
    # 0 1 2 3 | 4 5 | 6 | 7 | 8 9 10, of which the last was not kept
    assert list(rollouts.refused(blocks, 11)) == [5, 6, 10]
    assert list(rollouts.refused(blocks, 10)) == [5, 6]


def test_the_sizes_hold_the_smallest_that_loses_little() -> None:
    held = [AnswerTokens("plan", (*(437,) * 9, *range(400)))]
    found = Candidates(frozenset(range(10)), tuple(range(1000)), held)
    cost = trade.CycleCost(1000, 1.0, 1000.0, 16)
    assert {10, 438} <= set(trade.sizes(found, cost))
    assert trade.loss(found, 438, 16) == 0.0
    assert trade.loss(found, 436, 16) > trade.LOSS
    found.held.append(AnswerTokens("plan", (1001, 1) * 50))  # no list covers it
    assert min(trade.sizes(found, cost)) == 10


def row(gain: float, loss: float, size: int = 2) -> trade.TradeOff:
    return trade.TradeOff(size, {}, 0.0, gain, loss)


def test_a_loss_is_never_recommended() -> None:
    assert trade.best([row(0.005, 0.006), row(0.2, 0.011), row(0.001, 0.0)]) is None
    assert trade.best([row(0.02, 0.01, 4), row(0.3, 0.03, 2)]) == row(0.02, 0.01, 4)
    assert trade.best([]) is None


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
    high = 1280 if rare else 300  # those above 1200 are in no list
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
    assert "no reduced vocabulary pays" in capsys.readouterr().out
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
        ("--package p --accept-length 5", "--accept-length must be given without --package"),
        ("--corpus none.jsonl --accept-length 5", "none.jsonl must be a readable file"),
        ("--corpus none.jsonl --accept-length 0.5", "--accept-length must be 1 to"),
        ("--corpus none.jsonl --accept-length nan", "--accept-length must be 1 to"),
        ("--package p --rollouts 0", "--rollouts must be at least 1"),
        ("--package p --force", "--force must go with --size"),
        ("--package p --size 0", "--size must be an even number up to 1280"),
        ("--package p --size 801", "--size must be an even number up to 1280"),
        ("--package p --size 1282", "--size must be an even number up to 1280"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: str, rule: str
) -> None:
    base = ["draft-vocab", "--target", str(TARGET), "--drafter", str(DRAFTER)]
    assert main.main([*base, "--out", str(tmp_path / "x.json"), *args.split()]) == 2
    assert rule in capsys.readouterr().err.splitlines()[-1]


def test_the_package_of_another_tokenizer_is_refused_before_it_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {TOKENIZER: FileEntry(sha256="ab" * 32, bytes=1)}
    monkeypatch.setattr(manifest, "read", lambda path: SimpleNamespace(files=other))
    base = ["draft-vocab", "--target", str(TARGET), "--drafter", str(DRAFTER), "--package", "p"]
    assert main.main([*base, "--out", str(tmp_path / "x.json")]) == 2
    assert "tokenizer.json (got abab" in capsys.readouterr().err.splitlines()[-1]


def test_a_corpus_of_requests_alone_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "go"}]}')
    base = ["draft-vocab", "--target", str(TARGET), "--drafter", str(DRAFTER)]
    more = ["--corpus", str(path), "--accept-length", "5", "--out", str(tmp_path / "x.json")]
    assert main.main([*base, *more]) == 2
    assert "must hold an answer" in capsys.readouterr().err
