"""The command as a process: what it imports, its exit status, and streams that fail."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from shlex import quote

import pytest


@pytest.fixture(autouse=True)
def buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams have buffers, as in a user's shell; without them, failures would show elsewhere."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


def command(body: str) -> str:
    """Returns a script in which the command line does `body` instead of a command."""
    return (
        "import os, signal, subprocess, sys, time; from thor_dflash.cli import main as cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"def work(argv):\n    {body}\n"
        "cli.run = work\n"
        "sys.exit(cli.main([]))"
    )


def python(script: str) -> str:
    """Returns a shell's command that runs a script. Its arguments may be added."""
    return f"{quote(sys.executable)} -c {quote(script)}"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True)


def test_help_and_version_load_nothing_heavy() -> None:
    script = (
        "import sys; from thor_dflash.cli import main as cli\n"
        "for line in sys.argv[1:]:\n"
        "    try: cli.main(line.split())\n"
        "    except SystemExit as e: assert not e.code\n"
        "heavy = {'numpy', 'tokenizers', 'jinja2', 'rich', 'onnx'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    args = ("--help", "generate --help", "--version")
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "thor-dflash" in done.stdout


# ---- stdout and stderr that fail -----------------------------------------------------------------
def test_a_reader_that_leaves_is_no_error() -> None:
    script = command("print('x' * 1_000_000)")
    done = shell(f"{python(script)} | head -c 1; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stdout, done.stderr) == (141, "x", "")


def test_a_full_disk_is_one_line() -> None:
    script = command("print('x')")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr.startswith("thor-dflash: ")
    assert done.stderr.endswith("No space left on device)\n")


def test_ctrl_c_is_130_and_one_line() -> None:
    script = command("print('ready', flush=True); time.sleep(60)")
    child = subprocess.Popen(
        [sys.executable, "-c", script], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert (child.returncode, err) == (130, "thor-dflash: interrupted\n")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_closed_stream_is_an_empty_one_and_no_other_file_gets_its_number(
    number: int, tmp_path: Path
) -> None:
    script = command(
        f"file = open({str(tmp_path / 'x')!r}, 'w')\n"
        "    os.read(0, 1); print('out'); print('err', file=sys.stderr); return file.fileno() > 2"
    )
    done = shell(f"{python(script)} </dev/null {number}>&-")
    assert done.returncode == 1, done.stderr
    assert done.stdout == ("" if number == 1 else "out\n")
    assert done.stderr == ("" if number == 2 else "err\n")
    assert (tmp_path / "x").read_text() == ""
