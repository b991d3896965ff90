"""A shortage of memory, threads or files is one line that names the limit, and no traceback."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import zmq
from support.samples import package

from thor_dflash.cli import main
from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.extras import extra
from thor_dflash.core.progress import Silent
from thor_dflash.core.shortages import MEMORY, shortage
from thor_dflash.package.manifest import checking
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.server import workers

UNMAPPED = ImportError("/x/_lib.so: failed to map segment from shared object", name="_lib")


@pytest.mark.parametrize(
    ("error", "limit"),
    [
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (OSError(errno.EMFILE, "Too many open files", "/x"), "ulimit -n"),
        (zmq.ZMQError(errno.EMFILE), "ulimit -n"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "ulimit -v"),
        (MemoryError(), "ulimit -v"),
        (UNMAPPED, "ulimit -v"),
        (RuntimeError("a bug"), ""),
        (OSError(errno.ENOENT, "No such file"), ""),
        (ImportError("cannot import name"), ""),
    ],
    ids=str,
)
def test_a_shortage_names_its_limit(error: Exception, limit: str) -> None:
    assert limit in shortage(error)
    assert bool(shortage(error)) == bool(limit)


def test_a_library_that_does_not_fit_is_not_to_be_installed() -> None:
    with pytest.raises(ConfigError, match="ulimit -v"), extra("serve"):
        raise UNMAPPED


class NoThreads:
    """A system that gives some more threads, and then none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, left: int = 0) -> None:
        real = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            nonlocal left
            if left == 0:
                raise RuntimeError("can't start new thread")
            left -= 1
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)


def test_without_a_thread_a_package_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = package(tmp_path, a=b"1")
    NoThreads(monkeypatch)
    with pytest.raises(RuntimeError), checking(tmp_path, made, Silent()):
        pytest.fail("the package was not checked")


def test_without_files_a_package_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    made = package(tmp_path, a=b"1")
    monkeypatch.setattr("thor_dflash.package.manifest.hash_file", opened)
    with pytest.raises(OSError, match="Too many"), checking(tmp_path, made, Silent()):
        pytest.fail("the package was not checked")


@pytest.mark.parametrize("left", range(4))
def test_a_server_without_threads_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, left: int
) -> None:
    """They are for the log, the engine, checks and files."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("sys.setswitchinterval", lambda _: None)
    NoThreads(monkeypatch, left)
    status = main.main(["serve", "--mock", "--bind", f"ipc://{tmp_path}/plan"])
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if "listening" not in line]
    assert (status, out, len(lines)) == (2, "", 1), err
    assert "ulimit -u" in lines[0]


@pytest.mark.parametrize("fault", [MemoryError(), RuntimeError("can't start new thread"), UNMAPPED])
def test_a_backend_that_lacks_something_fails_in_one_line(fault: Exception) -> None:
    class Short(MockBackend):
        def warm(self) -> None:
            raise fault

    log, events = list[str](), list[Any]()
    assert workers._open_backend(lambda: Short(ServeConfig()), events.append, log.append) is None
    assert (log, "ulimit" in str(events[-1].error)) == ([], True)
    outcome: Any = workers._guard(lambda: Short(ServeConfig()).warm(), log.append)
    assert (outcome.code, outcome.retryable, len(log), log[0].count("\n")) == (
        "internal", False, 1, 0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("which", "limit", "command"),
    [
        (resource.RLIMIT_AS, MEMORY - (1 << 20), ["doctor"]),
        (resource.RLIMIT_NOFILE, 32, ["serve", "--mock"]),
    ],
    ids=["memory", "files"],
)
def test_a_limit_below_which_libraries_end_the_process_is_refused(
    which: int, limit: int, command: list[str]
) -> None:
    script = (
        "import resource, sys; from thor_dflash.cli.main import main\n"
        f"resource.setrlimit({which}, ({limit}, {limit})); sys.exit(main(sys.argv[1:]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, *command], check=False, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert f"got {limit}" in ended.stderr
