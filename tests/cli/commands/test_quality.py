"""`thor-dflash quality` as a user runs it: store, compare, judge, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support import constrained_model

from thor_dflash.cli import main

TEXTS = [
    {"text": "<script>alert(1)</script> Bring the cup to the table, then wait there."},
    {"tokens": list(range(90, 150)), "class": "ids & more"},
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quality")
    data = out / "texts.jsonl"
    data.write_text("\n".join(map(json.dumps, TEXTS)))
    args = ("--reference", str(constrained_model.package()), "--store", str(out / "r.npz"))
    tasks = ("--tasks", "2", "-s", "quality.max_tokens=40", "-s", "quality.skip=4")
    assert main.main(["quality", *args, *tasks, "--data", str(data)]) == 0
    return out / "r.npz"


@pytest.mark.slow
def test_a_comparison_is_printed_and_drawn(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(constrained_model.package(seed=6))
    page = tmp_path / "q.html"
    args = ["quality", "--stored", str(stored), "--package", other, "-s", "quality.max_tokens=40"]
    assert main.main([*args, "--html", str(page), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "fail"
    assert {one["label"] for one in found["classes"]} >= {"text", "ids & more"}
    assert found["plans"]["tasks"] == 2
    assert found["plans"]["accept_length"] >= 1
    text = page.read_text()
    assert "<script" not in text
    assert not re.search(r"https?://", text)
    # The drawings are well-formed.
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(svg)
    assert text.count("<svg") >= 2
    assert text.count('class="place"') == 10
    for gate in found["gates"]:
        assert gate["title"] in text
    wide = ("-s", "quality.gates.mean_kl=[99, 99]", "-s", "quality.gates.p99_kl=[99, 99]")
    loose = ("-s", "quality.gates.top1=[0, 0]", "-s", "quality.gates.perplexity=[1e9, 1e9]")
    more = ("-s", "quality.gates.accept_length=[0, 0]")
    assert main.main([*args, *wide, *loose, *more]) == 0
    out = capsys.readouterr().out
    assert "verdict: pass" in out
    assert "not measured" in out


@pytest.mark.parametrize(
    ("args", "rule"),
    [
        ("--reference r --package p --stored s.npz", "not allowed with"),
        ("--reference r --package p --store s.npz", "not allowed with"),
        ("--reference r", "required"),
        ("--stored s.npz --store t.npz", "must go without"),
        ("--stored s.npz --package p --data d.jsonl", "must go without"),
        ("--stored s.npz --package p --tasks 5", "must go without"),
        ("--reference r --package p --target t", "must go together"),
        ("--reference r --package p --html q.txt", ".html"),
        ("--reference r --store s.bin", ".npz"),
        ("--stored none.npz --package p", "none.npz must be a readable file"),
        ("--reference none --package p", "none must be a package directory"),
        ("--reference r --package p -s quality.gates.top1=[0.1,0.2]", "quality.gates.top1"),
        ("--reference r --package p -s quality.window=32", "quality.window must be larger"),
        ("--reference r --package p -s build.kv=fp8", "build.kv must be a setting of"),
    ],
)
def test_what_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], args: str, rule: str
) -> None:
    assert main.main(["quality", *args.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert rule in err.splitlines()[-1]
