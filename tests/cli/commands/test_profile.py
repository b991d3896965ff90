"""`thor-dflash profile`, with a small model of random weights."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.checkpoints import GEOMETRIES, DrafterGeometry, write_drafter, write_target

from thor_dflash.builders.build import build
from thor_dflash.cli import main
from thor_dflash.cli.commands import profile as profile_command
from thor_dflash.config.build import BuildConfig
from thor_dflash.core.progress import Silent
from thor_dflash.package import manifest
from thor_dflash.runtime.doctor import jetson
from thor_dflash.runtime.doctor.facts import Finding

FEW = ("--runs", "3", "--warmup", "1", "--max-tokens", "8", "--ignore-eos")
GEOMETRY = replace(GEOMETRIES["27b"], layers=2, interval=2)
DRAFTER = DrafterGeometry(taps=(0, 1))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a package `pkg` and a file `ids.json` of 40 token ids."""
    root = tmp_path_factory.mktemp("profile")
    write_target(root / "target", GEOMETRY, 3, "bf16")
    write_drafter(root / "drafter", GEOMETRY, DRAFTER, 4)
    config = BuildConfig(chunk=32, capacity=512)
    build(root / "target", root / "drafter", root / "pkg", config, Silent())
    (root / "ids.json").write_text(json.dumps(list(range(40))))
    return root


def profile(root: Path, *more: str) -> int:
    return main.main(["profile", *source(root), *FEW, *more])


def source(root: Path) -> list[str]:
    files = ["--package", str(root / "pkg"), "--tokens", str(root / "ids.json")]
    return [*files, "-s", "engine.threads=1"]


def test_json_is_one_object_that_adds_up(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile(root, "--json", "--drafter", "none") == 0
    out, err = capsys.readouterr()
    assert "answering 3 times" in err, "progress, off a terminal too"
    assert out.count("\n") == 1
    found = json.loads(out)
    assert (found["runs"], found["warmup"], found["tokens"], found["finish"]) == (3, 1, 8, "length")
    assert (found["subject"]["prompt_tokens"], found["subject"]["engine"]) == (40, "ort")
    assert found["subject"]["settings"]["decode.drafter"] == "none"
    assert "engine.cubins" not in found["subject"]["settings"]
    assert math.isclose(sum(p["share"] for p in found["phases"].values()), 1, abs_tol=1e-6)
    assert set(found["phases"]) == {"prefill", "verify", "accept", "host"}
    assert (found["spec"]["cycles"], found["spec"]["drafted"]) == (8, 0)
    assert "inside" not in found  # on ONNX Runtime every graph is a phase, so there are no parts
    assert [beat["tokens"] for beat in found["timeline"] if beat["tokens"]] == [1] * 8
    assert len(found["times"]["each_ms"]["values"]) == 3 * 8
    for s in found["times"].values():
        assert 0 < s["low"] <= s["median"] <= s["p90"] <= s["p99"] <= s["high"]


@pytest.mark.slow
def test_a_profile_beside_an_earlier_one(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tmp_path / "before.json"
    assert profile(root, "--json") == 0
    table = json.loads(capsys.readouterr().out)
    table["subject"]["version"] = "0"
    table["times"]["e2e_ms"]["median"] = 1e-3
    before.write_text(json.dumps(table))
    assert profile(root, "--compare", str(before)) == 0
    out = capsys.readouterr().out
    (whole,) = (line for line in out.splitlines() if "whole answer" in line)
    assert whole.endswith("x of 0.00")
    assert float(whole.split()[-3].removesuffix("x")) > 1000
    assert "prompt of 40 tokens, answer of 8, ended by length; 3 runs after 1" in out
    assert "cut by decode.max_tokens" in out
    assert "\n  committed tokens a cycle, 1 to 16:  |█" in out


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--soak", "0"), "--soak must be 1 to 21600 seconds (got 0)"),
        (("--soak", "9", "--runs", "15"), "--runs must go without --soak (got both)"),
        (("--compare", "x", "--json"), "--compare must go without --json (got both)"),
    ],
)
def test_what_is_refused_is_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], more: tuple[str, ...], expected: str
) -> None:
    assert main.main(["profile", "--package", "none", "--tokens", "none", *more]) == 2
    assert capsys.readouterr().err.startswith(f"thor-dflash: {expected}")


