"""The command as a process: what it imports, its exit status, and streams that fail."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from shlex import quote

import pytest

from thor_dflash.cli import main

MAIN = "import sys; from thor_dflash.cli.main import main; sys.exit(main())"


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


def test_the_module_is_the_command() -> None:
    """Without its script, as from a checkout."""
    line = [sys.executable, "-m", "thor_dflash.cli.main", "bild"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'bild'" in done.stderr


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


def test_a_reader_that_left_before_a_short_answer_is_no_error() -> None:
    """The answer is still in a buffer, which Python would try to write once more as it ends."""
    read, write = os.pipe()
    os.close(read)
    script = command("print('x')")
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize(
    "script", [command("print('x')"), command("print('x' * 1_000_000)"), f"{MAIN} # --help"]
)
def test_a_full_disk_is_one_line(
    script: str, unbuffered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without buffers, as in containers."""
    if unbuffered:
        monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    words = ["generate", "--help"] if script.endswith("--help") else []
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script, *words], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr == "thor-dflash: stdout must be writable (got: No space left on device)\n"


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 2), (errno.EBADF, 1)])
def test_a_disk_that_fails_elsewhere_is_one_line_and_a_bug_is_a_traceback(
    number: int, status: int
) -> None:
    done = shell(python(command(f"raise OSError({number}, os.strerror({number}))")))
    assert done.returncode == status
    assert ("Traceback" in done.stderr) == (status == 1)
    assert (done.stderr.count("\n") == 1) == (status == 2)


def test_a_terminal_that_lacks_a_character_shows_another() -> None:
    script = command("print('caf\\u00e9')")
    done = shell(f"PYTHONIOENCODING=ascii {python(script)}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "caf?\n", "")


@pytest.mark.parametrize("streams", ["2>/dev/full", "0<&- 2>&-"])
def test_streams_that_lead_nowhere_change_no_result(streams: str, tmp_path: Path) -> None:
    line = f"{python(MAIN)} keygen {quote(str(tmp_path / 'keys'))} {streams}"
    done = shell(line)
    assert (done.returncode, len(done.stdout.splitlines()), done.stderr) == (0, 4, "")
    assert (tmp_path / "keys" / "server.secret").is_file()
    done = shell(line)
    assert (done.returncode, done.stdout) == (2, ""), "stdout is for results"


def test_no_file_takes_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """A library that writes a warning to stderr (2) would write it into that file."""
    script = command(
        f"file = open('{tmp_path / 'weights'}', 'wb'); os.write(2, b'a warning'); "
        "subprocess.run(['sh', '-c', 'echo another >&2; cat && echo read'], check=True)"
    )
    done = shell(f"{python(script)} 0<&- 2>&-")
    assert (done.returncode, done.stdout) == (0, "read\n")
    assert (tmp_path / "weights").read_bytes() == b""


# ---- Ctrl-C --------------------------------------------------------------------------------------
def test_a_signal_that_the_parent_ignores_stays_ignored() -> None:
    """A shell script starts its background commands so: Ctrl-C is for the one in front."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert main.main(["generate"]) == 2
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


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


def test_ctrl_c_while_a_library_is_loaded_comes_after(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(
        "import os, signal\n"
        "try: os.kill(os.getpid(), signal.SIGINT); sum(range(1000))\n"
        "except KeyboardInterrupt: raise ImportError('initialization failed')\n"
        "print('loaded')\n"
    )
    done = shell(python(command(f"sys.path.append('{tmp_path}'); import library; time.sleep(60)")))
    assert (done.returncode, done.stdout) == (130, "loaded\n")
    assert done.stderr == "thor-dflash: interrupted\n"
