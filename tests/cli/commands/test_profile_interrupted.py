"""A profile whose measurement ends early: what was measured until then is printed and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.constrained_model import package

from thor_dflash.cli import main
from thor_dflash.cli.commands import profile as profile_command
from thor_dflash.core.errors import EngineError


def profile(tmp_path: Path, *more: str) -> int:
    (tmp_path / "ids.json").write_text("[1, 2, 3]")
    source = ("--package", str(package()), "--tokens", str(tmp_path / "ids.json"))
    few = ("--warmup", "1", "--max-tokens", "3", "--ignore-eos", "-s", "engine.threads=1")
    return main.main(["profile", *source, *few, *more])


def failing(monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException) -> None:
    """Let the answer number `call` end with an error; the warm-up is number 1."""
    answer, calls = profile_command._answer, [0]

    def answered(*of: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise error
        return answer(*of)

    monkeypatch.setattr(profile_command, "_answer", answered)


FAULT = EngineError("cuLaunchKernel must succeed\n(got 700)")


@pytest.mark.parametrize(
    ("length", "done", "error", "status", "why"),
    [
        ((), "2 of 15 runs", KeyboardInterrupt(), 130, "interrupted"),
        (("--soak", "600"), "0 of 600 s", FAULT, 2, "cuLaunchKernel must succeed (got 700)"),
    ],
)
def test_the_answers_before_an_end_are_reported(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    status: int,
    why: str,
    length: tuple[str, ...],
    done: str,
) -> None:
    failing(monkeypatch, 4, error)
    drawn = tmp_path / "x.html"
    assert profile(tmp_path, *length, "--json", "--html", str(drawn)) == status
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["runs"], len(found["times"]["e2e_ms"]["values"])) == (2, 2)
    soaked = 2 if "--soak" in length else 0
    assert sum(stretch["runs"] for stretch in found.get("soak", [])) == soaked
    assert f"ended after {done}: {why}" in found["warnings"]
    assert f"ended after {done}: {why}" in drawn.read_text(encoding="utf-8")
    assert err.splitlines()[-1] == f"thor-dflash: {why}"


@pytest.mark.parametrize(
    ("call", "error", "status"), [(1, KeyboardInterrupt(), 130), (2, FAULT, 2)]
)
def test_without_an_answer_there_is_no_report(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    call: int,
    error: BaseException,
    status: int,
) -> None:
    failing(monkeypatch, call, error)
    assert profile(tmp_path, "--json", "--trace", str(tmp_path / "x.json")) == status
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "x.json").exists()
