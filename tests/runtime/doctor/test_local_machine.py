"""How the doctor queries the machine that it runs on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from thor_dflash.runtime.doctor import probe, software
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


def test_a_tensorrt_that_fails_while_it_is_imported_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt.py").write_text("raise RuntimeError('no library')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    assert probe.tensorrt() == TensorRT(error="RuntimeError: no library")


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


@pytest.mark.parametrize(
    ("error", "text"),
    [(ModuleNotFoundError("No module named 'cuda'"), "cuda-bindings is not installed"),
     (ImportError("libfoo.so: cannot open"), "cuda-bindings cannot be loaded: libfoo.so: cannot "
      "open")],
)  # fmt: skip
def test_bindings_that_cannot_be_imported_are_named(
    error: ImportError, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name.partition(".")[0] == "cuda":
                raise error

    for name in [name for name in sys.modules if name.partition(".")[0] == "cuda"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert probe.cuda().error == f"no bindings: {text}"
    finding = software.driver(LocalMachine(), probe.cuda(), jetson=False, needed=True, unused=False)
    assert (finding.state, finding.remedy) == ("wrong", "pip install 'thor-dflash[cuda]'")
