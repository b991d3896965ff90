"""`thor-dflash replay` and `bfcl` from the command line: reports, pages, and what they refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.constrained_model import package
from support.recorded_traces import TEMPLATE, rows, write

from thor_dflash.calib.replay.replay_report import ReplayReport
from thor_dflash.calib.replay.replay_report import text as text_of
from thor_dflash.cli.main import main
from thor_dflash.cli.report.replay_page import page
from thor_dflash.core import strict_records
from thor_dflash.core.errors import RequestError


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("trace") / "t.jsonl", rows(2, 3)))


def test_a_replay_in_process(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, out, old = str(package(template=TEMPLATE)), tmp_path / "x.html", tmp_path / "old.json"
    command = ["replay", trace, "--package", made, "--turns", "2", "--forced-accept", "4.5"]
    command += ["-s", "engine.threads=1", "--reuse-mb", "8"]
    assert main([*command, "--json", "--html", str(out)]) == 0
    old.write_text(text := capsys.readouterr().out)
    report = json.loads(text)
    assert report["totals"]["answered"] == 4
    assert report["totals"]["cached_tokens"] > 0
    assert report["subject"]["forced"] == "4.5"
    assert {turn["finish"] for turn in report["turns"]} == {"forced"}
    well_formed(out.read_text())
    command[command.index("--turns") + 1] = "1"
    assert main([*command, "--compare", str(old)]) == 2
    assert "replaying" not in capsys.readouterr().err, "refused before the work"
    found = strict_records.decode(ReplayReport, report, "", RequestError)
    assert re.search(r"of them read +(\d+) +\1\n", text_of(found, found)), "both columns"
    well_formed(page(found, found))


def well_formed(html: str) -> None:
    """Check a page as XML, and that it loads nothing."""
    ElementTree.fromstring(re.sub(r"<meta[^>]*>", "", html.replace("<!doctype html>", "")).strip())
    assert "http" not in html


@pytest.mark.parametrize(
    "options",
    [
        "--url http://127.0.0.1:1/v1 --forced-accept 3",
        "--url http://127.0.0.1:1/v1 --reuse-mb 0",
        "--package p --plain",
        "--package p --tokenizer t",
        "--package p --forced-accept 0",
        "--package p --forced-accept x",
        "--package p --turns 0",
        "--package p --reuse-mb -1",
        "--shape qwen3.6-27b --random-weights --forced-accept 3",
        "--shape qwen3.6-27b --tokenizer t --forced-accept 3",
        "--package p --json --compare x.json",
        "--url nowhere",
        "--package p --url http://127.0.0.1:1/v1",
    ],
)
def test_options_without_a_meaning(
    trace: str, options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", trace, *options.split()]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_no_server_is_there(trace: str, tmp_path: Path) -> None:
    url = ["--url", "http://127.0.0.1:9/v1"]
    assert main(["replay", trace, *url]) == 4
    sample = {"sample_id": "a", "subset": "multiple", "category": "live", "messages": [],
              "tools": [], "functions": [], "ground_truth": []}  # fmt: skip
    samples = write(tmp_path / "s.jsonl", [sample])
    assert main(["bfcl", str(samples), *url]) == 4
    assert main(["bfcl", str(samples), *url, "--first", "0"]) == 2
