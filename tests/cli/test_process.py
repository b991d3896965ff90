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


def test_the_module_is_the_command() -> None:
    """Without its script, as from a checkout; it would do nothing, and say that all is well."""
    line = [sys.executable, "-m", "thor_dflash.cli.main", "bild"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'bild'" in done.stderr


def test_help_and_version_load_nothing_heavy() -> None:
    script = (
        "import sys; from thor_dflash.cli import main as cli\n"
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
        "import sys; from thor_dflash.cli import main as cli\n"
        "cli.run = lambda argv: print('x' * 1_000_000)\n"
        "sys.exit(cli.main([]))"
    )
    command = f"{python(script)} | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (141, "x", "")


def test_a_reader_that_left_before_a_short_answer_is_no_error() -> None:
    """The answer is still in a buffer, which Python would try to write once more as it ends."""
    read, write = os.pipe()
    os.close(read)
    script = (
        "import sys; from thor_dflash.cli import main as cli\n"
        "cli.run = lambda argv: print('x')\n"
        "sys.exit(cli.main([]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_a_full_disk_is_one_line(size: int) -> None:
    script = (
        "import sys; from thor_dflash.cli import main as cli\n"
        f"cli.run = lambda argv: print('x' * {size})\n"
        "sys.exit(cli.main([]))"
    )
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.stderr == "thor-dflash: stdout must be writable (got: No space left on device)\n"
    assert done.returncode == 2


def failing(number: int) -> subprocess.CompletedProcess[str]:
    """Run a command in which the system reports an error that names no file."""
    script = (
        "import os, sys; from thor_dflash.cli import main as cli\n"
        f"def fail(argv): raise OSError({number}, os.strerror({number}))\n"
        "cli.run = fail\n"
        "sys.exit(cli.main([]))"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ESTALE]
)
def test_a_disk_that_fails_elsewhere_is_one_line_and_not_said_of_stdout(number: int) -> None:
    done = failing(number)
    what = "every file must be readable and writable"
    assert done.stderr == f"thor-dflash: {what} (got: {os.strerror(number)})\n"
    assert (done.returncode, done.stdout.strip()) == (2, "")


def test_no_place_for_temporary_files_is_one_line() -> None:
    """Python says it with the number of a file that is missing, but no name."""
    script = (
        "import sys, tempfile; from thor_dflash.cli import main as cli\n"
        "tempfile._candidate_tempdir_list = lambda: ['/proc']\n"
        "cli.run = lambda *_: tempfile.gettempdir()\n"
        "sys.exit(cli.main([]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    said = "thor-dflash: a temporary directory must be writable and have room (got: No usable"
    assert (done.returncode, done.stderr.startswith(said)) == (2, True)
    assert done.stderr.count("\n") == 1


def test_a_working_directory_that_was_removed_is_one_line(tmp_path: Path) -> None:
    script = (
        "import os, sys; from thor_dflash.cli import main as cli\n"
        "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')\n"
        "sys.exit(cli.main(['build', '--target', '/x', '--out', 'z']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path
    )
    said = "thor-dflash: the working directory must be there (got: No such file or directory)\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_an_error_of_ours_shows_its_traceback() -> None:
    done = failing(errno.EBADF)
    assert (done.returncode, "Traceback" in done.stderr) == (1, True)


def test_a_closed_stdout_is_one_line() -> None:
    script = (
        "import sys; from thor_dflash.cli import main as cli\n"
        "sys.exit(cli.main(['keygen', '/dev/null/k']))"
    )
    command = f"{python(script)} >&-"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True)
    assert done.stderr == "thor-dflash: stdout must be writable (got: it is closed)\n"
    assert done.returncode == 2


def test_a_terminal_that_has_no_such_letter_shows_another() -> None:
    script = (
        "import sys; from thor_dflash.cli import main as cli\n"
        "cli.run = lambda argv: print('caf\\u00e9')\n"
        "sys.exit(cli.main([]))"
    )
    done = shell(f"PYTHONIOENCODING=ascii {python(script)}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "caf?\n", "")


@pytest.mark.parametrize("what", ["--help", "--version", "bench --help"])
def test_help_that_nobody_can_read_is_told(what: str) -> None:
    command = [sys.executable, "-c", MAIN, *what.split()]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.stderr == "thor-dflash: stdout must be writable (got: No space left on device)\n"
    assert done.returncode == 2


@pytest.mark.parametrize("streams", ["2>&-", "2>/dev/full", "0<&-", "0<&- 2>&-"])
def test_streams_that_lead_nowhere_change_no_result(streams: str, tmp_path: Path) -> None:
    command = f"{python(MAIN)} keygen {quote(str(tmp_path / 'keys'))} {streams}"
    done = shell(command)
    assert (done.returncode, len(done.stdout.splitlines()), done.stderr) == (0, 4, "")
    assert (tmp_path / "keys" / "server.secret").is_file()
    # What goes wrong is said on stderr or nowhere: stdout is for results.
    done = shell(command)
    assert (done.returncode, done.stdout) == (2, "")


def test_no_file_takes_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    # Otherwise a library that writes a warning to stderr (2) would write it into that file.
    script = (
        "import os, subprocess, sys; from thor_dflash.cli import main as cli\n"
        "def work(argv):\n"
        f"    with open('{tmp_path / 'weights'}', 'wb') as file:\n"
        "        os.write(2, b'a warning')\n"
        "        subprocess.run(['sh', '-c', 'echo another >&2; cat && echo read'], check=True)\n"
        "cli.run = work\n"
        "sys.exit(cli.main([]))"
    )
    done = shell(f"{python(script)} 0<&- 2>&-")
    assert (done.returncode, done.stdout) == (0, "read\n")
    assert (tmp_path / "weights").read_bytes() == b""


def python(script: str) -> str:
    """A shell's command that runs a script. Its arguments may be added."""
    return f"{quote(sys.executable)} -c {quote(script)}"


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("line", "ending"),
    [
        ("profile --package p --prompt a --json --trace {}", ".json"),
        ("profile --package p --prompt a --html {}", ".html"),
        ("score --package p --tokens t --out {}", ".npz"),
        ("check --package p --make-golden {}", ".npz"),
    ],
)
def test_a_file_is_not_written_over_what_is_printed_into_it(
    line: str, ending: str, tmp_path: Path
) -> None:
    out = tmp_path / f"x{ending}"
    words, option = line.format(quote(str(out))), line.split()[-2]
    done = shell(f"{python(MAIN)} {words} > {quote(str(out))}")
    told = f"{option} must be another file than that of stdout (got {out})"
    assert (done.returncode, done.stderr) == (2, f"thor-dflash: {told}\n")
    for stdout in (quote(str(tmp_path / "another")), "/dev/null", "&-"):
        done = shell(f"{python(MAIN)} {words} >{stdout}")
        assert (done.returncode, "that of stdout" in done.stderr) == (2, False)
    assert (out.read_bytes(), done.stderr.count("\n")) == (b"", 1)


def test_a_signal_that_the_parent_ignores_stays_ignored() -> None:
    """A shell script starts its background commands so: Ctrl-C is for the one in front."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert main.main(["generate"]) == 2
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_130_and_one_line() -> None:
    # A shell without job control starts background commands with SIGINT ignored, and children
    # inherit that. So if the tests run in the background, the child must set the handler itself.
    script = (
        "import signal, sys, time; from thor_dflash.cli import main as cli\n"
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


def test_ctrl_c_while_a_library_is_loaded_comes_after(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(
        "import os, signal\n"
        "try: os.kill(os.getpid(), signal.SIGINT); sum(range(1000))\n"
        "except KeyboardInterrupt: raise ImportError('initialization failed')\n"
        "print('loaded')\n"
    )
    script = (
        "import signal, sys, time; from thor_dflash.cli import main as cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.path.append('{tmp_path}')\n"
        "def work(argv): import library; time.sleep(60)\n"
        "cli.run = work\n"
        "sys.exit(cli.main([]))"
    )
    done = shell(python(script))
    said = (130, "loaded\n", "thor-dflash: interrupted\n")
    assert (done.returncode, done.stdout, done.stderr) == said


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("args", ["--help", "--version", "generate --help"])
def test_help_that_nobody_gets_is_an_error(
    args: str, unbuffered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without buffers, as in containers."""
    if unbuffered:
        monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", MAIN, *args.split()], stdout=full)
    assert done.returncode == 2
