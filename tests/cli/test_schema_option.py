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
WIDE = {**SMALL, "required": [], "properties": {f"k{i}": {"const": 1} for i in range(600)}}
"""An object with more optional keys than llguidance takes, which it notices where one begins."""
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
    assert (found["finish_reason"], err) == ("stop", "")
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


@pytest.mark.parametrize("command", ["generate", "profile"])
def test_a_schema_that_applied_to_nothing_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    few = ("--max-tokens", "3", *(("--runs", "1", "--warmup", "0") if command == "profile" else ()))
    note = "note: the schema applied to nothing: no answer came after the thinking"
    for thinking, expected in (("off", False), ("on", True)):
        more = ("-s", f"decode.thinking={thinking}", *few)
        assert run(tmp_path, command, SMALL, *more, prompt=(*PROMPT[:2], *PROMPT[4:])) == 0
        assert (note in "".join(capsys.readouterr())) is expected


def test_of_many_such_places_the_first_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = {f"k{i}": {"type": "string"} for i in range(9)}
    schema = {**SMALL, "properties": many, "required": []}
    assert run(tmp_path, "generate", schema, "--max-tokens", "3") == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    *named, last = notes
    assert [note.split(" must")[0][-2:] for note in named] == ["k0", "k1", "k2", "k3", "k4"]
    assert last == "note: an answer may grow without end in 4 more places of the schema"


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


@pytest.mark.parametrize("command", ["generate", "profile"])
@pytest.mark.parametrize(
    ("schema", "more", "expected"),
    [
        ([1], (), "schema.json must hold a JSON object (got [1])"),
        ({}, ("--ignore-eos",), "--schema must go with stop tokens, which end the answer (got "),
        ({}, ("-s", "decode.ignore_eos=true"), "--schema must go with stop tokens"),
        ({**SMALL, "if": {}}, (), 'schema must have supported keywords only (got "if")'),
    ],
)
def test_what_cannot_be_a_schema_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, schema: object,
    more: tuple[str, ...], expected: str,
) -> None:  # fmt: skip
    assert run(tmp_path, command, schema, *more) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert "loading" not in err


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "objekt"}, "schema must be one that can be compiled (got: Invalid type: objekt"),
        ({"enum": []}, "schema must"),
        (WIDE, "schema must be within llguidance's limits"),
    ],
)
def test_a_schema_that_no_answer_can_obey_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], schema: object, expected: str
) -> None:
    assert run(tmp_path, "generate", schema) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert expected in err.splitlines()[-1]


def test_a_trace_does_not_replace_the_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = str(tmp_path / "schema.json")
    assert run(tmp_path, "profile", SMALL, "--trace", same) == 2
    assert "--trace must be another file than --schema" in capsys.readouterr().err
    assert json.loads(Path(same).read_text()) == SMALL
