"""What a request may ask for, end to end: options, model card, tokenizer, command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.checkpoints import GEOMETRIES, DrafterGeometry, write_drafter, write_target
from support.loop_models import drafts
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from thor_dflash.builders.build import build
from thor_dflash.cli import main
from thor_dflash.config.build import CLOSING_MESSAGE, BuildConfig, CardConfig
from thor_dflash.config.decode import BudgetConfig, DraftConfig, RelaxedConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import RequestError
from thor_dflash.core.progress import Silent
from thor_dflash.package import manifest
from thor_dflash.plugins.accept.record import LOG_MARGIN, PROBABILITY_DELTA
from thor_dflash.runtime.decoding.block import AcceptRule
from thor_dflash.runtime.policies.relaxed_acceptance import RelaxedThinking
from thor_dflash.runtime.session import Request, Session, open_session

TEMPLATE = "{{ messages[0].content }}<think>\n{{ '' if enable_thinking else '\n</think>\n\n' }}"


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer: ids 0 to 255 are bytes, then two thinking marks, a stop token and two tool
    marks.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(w, normalized=False) for w in ("<think>", "</think>")])
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    words = ("<tool_call>", "</tool_call>")
    tokenizer.add_tokens([AddedToken(w, normalized=False) for w in words])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "generation_config.json").write_text('{"eos_token_id": 258}')
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def built(root: Path, *, tokenizer: bool, drafter: bool = True) -> Path:
    write_target(root / "target", GEOMETRIES["27b"], 3, "bf16")
    write_drafter(root / "drafter", GEOMETRIES["27b"], DrafterGeometry(), 4)
    if tokenizer:
        write_tokenizer(root / "target")
    config = BuildConfig(
        chunk=32, capacity=512, widths=(8,),
        card=CardConfig(max_tokens=400, reply=150, source="a test"),
    )  # fmt: skip
    build(
        root / "target", root / "drafter" if drafter else None, root / "package", config, Silent()
    )
    return root / "package"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("package"), tokenizer=True)


@pytest.fixture(scope="module")
def session(package: Path) -> Iterator[Session]:
    s = open_session(package, EngineConfig(threads=1), Silent())
    yield s
    s.close()


def chat(s: Session, thinking: bool = True) -> tuple[int, ...]:
    assert s.tokenizer
    text = s.tokenizer.render([{"role": "user", "content": "put the cup away"}], thinking)
    return tuple(s.tokenizer.encode(text))


def answer(s: Session, **asked: object) -> list[int]:
    request = Request(prompt=chat(s), **asked)  # type: ignore[arg-type]
    return [t for chunk in s.generate(request) for t in chunk.tokens]


CLOSES, STOP, TOOLS = 257, 258, (259, 260)
"""Ids that relaxed acceptance must not accept as near misses."""
CLOSE = len(CLOSING_MESSAGE.encode()) - len("</think>") + 1
"""Tokens of the closing hint: one for each byte, but only one for the mark."""


# --- a session


def test_a_budget_closes_with_the_hint_and_keeps_the_reply(session: Session) -> None:
    got = answer(session, max_tokens=200, budget=BudgetConfig(tokens=30), stop=frozenset())
    assert session.tokenizer
    assert len(got) == 30 + 150
    assert tuple(got[30 : 30 + CLOSE]) == tuple(session.tokenizer.encode(CLOSING_MESSAGE))
    assert session.report().close == "hard"
    assert session.report().finish == "length"
    plain = answer(
        session, max_tokens=200, budget=BudgetConfig(tokens=30), drafter="none", stop=frozenset()
    )
    assert plain == got


def test_a_message_of_ones_own(session: Session) -> None:
    budget = BudgetConfig(tokens=9, message="enough.</think>")
    got = answer(session, max_tokens=100, budget=budget)
    assert session.tokenizer
    assert session.tokenizer.decode(got[9:17]) == "enough.</think>"


def test_thinking_off_is_without_budget(session: Session) -> None:
    prompt = chat(session, thinking=False)
    budget = BudgetConfig(tokens=1, message="x</think>")
    both = [
        [t for c in session.generate(Request(prompt=prompt, max_tokens=30, **o)) for t in c.tokens]
        for o in ({}, {"budget": budget}, {"relaxed": RelaxedConfig()})  # type: ignore[arg-type]
    ]
    assert both[0] == both[1] == both[2]


def test_everything_at_once(session: Session) -> None:
    asked = {"max_tokens": 120, "budget": BudgetConfig(tokens=20, message="x</think>")}
    strict = answer(session, **asked, drafter="none")
    assert answer(session, **asked, gate=True, draft=DraftConfig(context=64)) == strict
    assert answer(session, **asked, relaxed=RelaxedConfig(k=1), gate=True) == strict
    assert len(answer(session, **asked, relaxed=RelaxedConfig(rule="delta"))) == len(strict)


@pytest.mark.parametrize(
    ("config", "rule", "k", "margin"),
    [
        (RelaxedConfig(), LOG_MARGIN, 3, 1.0),
        (RelaxedConfig(rule="delta"), PROBABILITY_DELTA, 10, 0.6),
        (RelaxedConfig(k=7, margin=0.0), LOG_MARGIN, 7, 0.0),
    ],
)
def test_what_the_options_of_relaxed_acceptance_come_to(
    session: Session, config: RelaxedConfig, rule: int, k: int, margin: float
) -> None:
    request = Request(prompt=chat(session), max_tokens=9, stop=frozenset({7}), relaxed=config)
    want = AcceptRule(rule=rule, top_k=k, margin=margin, close=CLOSES, never=(STOP, *TOOLS))
    assert session.admit(request).relaxed == RelaxedThinking(want)


@pytest.mark.parametrize("draft", [9, CLOSES, STOP, *TOOLS])
def test_marks_are_never_accepted_as_near_misses(session: Session, draft: int) -> None:
    config = RelaxedConfig(k=512, margin=1e9)
    request = Request(prompt=chat(session), max_tokens=48, relaxed=config)
    admitted = replace(session.admit(request), proposer=drafts(lambda n: [draft] * 15))
    list(session.generate(admitted))
    taken = session.report().phases["thinking"].relaxed
    assert taken > 30 if draft == 9 else taken == 0


@pytest.mark.parametrize("count", [5, 8])
def test_stop_ids_of_the_request_are_strict_without_a_strict_slot(
    session: Session, count: int
) -> None:
    own, config = tuple(range(count)), RelaxedConfig(k=512, margin=1e9)
    request = Request(prompt=chat(session), max_tokens=48, stop=frozenset(own), relaxed=config)
    made = session.admit(request).relaxed
    assert isinstance(made, RelaxedThinking)
    placed = RelaxedThinking(replace(made.relaxed, never=(*own, STOP, *TOOLS)[:8]))
    said: list[object] = []
    for policy in (made, placed):
        guess = drafts(lambda n: [9, 9, 9, own[-1]] * 3)
        tokens = [t for c in session.run(request, guess, (policy,)) for t in c.tokens]
        said.append((tokens, session.report().spec))
        assert session.report().phases["thinking"].relaxed >= 30
        assert not any(session.report().spec.accept_hist[4:]), "three near ones and its own"
    assert said[0] == said[1]


def test_only_stop_ids_that_the_request_lacks_need_a_strict_slot(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = replace(session.manifest, stop_tokens=tuple(range(7)))
    monkeypatch.setattr(session.model, "manifest", many)
    request = Request(prompt=chat(session), max_tokens=9, relaxed=RelaxedConfig())
    with pytest.raises(
        RequestError, match=r"stop and tool ids of the package must be at most 8 .*\(got 9\)"
    ):
        session.admit(request)
    session.admit(replace(request, stop=frozenset({6})))


def test_a_soft_close_leaves_seven_stop_slots_and_begins_no_token_early(session: Session) -> None:
    budget = BudgetConfig(tokens=61, close="soft", ratio=1e-99)
    got = answer(session, max_tokens=212, budget=budget)
    assert got.index(CLOSES) == 31, "half of 61, and not before"
    unsaid = frozenset([t for t in range(512) if t not in got][-7:])
    assert answer(session, max_tokens=212, budget=budget, stop=unsaid) == got


def test_check_takes_what_generate_takes(session: Session) -> None:
    """With a budget, the thinking and the reply give the length, however large max_tokens is."""
    budget = BudgetConfig(tokens=30, reply=150)
    for take in (session.generate, session.admit):
        take(Request(prompt=chat(session), max_tokens=10**6, budget=budget))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"budget": BudgetConfig(tokens=5, reply=9)}, rf"must be >= {CLOSE + 1} tokens"),
        ({"budget": BudgetConfig(tokens=5, message="no mark")}, r"hold </think> once \(got \"no"),
        ({"budget": BudgetConfig(tokens=5, message="</think></think>")}, "hold </think> once"),
        (
            {"budget": BudgetConfig(close="soft")},
            r"must be hard unless .* sets a budget \(got soft\)",
        ),
        (
            {"budget": BudgetConfig(tokens=5, close="soft"), "stop": frozenset(range(8))},
            r"stop must hold at most 7 ids if decode.budget.close is soft \(got 8\)",
        ),
        ({"budget": BudgetConfig(effort="none")}, r'must not be "none" for a prompt that begins'),
        ({"relaxed": RelaxedConfig(k=10**9)}, r"relaxed.k must be at most \d+.*\(got 1000000000\)"),
        ({"drafter": "none", "gate": True}, r"gate on must be used with a drafter"),
        (
            {"drafter": "none", "relaxed": RelaxedConfig()},
            r"accept relaxed must be used with a drafter",
        ),
        (
            {"drafter": "none", "draft": DraftConfig(seed=3)},
            r"draft options must be used with a drafter",
        ),
    ],
)
def test_refused_at_once(session: Session, asked: dict[str, object], message: str) -> None:
    for refuse in (session.generate, session.admit):
        with pytest.raises(RequestError, match=message):
            refuse(Request(prompt=chat(session), max_tokens=200, **asked))  # type: ignore[arg-type]


def test_thinking_needs_marks(tmp_path: Path) -> None:
    s = open_session(built(tmp_path, tokenizer=False), EngineConfig(threads=1), Silent())
    for asked in ({"budget": BudgetConfig(tokens=5)}, {"relaxed": RelaxedConfig()}):
        with pytest.raises(RequestError, match="whose tokenizer has <think> and </think>"):
            s.generate(Request(prompt=(1,), max_tokens=200, **asked))  # type: ignore[arg-type]


def test_the_manifest_carries_the_card(package: Path) -> None:
    card = manifest.read(package).card
    assert (card.max_tokens, card.reply, card.high, card.source) == (400, 150, 250, "a test")


# --- the command line


SHORT = ("--set", "engine.capacity=96")
"""A context that ends thinking which nothing else ends."""


@dataclass(frozen=True)
class Said:
    code: int
    out: dict[str, object]
    err: str


def generate(capsys: pytest.CaptureFixture[str], package: Path, *args: str) -> Said:
    code = main.main(
        ["generate", "--package", str(package), "--prompt", "hi", "--json", "--ignore-eos",
         "--set", "engine.threads=1", *args]
    )  # fmt: skip
    out, err = capsys.readouterr()
    return Said(code, json.loads(out) if out else {}, err)


def test_the_flags(capsys: pytest.CaptureFixture[str], package: Path) -> None:
    common = ("--max-tokens", "120", "--set", "decode.budget.message=x</think>")
    said = generate(capsys, package, *common, "--thinking-budget", "12", "--gate", "on",
                    "--set", "decode.draft.context=64")  # fmt: skip
    assert said.code == 0
    assert said.out["close_kind"] == "hard"
    assert set(said.out["phases"]) == {"thinking", "closing", "answer"}  # type: ignore[call-overload]
    notes = {(n["what"], n["why"]) for n in said.out["notes"]}  # type: ignore[attr-defined]
    assert ("forced", "thinking budget") in notes
    assert ("gated", "measuring a plain step") in notes
    narrow = generate(capsys, package, *common, "--thinking-budget", "12", "--block", "8")
    assert narrow.out["tokens"] == said.out["tokens"]
    assert len(narrow.out["spec"]["accept_hist"]) == 8  # type: ignore[index,call-overload]
    low = generate(capsys, package, "--max-tokens", "300", "--reasoning-effort", "low")
    assert (low.code, low.out["close_kind"]) == (0, "hard")
    assert low.out["usage"]["thinking_tokens"] == 31 + CLOSE - 2  # type: ignore[index]
    relaxed = generate(capsys, package, "--accept", "relaxed", "--set", "decode.relaxed.k=9",
                       "--set", "decode.relaxed.margin=5", *SHORT)  # fmt: skip
    assert relaxed.out["phases"]["thinking"]["relaxed"] > 0  # type: ignore[index]
    soft = generate(capsys, package, *common, "--thinking-budget", "60", "--thinking-close",
                    "soft", "--set", "decode.budget.ratio=0.000001")  # fmt: skip
    assert soft.out["close_kind"] == "soft"
    assert soft.out["usage"]["thinking_tokens"] == 31  # type: ignore[index]


def test_effort_none_does_not_think(capsys: pytest.CaptureFixture[str], package: Path) -> None:
    none = generate(capsys, package, "--reasoning-effort", "none", "--max-tokens", "20")
    off = generate(capsys, package, "--thinking", "off", "--max-tokens", "20")
    assert none.out["tokens"] == off.out["tokens"]
    assert none.out["usage"] == off.out["usage"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--thinking-budget -2", "decode.budget.tokens must be -1 to 2147483647 (got -2)"),
        ("--thinking-close firm", 'decode.budget.close must be "hard" or "soft" (got "firm")'),
        ("--thinking-close soft", "decode.budget.close must go with a budget or an effort (got no"),
        ("--reasoning-effort lots", "decode.budget.effort must be"),
        ("--accept loose", 'decode.accept must be "strict" or "relaxed"'),
        ("--accept relaxed --drafter none", "accept relaxed must be used with a drafter"),
        ("--gate maybe", "decode.gate must be"),
        ("--gate on --drafter none", "gate on must be used with a drafter"),
        ("--block 6", "engine.block must be 8 or 16, as the package was built (got 6)"),
        ("--set decode.relaxed.k=2", "decode.relaxed.k must go with --accept relaxed (got accept"),
        ("--set decode.relaxed.rule=delta", "decode.relaxed.rule must go with --accept relaxed"),
        ("--set decode.relaxed.margin=0.5", "decode.relaxed.margin must go with --accept relaxed"),
        ("--set decode.budget.message=x</think>", "budget.message must go with a budget or an"),
        ("--set decode.budget.reply=9", "decode.budget.reply must go with a budget or an effort"),
        ("--set decode.budget.soften=0.1", "decode.budget.soften must go with a budget or an"),
        ("--thinking-budget 9 --set decode.budget.soften=0.1", "soften must go with --thinking-cl"),
        ("--reasoning-effort none --set decode.budget.reply=9", "reply must go with a budget or"),
        ("--reasoning-effort none --thinking-close soft", "close must go with a budget or an"),
        ("--reasoning-effort none --thinking on", "thinking must be off with decode.budget.effort"),
        ("--reasoning-effort low --set decode.budget.ratio=0.1", "ratio must go with --thinking-c"),
        ("--set decode.relaxed.margin=-2", "decode.relaxed.margin must be -1, or 0 to 2147483647"),
        ("--set decode.budget.ratio=0.0", "decode.budget.ratio must be above 0 and at most 1"),
        ("--set decode.draft.window=5", "decode.draft.window must be 0 or 16 to 32 tokens (got 5)"),
        ("--set decode.budget.x=1", "unknown key decode.budget.x"),
    ],
)
def test_invalid_and_contradictory_options_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], package: Path, args: str, message: str
) -> None:
    said = generate(capsys, package, *args.split())
    assert said.code == 2
    assert message in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "file"),
    [
        ("--set decode.relaxed.k=2", "accept = 'relaxed'"),
        ("--set decode.relaxed.k=0 --set decode.budget.soften=0.5", ""),
        ("", "relaxed.k = 2\nbudget.reply = 40\nbudget.soften = 0.1"),
    ],
)
def test_a_file_may_set_options_that_have_no_effect_on_this_request(
    capsys: pytest.CaptureFixture[str], package: Path, tmp_path: Path, args: str, file: str
) -> None:
    """An option without effect is refused only where the command line changes it. In turn: the file
    makes it effective; the command line gives its default; the file itself sets it.
    """
    (tmp_path / "c.toml").write_text(f"[decode]\nmax_tokens = 1\n{file}\n")
    assert (
        generate(capsys, package, "-c", str(tmp_path / "c.toml"), *SHORT, *args.split()).code == 0
    )
