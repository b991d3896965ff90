"""How the doctor queries the machine that it runs on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.unprivileged import asked_unprivileged

from thor_dflash.runtime.doctor import probe
from thor_dflash.runtime.doctor.facts import CommandOutput, TensorRT
from thor_dflash.runtime.doctor.local_machine import LocalMachine


def test_here_answers_and_never_raises(tmp_path: Path) -> None:
    here = LocalMachine()
    assert here.version("numpy")
    assert here.version("no-such-thing") == ""
    assert here.text("no/such/file") == ""
    assert here.run("no-such-command").code is None
    assert here.run(sys.executable, "-c", "print('x'); raise SystemExit(3)") == CommandOutput(
        3, "x\n"
    )
    assert here.space(str(tmp_path / "new" / "folder")) > 0
    assert here.space("~nobody-of-this-name/cubins") == -1
    assert here.space("n" * 300) == -1  # longer than the name of a file may be
    assert here.kernels("~nobody-of-this-name/cubins") == here.kernels(__file__) == -1
    assert here.kernels(str(tmp_path / "new" / "folder")) == here.kernels(str(tmp_path)) == 0
    (tmp_path / "a.cubin").touch()
    assert here.kernels(str(tmp_path)) == 1
    assert here.cuda().bindings or here.cuda().error
    assert here.tensorrt().bindings or here.tensorrt().error


def test_files_are_read_as_far_as_they_are_text_and_found_in_order(tmp_path: Path) -> None:
    for name in "cab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_bytes(b"\xff0x10de\0\n")
    here = LocalMachine(root=tmp_path)
    assert here.text("a/vendor") == "\ufffd0x10de"
    assert here.paths("*/vendor") == ["a/vendor", "b/vendor", "c/vendor"]


def test_a_command_does_not_take_what_the_user_types() -> None:
    read, write = os.pipe()
    os.write(write, b"typed")
    os.close(write)
    before = os.dup(0)
    os.dup2(read, 0)
    try:
        assert LocalMachine().run("cat") == CommandOutput(0, "")
    finally:
        os.dup2(before, 0)
        for handle in (before, read):
            os.close(handle)


def test_a_tensorrt_that_fails_while_it_is_imported_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt.py").write_text("raise RuntimeError('no library')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    assert probe.tensorrt() == TensorRT(error="RuntimeError: no library")


def test_a_library_that_is_on_the_disk_but_not_loaded_has_no_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "LIBRARIES", ("libBrokenLocale.so.1",))  # any that nothing loads
    assert probe._library() == 0


def test_a_kernel_that_does_not_compile_leaves_the_version_of_its_compiler() -> None:
    found = probe.nvrtc("sm_1", -1)
    assert "must compile for sm_1 (got" in found.error
    assert found.version.startswith("13.")


def test_a_directory_that_is_closed_has_no_space(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    for directory in (tmp_path, tmp_path / "new" / "folder"):
        assert asked_unprivileged(partial(LocalMachine().space, str(directory))) == -1
    tmp_path.chmod(0o700)


def test_a_query_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[subprocess.Popen[bytes]] = []

    class Seen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            children.append(self)

    monkeypatch.setattr(subprocess, "Popen", Seen)
    monkeypatch.setattr(probe, "arguments", lambda *a: ["-c", "import time; time.sleep(60)"])
    start = time.monotonic()
    assert "no answer within 1 s" in LocalMachine(probe_seconds=1.0).cuda().error
    assert [child.wait(30) for child in children] == [-signal.SIGKILL], "it holds the driver"
    assert time.monotonic() - start < 30


def test_a_query_that_crashes_is_an_error_unless_it_had_replied_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crash = "import os, signal; print({!r}, flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    monkeypatch.setattr(probe, "arguments", lambda *a: ["-c", crash.format("bang")])
    assert "status -11 (bang)" in LocalMachine().tensorrt().error
    monkeypatch.setattr(probe, "arguments", lambda *a: ["-c", "raise SystemExit(3)"])
    assert "status 3 (no output)" in LocalMachine().tensorrt().error
    answer = json.dumps({"bindings": "10.13.3"})
    monkeypatch.setattr(probe, "arguments", lambda *a: ["-c", crash.format(answer)])
    assert LocalMachine().tensorrt() == TensorRT(bindings="10.13.3")
