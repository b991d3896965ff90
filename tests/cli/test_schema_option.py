"""`--schema` of `generate` and `profile`: answers obey it, and errors name it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.constrained_model import PLAN, SMALL, asked, constrained, package, session

from thor_dflash.cli import main
from thor_dflash.runtime.decoding.proposers import DflashDrafter

PROMPT = ("--prompt", "Pick the mug.", "--thinking", "off", "-s", "engine.threads=1")
SAY = {"say": {"type": "string"}}
ENDLESS = {**SMALL, "properties": SAY, "required": ["say"]}
NOTE = "an answer may grow without end: schema.properties.say must have maxLength (got a string"


def run(
    tmp_path: Path, command: str, schema: object, *more: str, prompt: tuple[str, ...] = PROMPT
) -> int:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    line = [command, "--package", str(package()), "--schema", str(file)]
    return main.main([*line, *prompt, *more])


def test_the_answer_is_that_of_a_request_with_the_grammar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = constrained(asked(False), DflashDrafter(), session().grammar(PLAN))
    assert run(tmp_path, "generate", PLAN, "--json", "--max-tokens", "300") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["tokens"] == truth
    assert found["finish_reason"] == "stop"
    assert "note: " not in err
    assert found["spec"]["forced"] > 0
    assert [*json.loads(found["text"])][:2] == ["goal", "steps"], "as in the file"


def test_what_lets_an_answer_grow_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "generate", ENDLESS, "--max-tokens", "9") == 0
    assert f"note: {NOTE}" in capsys.readouterr().err
    few = ("--max-tokens", "9", "--runs", "1", "--warmup", "0")
    assert run(tmp_path, "profile", ENDLESS, *few) == 0
    assert f"note: {NOTE}" in capsys.readouterr().out


def test_a_schema_that_applied_to_nothing_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "note: the schema applied to nothing: no answer came after the thinking"
    for thinking, expected in (("off", False), ("on", True)):
        more = ("-s", f"decode.thinking={thinking}", "--max-tokens", "3")
        assert run(tmp_path, "generate", SMALL, *more, prompt=(*PROMPT[:2], *PROMPT[4:])) == 0
        assert (note in "".join(capsys.readouterr())) is expected


def test_a_profile_shows_the_graphs_of_constrained_cycles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--max-tokens", "9", "--runs", "1", "--warmup", "0")
    assert run(tmp_path, "profile", SMALL, *few, "--json") == 0
    expected = capsys.readouterr().out
    found: dict[str, Any] = json.loads(expected)
    assert {"propose", "verify", "accept_masked", "observe"} < set(found["phases"])
    assert "accept" not in found["phases"]
    (tmp_path / "before.json").write_text(expected)
    same = ("--compare", str(tmp_path / "before.json"))
    assert run(tmp_path, "profile", SMALL, *few, *same) == 0
    assert run(tmp_path, "profile", PLAN, *few, *same) == 2
    assert "same request and settings (got schema " in capsys.readouterr().err
    line = ["profile", "--package", str(package()), *PROMPT, *few, *same]
    assert main.main(line) == 2
    assert f"(got schema {found['subject']['settings']['schema']}, now nothing)" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("schema", "more", "expected"),
    [
        ([1], (), "schema.json must hold a JSON object (got [1])"),
        ({}, ("-s", "decode.ignore_eos=true"), "--schema must go with stop tokens"),
        ({**SMALL, "if": {}}, (), 'schema must have supported keywords only (got "if")'),
    ],
)
def test_what_cannot_be_a_schema_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], schema: object,
    more: tuple[str, ...], expected: str,
) -> None:  # fmt: skip
    assert run(tmp_path, "generate", schema, *more) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert "loading" not in err
