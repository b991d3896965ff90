"""Every command of docs/robot.md, in the order of the page, against `serve --mock`; in the last
section, against the small planner. Its Python is run by test_examples.py, its ROS by tests/ros2.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cpp_clients import SYSTEM
from support.server_process import RUN

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/robot.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ROBOTS = ("colcon ", "ros2 ")
"""Commands of a robot's own installation, which the page calls unverified."""
READY = {"serve": " ready after ", "gateway": "http://"}
"""Command that goes on -> what it prints when it is ready."""


def commands() -> Iterator[str]:
    """The lines of blocks without a language; those inside a quoted text belong together."""
    fences = re.split(r"^```(.*)\n", PAGE, flags=re.M)
    for language, block in zip(fences[1::4], fences[2::4], strict=True):
        line = ""
        for part in block.splitlines() if not language else ():
            line += f"\n{part}" if line else part
            if line.count("'") % 2 == 0:
                yield line.partition("     # ")[0]
                line = ""


class Shell:
    """Runs commands in a directory that has the repository's docs and models."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.servers: dict[str, subprocess.Popen[str]] = {}
        for name in ("docs", "models", "serving"):
            (directory / name).symlink_to(ROOT / name)
        (directory / "bin").mkdir()
        (program := directory / "bin/thor-dflash").write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(RUN)} "$@"\n'
        )
        program.chmod(0o755)

    def command(self, text: str) -> list[str]:
        # Ports of its own: other tests may use those of the page.
        text = text.replace("tcp://127.0.0.1:5571", f"ipc://{self.directory}/s")
        text = text.replace("127.0.0.1:8000", "127.0.0.1:18273")
        if text.startswith("thor-dflash plan"):
            text = text.replace("plan", f"plan --server ipc://{self.directory}/s", 1)
        if text.startswith("thor-dflash serve"):
            text += f" --bind ipc://{self.directory}/s"
        return ["env", f"PATH={self.directory}/bin:/usr/bin:/bin", "bash", "-euc", text]

    def run(self, text: str) -> str:
        done = subprocess.run(
            self.command(text), cwd=self.directory, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stderr}"
        return done.stdout

    def serve(self, text: str, verb: str) -> None:
        if (older := self.servers.pop(verb, None)) is not None:
            older.terminate()
            older.communicate(timeout=30)
        command = self.command(f"exec {text}".replace("exec thor", "thor"))
        child = subprocess.Popen(command, cwd=self.directory, stderr=subprocess.PIPE, text=True)
        self.servers[verb] = child
        assert child.stderr
        assert any(READY[verb] in line for line in child.stderr), text

    def close(self) -> None:
        for child in self.servers.values():
            child.terminate()
        for child in self.servers.values():
            child.communicate(timeout=30)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    it = Shell(tmp_path)
    yield it
    it.close()


@pytest.mark.slow
def test_every_command_of_the_page_runs(shell: Shell) -> None:
    ran, skipped = list[str](), list[str]()
    for command in commands():
        words = command.split()
        if command.startswith("pip install "):
            extras = re.findall(r"\[([\w,]+)\]", command)
            assert {*",".join(extras).split(",")} - {""} <= {*PROJECT["optional-dependencies"]}
        elif command.startswith(ROBOTS):
            skipped.append(command)
        elif command.startswith("g++") and not all(path.is_file() for path in SYSTEM):
            skipped += [command, "./plan"]
        elif words[0] == "./plan" and "./plan" in skipped:
            continue
        elif words[1] in READY:
            shell.serve(command, words[1])
        else:
            ran.append(shell.run(command))
    assert len(ran) >= 10, ran
    assert len(skipped) <= 6, skipped
    trees = [text for text in ran if "BTCPP_format" in text]
    assert len(trees) == 2, ran  # of the command line and of curl
    assert (shell.directory / "timed.pddl").read_text().startswith("0.000: (pick cup)  [1.000]\n")
    assert "*Unverified*: colcon" in PAGE
