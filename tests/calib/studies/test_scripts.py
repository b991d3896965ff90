"""The measuring scripts of calib/: what the caller got wrong is named, with exit status 2."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from shlex import quote, split

import pytest
from support.loop_models import session

from thor_dflash.builders.build import build
from thor_dflash.calib.demo import MODEL
from thor_dflash.calib.studies import script
from thor_dflash.config.build import BuildConfig
from thor_dflash.core.errors import RequestError
from thor_dflash.core.progress import Silent

TASKS = MODEL / "heldout.jsonl"
GIVEN = quote(str(TASKS))
"""The same as a word of a command line."""
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
        ("grammar_quality /none/p /none/t", "/none/t must be a readable file (got: No such file"),
        (
            f"grammar_quality /none/p {quote(__file__)}",
            f"{__file__} must hold a task a line (got: JSOND",
        ),
        ("grammar_quality /none/p /dev/null", "/dev/null must hold a task a line (got an empty"),
        (f"grammar_quality /none/p {GIVEN}", "/none/p must be a package directory (got nothing"),
        ("heldout --package /none/p", "/none/p must be a package directory (got nothing"),
        ("grammar_cost /none/p", "/none/p must hold a tokenizer.json (got none)"),
        (f"prefix_saving /none/p {GIVEN}", "/none/p must be a package directory (got nothing"),
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


def test_a_package_without_a_tokenizer_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = quote(str(session().model.engine.package))  # type: ignore[attr-defined]
    for line in (f"grammar_quality {package} {GIVEN} --count 1", f"prefix_saving {package} {GIVEN}",
                 f"heldout --package {package} --limit 1"):  # fmt: skip
        assert ended(monkeypatch, line) == 2
        message = "the package must have a tokenizer.json (got one without)"
        assert capsys.readouterr().err.splitlines()[-1] == message


def test_a_package_without_a_drafter_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = BuildConfig(chunk=64, capacity=1024)
    build(MODEL / "target", None, tmp_path / "package", config, Silent())
    package = quote(str(tmp_path / "package"))
    for name in ("grammar_quality", "prefix_saving"):
        assert ended(monkeypatch, f"{name} {package} {GIVEN} --count 1") == 2
        message = "drafter must be none, the package has no drafter (got dflash)"
        assert capsys.readouterr().err.splitlines()[-1] == message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"grammar_quality /none/p {GIVEN} --count 0", "--count: must be an integer >= 1 (got 0)"),
        ("heldout --package /none/p --limit -1", "--limit: must be an integer >= 1 (got -1)"),
        (f"prefix_saving /none/p {GIVEN} --count x", "--count: must be an integer >= 1 (got x)"),
        (f"policies {PAIR} --tasks 0", "--tasks: must be an integer >= 1 (got 0)"),
        (f"policies {PAIR} nothing", "or width (got nothing)"),
    ],
)
def test_a_wrong_option_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert ended(monkeypatch, line) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_an_error_of_a_script_s_own_shows_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        script.run(lambda: print(1 // 0))


def test_tables_are_shown_as_markdown_or_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    tables = [("first", [("a", "b"), (1, 0.125)])]
    script.show(tables, as_json=False)
    assert capsys.readouterr().out == "\n## first\n\n| a | b |\n| --- | --- |\n| 1 | 0.12 |\n"
    script.show(tables, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"first": [["a", "b"], [1, 0.125]]}


def test_tasks_are_the_first_of_a_file(tmp_path: Path) -> None:
    assert len(script.read_tasks(TASKS, 3)) == 3
    (tmp_path / "t").write_bytes(b"\xff")
    with pytest.raises(RequestError, match="must hold a task a line"):
        script.read_tasks(tmp_path / "t", 3)
