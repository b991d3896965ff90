"""The times of a cycle's parts, through the command `profile`, with a fake driver."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stand_ins.fake_driver import MS, FakeCuda, fake
from support.planner_nano import package

from thor_dflash.cli import main
from thor_dflash.runtime.grammar.policy import Walk
from thor_dflash.runtime.measure import cuda_bench


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(tmp_path_factory.mktemp("inside") / "nano", engine="cuda")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(cuda_bench, "REST", 0.0)
    return fake(monkeypatch)


def taken_apart(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str
) -> dict[str, Any]:
    """The field `inside` of a profile of some tokens."""
    (tmp_path / "ids.json").write_text(json.dumps(list(range(1, 40))))
    source = ("--package", str(made), "--tokens", str(tmp_path / "ids.json"), "--runs", "1")
    few = ("--max-tokens", "6", "-s", f"engine.cubins={tmp_path}")
    assert main.main(["profile", *source, *few, "--json", *more]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["inside"]
    return found


@pytest.mark.usefixtures("device")
def test_every_graph_of_a_cycle_and_its_parts_are_reported(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = taken_apart(made, tmp_path, capsys)
    assert (found["context"], found["cycle_ms"]) == (39 - 1 + 6, MS)
    graphs = [part["graph"] for part in found["parts"] if not part["name"]]
    assert graphs == ["propose", "verify", "accept", "observe"]
    inner = {graph: [] for graph in graphs}
    for part in found["parts"]:
        assert part["ms"] == MS
        if part["name"]:
            inner[part["graph"]].append(part["name"])
    assert {"layers.*.mlp.gate_up", "head", "gdn", "verify_attention"} < set(inner["verify"])
    assert "draft_attention" in inner["propose"]
    assert inner["accept"] == []
    for names in inner.values():
        each = [op for name in names for op in name.split(", ")]
        assert len(set(each)) == len(each)


@pytest.mark.usefixtures("device")
def test_without_drafts_a_cycle_is_two_graphs(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = taken_apart(made, tmp_path, capsys, "--drafter", "none")
    assert {part["graph"] for part in found["parts"]} == {"verify", "accept"}


@pytest.mark.usefixtures("device")
def test_under_a_schema_a_cycle_has_the_graph_that_reads_masks(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # All that the fake device hands over are ones: the record tells of a fault that is none.
    monkeypatch.setattr(Walk, "dead", lambda walk, row: False)
    (tmp_path / "schema.json").write_text('{"type": "string", "maxLength": 99}')
    found = taken_apart(made, tmp_path, capsys, "--schema", str(tmp_path / "schema.json"))
    graphs = [part["graph"] for part in found["parts"] if not part["name"]]
    assert graphs == ["propose", "verify", "accept_masked", "observe"]
