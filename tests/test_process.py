"""The command as a process: what it loads, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def test_help_and_version_load_nothing_heavy() -> None:
    script = (
        "import sys; from thor_dflash import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit as e: assert not e.code\n"
        "heavy = {'numpy', 'tokenizers', 'jinja2', 'rich', 'onnx'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    for args in (["--help"], ["generate", "--help"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "thor-dflash" in done.stdout


def test_a_reader_that_leaves_is_no_error() -> None:
    script = (
        "import sys; from thor_dflash import cli\n"
        "cli.run = lambda argv: print('x' * 1_000_000)\n"
        "sys.exit(cli.main([]))"
    )
    command = f'{sys.executable} -c "{script}" | head -c 1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (141, "x", "")


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_a_full_disk_is_one_line(size: int) -> None:
    script = (
        "import sys; from thor_dflash import cli\n"
        f"cli.run = lambda argv: print('x' * {size})\n"
        "sys.exit(cli.main([]))"
    )
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.stderr == "thor-dflash: stdout must be writable (got: No space left on device)\n"
    assert done.returncode == 2


def test_a_full_disk_elsewhere_is_not_said_of_stdout() -> None:
    script = (
        "import sys; from thor_dflash import cli\n"
        "def fail(argv): raise OSError(28, 'No space left on device')\n"
        "cli.run = fail\n"
        "sys.exit(cli.main([]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (1, True)


def test_a_closed_stdout_is_one_line() -> None:
    script = (
        "import sys; from thor_dflash import cli; sys.exit(cli.main(['keygen', '/dev/null/k']))"
    )
    command = f'{sys.executable} -c "{script}" >&-'
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True)
    assert done.stderr == "thor-dflash: stdout must be writable (got: it is closed)\n"
    assert done.returncode == 2


def test_ctrl_c_is_130_and_one_line() -> None:
    # A shell without job control starts what is in the background with SIGINT ignored, and so the
    # tests and every child of theirs.
    script = (
        "import signal, sys, time; from thor_dflash import cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def wait(argv): print('ready', flush=True); time.sleep(60)\n"
        "cli.run = wait\n"
        "sys.exit(cli.main([]))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert (child.returncode, err) == (130, "thor-dflash: interrupted\n")
