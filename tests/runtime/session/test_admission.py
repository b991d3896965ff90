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


@pytest.mark.parametrize("draft", [9, CLOSES, STOP, *TOOLS])
def test_marks_are_never_accepted_as_near_misses(session: Session, draft: int) -> None:
    config = RelaxedConfig(k=512, margin=1e9)
    request = Request(prompt=chat(session), max_tokens=48, relaxed=config)
    admitted = replace(session.admit(request), proposer=drafts(lambda n: [draft] * 15))
    list(session.generate(admitted))
    taken = session.report().phases["thinking"].relaxed
    assert taken > 30 if draft == 9 else taken == 0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"budget": BudgetConfig(tokens=5, reply=9)}, rf"must be >= {CLOSE + 1} tokens"),
        ({"budget": BudgetConfig(tokens=5, message="</think></think>")}, "hold </think> once"),
        (
            {"budget": BudgetConfig(close="soft")},
            r"must be hard unless .* sets a budget \(got soft\)",
        ),
        ({"drafter": "none", "gate": True}, r"gate on must be used with a drafter"),
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


# --- the command line


SHORT = ("--set", "engine.capacity=96")
"""A context that ends thinking which nothing else ends."""


@dataclass(frozen=True)
class Printed:
    code: int
    out: dict[str, object]
    err: str


def generate(capsys: pytest.CaptureFixture[str], package: Path, *args: str) -> Printed:
    code = main.main(
        ["generate", "--package", str(package), "--prompt", "hi", "--json", "--ignore-eos",
         "--set", "engine.threads=1", *args]
    )  # fmt: skip
    out, err = capsys.readouterr()
    return Printed(code, json.loads(out) if out else {}, err)


@pytest.mark.slow
def test_the_flags(capsys: pytest.CaptureFixture[str], package: Path) -> None:
    common = ("--max-tokens", "120", "--set", "decode.budget.message=x</think>")
    written = generate(capsys, package, *common, "--thinking-budget", "12", "--gate", "on",
                    "--set", "decode.draft.context=64")  # fmt: skip
    assert written.code == 0
    assert written.out["close_kind"] == "hard"
    assert set(written.out["phases"]) == {"thinking", "closing", "answer"}  # type: ignore[call-overload]
    notes = {(n["what"], n["why"]) for n in written.out["notes"]}  # type: ignore[attr-defined]
    assert ("forced", "thinking budget") in notes
    assert ("gated", "measuring a plain step") in notes
    narrow = generate(capsys, package, *common, "--thinking-budget", "12", "--block", "8")
    assert narrow.out["tokens"] == written.out["tokens"]
    assert len(narrow.out["spec"]["accept_hist"]) == 8  # type: ignore[index,call-overload]
    low = generate(capsys, package, "--max-tokens", "300", "--reasoning-effort", "low")
    assert (low.code, low.out["close_kind"]) == (0, "hard")
    assert low.out["usage"]["thinking_tokens"] == 31 + CLOSE - 2  # type: ignore[index]
    relaxed = generate(capsys, package, "--accept", "relaxed", "--set", "decode.relaxed.k=9",
                       "--set", "decode.relaxed.margin=5", "--max-tokens", "60",
                       *SHORT)  # fmt: skip
    assert relaxed.out["phases"]["thinking"]["relaxed"] > 0  # type: ignore[index]
    soft = generate(capsys, package, *common, "--thinking-budget", "60", "--thinking-close",
                    "soft", "--set", "decode.budget.ratio=0.000001")  # fmt: skip
    assert soft.out["close_kind"] == "soft"
    assert soft.out["usage"]["thinking_tokens"] == 31  # type: ignore[index]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--thinking-close firm", 'decode.budget.close must be "hard" or "soft" (got "firm")'),
        ("--accept relaxed --drafter none --max-tokens 8", "accept relaxed must be used with a dr"),
        ("--block 6", "engine.block must be 8 or 16, as the package was built (got 6)"),
        ("--set decode.relaxed.k=2", "decode.relaxed.k must go with --accept relaxed (got accept"),
        ("--thinking-budget 9 --set decode.budget.soften=0.1", "soften must go with --thinking-cl"),
        ("--reasoning-effort none --thinking on", "thinking must be off with decode.budget.effort"),
        ("--set decode.budget.ratio=0.0", "decode.budget.ratio must be above 0 and at most 1"),
        ("--set decode.budget.x=1", "unknown key decode.budget.x"),
    ],
)
def test_invalid_and_contradictory_options_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], package: Path, args: str, message: str
) -> None:
    written = generate(capsys, package, *args.split())
    assert written.code == 2
    assert message in written.err
    assert written.err.count("thor-dflash: ") == 1
