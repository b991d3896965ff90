"""How the `decode` section of the configuration becomes a request, for `generate` and `profile`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.samples import MANIFEST

from thor_dflash.cli import main
from thor_dflash.cli.input_files import read_prompt
from thor_dflash.cli.requests import PromptOptions
from thor_dflash.config.decode import NO_BUDGET, NO_DRAFT_LIMITS
from thor_dflash.config.tree import load
from thor_dflash.core.errors import RequestError
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.session import Request
from thor_dflash.runtime.session.admission import PackageText


def session_of(text: Any, limit: int) -> Any:
    model = SimpleNamespace(limit=limit, capacity=limit + MANIFEST.block)
    package = PackageText(MANIFEST, text, model.capacity)
    return SimpleNamespace(manifest=MANIFEST, tokenizer=text, model=model, package_text=package)


def request_of(
    *overrides: str, messages: list[dict[str, str]] | None = None, reads: tuple[str, ...] = ()
) -> Request:
    """Returns the request for a package with a drafter. Its stand-in of a chat template renders "t"
    with thinking and "f" without, and then the options, of which it reads some.
    """
    text = SimpleNamespace(
        marks=None,
        options=frozenset(reads),
        render=lambda messages, thinking, options, pictures: (
            "ft"[thinking] + "".join(map(str, options.values()))
        ),
        encode=lambda text: [ord(character) for character in text],
    )
    session = session_of(text, limit=2000)
    prompt_options = PromptOptions(messages, None if messages else (1, 2))
    return prompt_options.request(session, load(None, overrides), Silent())


def test_the_decode_section_reaches_the_session() -> None:
    request = request_of(
        "decode.gate=on", "decode.accept=relaxed", "decode.relaxed.k=2", "decode.draft.seed=7",
        "decode.budget.tokens=5", "decode.max_tokens=9", "decode.drafter=dflash",
    )  # fmt: skip
    assert request.relaxed
    assert (request.prompt, request.gate, request.relaxed.k) == ((1, 2), True, 2)
    assert (request.draft.seed, request.budget.tokens, request.max_answer) == (7, 5, 9)
    assert (request.stop, request.drafter) == (frozenset(MANIFEST.stop_tokens), "dflash")


def test_an_empty_text_to_draft_from_asks_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("\n")
    for text in ("", f"@{tmp_path}/old"):
        assert read_prompt("--draft", text, empty=True) == ""
        with pytest.raises(RequestError):
            read_prompt("--prompt", text)


def test_what_is_not_set_is_left_as_it_was_made() -> None:
    request = request_of("decode.relaxed.k=2")  # has no effect without decode.accept=relaxed
    assert (request.gate, request.relaxed) == (False, None)
    assert (request.draft, request.budget) == (NO_DRAFT_LIMITS, NO_BUDGET)
    assert request.drafter == "auto"


@pytest.mark.parametrize(
    ("overrides", "thinks"),
    [
        ((), True),
        (("decode.thinking=off",), False),
        (("decode.budget.effort=none",), False),
        (("decode.budget.effort=low",), True),
        (("decode.budget.effort=none", "decode.budget.tokens=5"), True),
        (("decode.budget.tokens=0",), True),
    ],
)
def test_no_effort_opens_no_thinking_unless_tokens_of_it_are_granted(
    overrides: tuple[str, ...], thinks: bool
) -> None:
    request = request_of(*overrides, messages=[{"role": "user", "content": "x"}])
    assert request.prompt == (ord("t" if thinks else "f"),)


CHAT = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("effort", "value"), [("minimal", "low"), ("medium", "medium"), ("max", "xhigh")]
)
def test_an_effort_is_for_the_template_if_that_reads_one(effort: str, value: str) -> None:
    given = f"decode.budget.effort={effort}"
    request = request_of(given, messages=CHAT, reads=("reasoning_effort",))
    assert request.prompt == tuple(map(ord, f"t{value}"))
    assert request.budget == NO_BUDGET, "the model limits itself"
    request = request_of(given, messages=CHAT)
    assert (request.prompt, request.budget.effort) == ((ord("t"),), effort)


def test_past_thinking_is_preserved_if_the_template_can() -> None:
    reads = ("preserve_thinking",)
    for value, option in (("auto", ""), ("on", "True"), ("off", "False")):
        request = request_of(f"decode.preserve_thinking={value}", messages=CHAT, reads=reads)
        assert request.prompt == tuple(map(ord, f"t{option}"))
    with pytest.raises(RequestError, match=r"^decode.preserve_thinking must be auto.*\(got on\)"):
        request_of("decode.preserve_thinking=on", messages=CHAT)


def test_a_long_text_is_refused_by_the_least_it_can_be_and_not_if_that_fits() -> None:
    least, limit = 100, 100
    text = SimpleNamespace(
        marks=None,
        options=frozenset(),
        render=lambda messages, thinking, options, pictures: "x" * 900,
        least=lambda text: least,
        encode=lambda text: [1] * (limit - 1),
    )
    session, config = session_of(text, limit), load(None, ("decode.max_tokens=1",))
    chat = [{"role": "user", "content": "x"}]
    made = PromptOptions(chat, None).request(session, config, Silent())
    assert made.prompt == (1,) * (limit - 1)
    least += 1
    with pytest.raises(RequestError, match=r"must be <= 100 tokens, .* \(got 101 or more\)"):
        PromptOptions(chat, None).request(session, config, Silent())


@pytest.mark.parametrize(
    ("off", "got"),
    [
        ("--thinking=off", "off"),
        ("--reasoning-effort=none", "decode.budget.effort none"),
    ],
)
def test_accepting_near_misses_in_no_thinking_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, off: str, got: str
) -> None:
    expected = f"decode.accept relaxed must go with decode.thinking on (got {got})"
    line = ["generate", "--package", str(tmp_path / "none"), "--prompt", "a"]
    for relaxed in (["--accept", "relaxed"], ["-s", "decode.accept=relaxed"]):
        assert main.main([*line, off, *relaxed]) == 2
        assert expected in capsys.readouterr().err
        assert main.main([*line, *relaxed]) == 2
        assert "must be a package directory" in capsys.readouterr().err
    file = tmp_path / "robot.toml"
    file.write_text('[decode]\naccept = "relaxed"\n')
    assert main.main([*line, "-c", str(file), off]) == 2
    assert expected not in capsys.readouterr().err, "the file is for other answers, too"
