"""`thor-dflash replay` and `bfcl`: what they refuse, and no server."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.recorded_traces import rows, write

from thor_dflash.cli.main import main


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("trace") / "t.jsonl", rows(2, 3)))


@pytest.mark.parametrize(
    "options",
    [
        "--url http://127.0.0.1:1/v1 --forced-accept 3 --plain",
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
