"""The checklist of a first run on a Thor, with a stand-in for the command `thor-dflash`."""

from __future__ import annotations

import os
import shlex
import subprocess
import tarfile
from pathlib import Path

import pytest

from thor_dflash.cli.parser import parse

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tools/first_run_thor.sh"
STAND_IN = r"""#!/usr/bin/env bash
printf '%q ' "$@" >>"$LOG"; echo >>"$LOG"
[[ -n ${FAIL:-} && " $* " == *" $FAIL "* ]] && { echo "thor-dflash: no" >&2; exit 2; }
if [[ $1 == build ]]; then mkdir -p "$3" && touch "$3/manifest.toml" "$3/tensorrt.log"; fi
echo '{}'
"""


@pytest.fixture
def board(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin/thor-dflash"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    (tmp_path / "golden.npz").touch()
    return tmp_path


def run(board: Path, *options: str, fail: str = "") -> subprocess.CompletedProcess[str]:
    path = f"{board / 'bin'}:{os.defpath}"
    return subprocess.run(
        ["bash", str(SCRIPT), "--work", str(board / "work"), *options],
        env={"PATH": path, "LOG": str(board / "log"), "FAIL": fail},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def whole(board: Path) -> list[str]:
    golden = str(board / "golden.npz")
    return ["--target", str(board / "target"), "--drafter", str(board / "drafter"),
            "--golden", golden, "--golden-nano", golden]  # fmt: skip


def asked(board: Path) -> list[list[str]]:
    return [shlex.split(line) for line in (board / "log").read_text().splitlines()]


def test_it_does_every_step_once_and_packs_what_to_send_back(board: Path) -> None:
    first = run(board, *whole(board))
    assert first.returncode == 0, first.stderr
    commands = asked(board)
    assert len(commands) > 20
    for command in commands:
        parse(command)  # the command line knows every option
    assert run(board, *whole(board)).returncode == 0
    assert asked(board) == commands
    with tarfile.open(board / "work/first-run.tar.gz") as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert {"facts.txt", "doctor.json", "bench.json", "profile-trt.json", "answer.json",
            "planner-trt-tensorrt.log", "nano-trt-tensorrt.log"} < names  # fmt: skip
    assert "manifest.toml" not in names


def test_it_goes_on_with_the_step_that_failed(board: Path) -> None:
    failed = run(board, *whole(board), fail="bench")
    assert failed.returncode == 1
    assert "bench failed with status 2" in failed.stderr
    assert (board / "work/first-run.tar.gz").is_file()
    before = asked(board)
    assert before[-1][0] == "bench"
    assert run(board, *whole(board)).returncode == 0
    after = asked(board)[len(before) :]
    assert after[0][0] == "bench"
    assert not [command for command in after if command in before[:-1]]


@pytest.mark.parametrize(
    "options", [["--target", "x"], ["--work"], ["--fast"], ["--golden", "missing.npz"]]
)
def test_wrong_options_are_refused_before_anything_runs(board: Path, options: list[str]) -> None:
    assert run(board, *options).returncode == 2
    assert not (board / "log").exists()
