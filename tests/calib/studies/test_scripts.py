"""The measuring scripts of calib/: what the caller got wrong is named, with exit status 2."""

from __future__ import annotations

import runpy
import sys
from shlex import quote, split

import pytest

from thor_dflash.calib.demo import MODEL

PAIR = f"--target {quote(str(MODEL / 'target'))} --drafter {quote(str(MODEL / 'drafter'))}"


def ended(monkeypatch: pytest.MonkeyPatch, line: str) -> object:
    """Run a script as `python -m` does; return its exit status."""
    name, *arguments = split(line)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.delitem(sys.modules, f"thor_dflash.calib.studies.{name}", raising=False)
    with pytest.raises(SystemExit) as caught:
        runpy.run_module(f"thor_dflash.calib.studies.{name}", run_name="__main__")
    return caught.value.code


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("grammar_quality /none/p", "/none/p must be a package directory"),
        ("heldout --package /none/p", "/none/p must be a package directory"),
        ("policies --target /none/t --drafter /none/d", "/none/t must be a checkpoint"),
    ],
)
def test_a_file_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert ended(monkeypatch, line) == 2
    out, err = capsys.readouterr()
    assert err.startswith(message)
    assert (err.count("\n"), out.strip("\n# budget")) == (1, "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"policies {PAIR} --tasks 0", "--tasks: must be an integer >= 1 (got 0)"),
        (f"policies {PAIR} nothing", "or width (got nothing)"),
        ("sampling --limit 0", "--limit: must be an integer >= 1 (got 0)"),
    ],
)
def test_a_wrong_option_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert ended(monkeypatch, line) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
