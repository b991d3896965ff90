"""`generate`: progress while a long prompt is read, and answers that are empty or end inside a
character.
"""

from __future__ import annotations

import json
from pathlib import Path

import constrained
import pytest
from decoding import prompt, session

from thor_dflash import cli
from thor_dflash.progress import Silent
from thor_dflash.runtime.decode import Chunk
from thor_dflash.runtime.text import Answer
from thor_dflash.verbs.generate import _read, _stream


@pytest.mark.parametrize(("length", "told"), [(33, False), (100, True)])
def test_progress_is_shown_for_a_prompt_of_several_prefill_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], length: int, told: bool
) -> None:
    package = str(session().model.engine.package)  # type: ignore[attr-defined]
    (tmp_path / "t.json").write_text(json.dumps(prompt(length)))
    line = ["generate", "--package", package, "--tokens", str(tmp_path / "t.json")]
    line += ["--max-tokens", "20", "-s", "engine.threads=1", "--ignore-eos"]
    assert cli.main(line) == 0
    out, err = capsys.readouterr()
    assert (f"reading the prompt {length} tokens\n" in err) is told
    assert len(out.split()) == 20
    assert cli.main([*line, "--json"]) == 0
    out, err = capsys.readouterr()
    assert (len(json.loads(out)["tokens"]), err) == (20, "")


def test_an_empty_answer_to_a_long_prompt_still_gives_its_last_chunk() -> None:
    last = Chunk((), "stop", prompt_done=96)
    chunks = [Chunk((), prompt_done=32), Chunk((), prompt_done=64), last]
    assert list(_read(iter(chunks), 97, Silent())) == [last]


def test_an_answer_that_ends_inside_a_character_shows_a_replacement_character(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = constrained.text()
    half = next(token for token in range(constrained.VOCAB) if text.bytes_of(token) == b"\xc3")
    chunks = [Chunk(tuple(text.encode("red"))), Chunk((half,), "length")]
    _stream(iter(chunks), Answer(text, ()), quiet=False)
    assert capsys.readouterr().out == "red\ufffd\n"