def test_a_soak_answers_until_its_time_is_over(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = itertools.count(step=0.4)  # each look at the clock finds it 0.4 s later
    monkeypatch.setattr(profile_command, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    few = ("--max-tokens", "2", "--ignore-eos", "--warmup", "1")
    assert main.main(["profile", *source(root), *few, "--soak", "9"]) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.partition("over time")[2].splitlines()]
    rows = rows[1 : rows.index([])]
    runs = sum(int(row[4]) for row in rows)
    assert f"{runs} runs after 1 to warm up" in out
    last, before = float(rows[-1][2]), float(rows[-1][0])
    assert before < 9 <= last < 13
    assert "warming up 1 time\n" in err
    assert "answering 9 s\n" in err


@pytest.mark.slow
def test_a_default_of_the_package_that_is_set_is_no_other_setting(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tmp_path / "before.json"
    assert profile(root, "--json") == 0
    before.write_text(capsys.readouterr().out)
    sizes = ("engine.capacity=512", "engine.block=16", "engine.chunk=32", "decode.drafter=auto")
    words = [word for size in sizes for word in ("-s", size)]
    assert profile(root, "--compare", str(before), *words) == 0
    assert profile(root, "--compare", str(before), "-s", "engine.capacity=511") == 2
    assert "(got engine.capacity 512, now 511)" in capsys.readouterr().err


@pytest.mark.slow
def test_a_package_that_was_built_again_is_compared_and_one_of_other_weights_is_not(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(root, "--json") == 0
    before = tmp_path / "before.json"
    before.write_text(capsys.readouterr().out)
    for seed, status in ((4, 0), (5, 2)):
        other = tmp_path / str(seed)
        write_drafter(other / "another", GEOMETRY, DRAFTER, seed)
        config = BuildConfig(chunk=32, capacity=512, name="another")
        build(root / "target", other / "another", other / "pkg", config, Silent())
        made = manifest.read(other / "pkg")
        made = replace(made, created="2001-01-01T00:00:00Z", tool="0.0.1")
        (other / "pkg" / manifest.NAME).write_text(manifest.render(made))
        (other / "ids.json").write_text((root / "ids.json").read_text())
        assert profile(other, "--compare", str(before)) == status
        assert ("same request and settings (got package" in capsys.readouterr().err) == bool(status)


def test_a_page_and_a_trace_of_the_last_answer(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn, traced = tmp_path / "x.html", tmp_path / "x.json"
    assert profile(root, "--json", "--html", str(drawn), "--trace", str(traced)) == 0
    found = json.loads(capsys.readouterr().out)
    text = drawn.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert text.count("<circle") == 3  # one for each run
    events = json.loads(traced.read_text())["traceEvents"]
    steps = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in steps} == {"prompt", "cycle"}
    assert sum(event["args"]["tokens"] for event in steps) == found["tokens"]
    for before, after in itertools.pairwise(steps):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"])
    assert steps[-1]["ts"] + steps[-1]["dur"] == pytest.approx(1e3 * found["timeline"][-1]["ms"])
    counted = [event["args"]["tokens"] for event in events if event["ph"] == "C"]
    assert counted == [event["args"]["tokens"] for event in steps if event["name"] == "cycle"]


def test_a_result_is_not_written_over_what_is_read(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (ids := tmp_path / "ids.json").write_text("[1]")
    (link := tmp_path / "link.json").symlink_to(ids)
    line = ["profile", "--package", str(root / "pkg"), "--tokens", str(ids), "--trace", str(link)]
    assert main.main(line) == 2
    assert "--trace must be another file than --tokens" in capsys.readouterr().err
    assert ids.read_text() == "[1]"


@pytest.mark.slow
def test_a_board_s_release_and_power_mode_are_part_of_what_was_measured(
    root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mode = Finding("power mode", "warn", "120W; slower than MAXN", "sudo nvpmodel -m 0")
    clock = Finding("GPU clock", "ok", "1575 MHz of 1575, held")
    emc = Finding("EMC clock", "warn", "cannot be read")
    monkeypatch.setattr(jetson, "speed", lambda machine: [mode, clock, emc])
    assert profile(root, "--json") == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert found["subject"]["machine"] == {"power mode": "120W; slower than MAXN"}
    expected = "power mode: 120W; slower than MAXN (sudo nvpmodel -m 0)"
    assert expected in found["warnings"]
    assert "EMC clock: cannot be read" in found["warnings"]
    assert not any("GPU clock" in text for text in found["warnings"])
    (tmp_path / "before.json").write_text(out)
    monkeypatch.setattr(jetson, "speed", lambda machine: [replace(mode, text="MAXN"), clock])
    assert profile(root, "--compare", str(tmp_path / "before.json")) == 2
    assert "power mode 120W; slower than MAXN, now MAXN)" in capsys.readouterr().err


def test_what_is_no_profile_is_refused(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tmp_path / "before.json"
    before.write_text('{"runs": 3}')
    assert profile(root, "--compare", str(before)) == 2
    assert f"{before}.subject must be present" in capsys.readouterr().err
