"""`generate`: progress while a long prompt is read, and answers that are empty or end inside a
character.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import constrained_model
from support.loop_models import prompt, session

from thor_dflash.cli import main
from thor_dflash.cli.commands.generate import _stream
from thor_dflash.core import progress
from thor_dflash.core.progress import ProgressTask, Silent, _Counter
from thor_dflash.runtime.decoding.loop import TokenChunk
from thor_dflash.runtime.text.tokenizer import Answer


class Recorder(Silent):
    """What each task has advanced by, by its label."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}

    def task(self, label: str, total: int | None = None, unit: str = "") -> ProgressTask:
        def show(done: int, state: str) -> None:
            self.done[label] = done

        return _Counter(show)


@pytest.mark.parametrize("length", [3, 100])
@pytest.mark.parametrize("form", [[], ["--json"]], ids=str)
def test_an_answer_that_is_not_printed_while_it_comes_is_progress(
    length: int, form: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Recorder()
    monkeypatch.setattr(progress, "choose", lambda stream, *, quiet: expected)
    package = str(session().model.engine.package)  # type: ignore[attr-defined]
    (tmp_path / "t.json").write_text(json.dumps(prompt(length)))
    line = ["generate", "--package", package, "--tokens", str(tmp_path / "t.json")]
    line += ["--max-tokens", "20", "-s", "engine.threads=1", "--ignore-eos", *form]
    assert main.main(line) == 0
    assert expected.done.get("answering") == (20 if form else None)
    assert ("reading the prompt" in expected.done) is (length > 50)


def test_an_answer_that_ends_inside_a_character_shows_a_replacement_character(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = constrained_model.text()
    half = next(
        token for token in range(constrained_model.VOCAB) if text.bytes_of(token) == b"\xc3"
    )
    chunks = [TokenChunk(tuple(text.encode("red"))), TokenChunk((half,), "length")]
    _stream(iter(chunks), Answer(text, ()), quiet=False)
    assert capsys.readouterr().out == "red\ufffd\n"
