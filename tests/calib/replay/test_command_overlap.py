"""The score of a turn: programs that both the recorded and the given calls run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from thor_dflash.calib.replay.command_overlap import overlap, programs


def call(command: object, name: str = "bash") -> dict[str, Any]:
    return {"function": {"name": name, "arguments": json.dumps({"command": command})}}


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("cd /x && python3.11 -m pytest | head -5", ["python", "head"]),
        ("A=1 env time /usr/bin/rg 'a | cat' x; sed -i s/a/b/ f", ["grep", "sed"]),
        ("cat <<'EOF' > f.py\nimport os\nls\nEOF", ["cat"]),
        ("unknown | apt-get install x || ./ls", ["apt", "ls"]),
        ("echo `cat x`\nGIT_DIR=x git log", ["git"]),
        ("ls/", []),
        (["ls"], []),
    ],
)
def test_programs_of_a_command(command: object, found: list[str]) -> None:
    assert programs([call(command)]) == found


def test_only_calls_of_bash_with_an_object() -> None:
    bad = {"function": {"name": "bash", "arguments": "ls"}}
    assert programs([call("ls", "python"), bad, {"function": None}, {}]) == []


def test_overlap_counts_repetitions() -> None:
    recorded = [call("ls && ls && cat x")]
    assert overlap(recorded, [call("ls; cat y; git log")]) == 2 / 4
    assert overlap(recorded, []) == 0.0
    assert overlap([call("cd x")], [call("ls")]) is None
