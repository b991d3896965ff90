"""A chat template can take neither the time nor the memory of the process that renders it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.waiting import until

from thor_dflash.runtime.text import template_process
from thor_dflash.runtime.text.template_process import TemplateProcess

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[TemplateProcess]:
    monkeypatch.setattr(template_process, "SECONDS", 0.4)
    monkeypatch.setattr(template_process, "MEMORY", 128 << 20)
    it = TemplateProcess()
    yield it
    it.close()


def render(process: TemplateProcess, source: str) -> tuple[str, str]:
    return process.render(source, {}, [{"role": "user", "content": "é"}])


def test_a_rendering_ends_at_its_limits_and_the_next_is_right(process: TemplateProcess) -> None:
    """Also where jinja would compute a constant while it compiles."""
    for source, why in (
        ("{{ 'a' * 20000000000 }}", "MemoryError"),
        ("{% set x = namespace(a='ab') %}{% for i in range(40) %}{% set x.a = x.a + x.a %}"
         "{% endfor %}", "MemoryError"),
        (LOOP, "more than 0.4 s"),
        ("{{ 'a' * 17000000 }}", "more than 16777216 characters"),
        ("{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "more than 16777216 char"),
        ("{{ raise_exception('a' * 9999999) }}", "aaa"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ):  # fmt: skip
        kind, reason = render(process, source)
        assert (kind, reason[: len(why)], len(reason) <= 1000) == ("refused", why, True), source
        assert render(process, "{{ messages[0].content }}") == ("text", "é")


def test_an_interrupted_rendering_is_not_the_answer_of_the_next(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = template_process._exchange

    def interrupted(child: Any, line: bytes) -> Any:
        child.stdin.write(line)
        child.stdin.flush()
        raise KeyboardInterrupt

    monkeypatch.setattr(template_process, "_exchange", interrupted)
    with pytest.raises(KeyboardInterrupt):
        render(process, "one")
    monkeypatch.setattr(template_process, "_exchange", exchange)
    assert render(process, "two") == ("text", "two")


def test_a_process_that_was_killed_meanwhile_is_replaced(process: TemplateProcess) -> None:
    render(process, "one")
    assert process._child is not None
    os.kill(process._child.pid, signal.SIGKILL)
    until(lambda: process._child is not None and process._child.poll() is not None)
    assert render(process, "two") == ("text", "two")


@pytest.mark.parametrize("length", [1, 1 << 20])
def test_a_process_that_dies_before_it_reads_a_request_is_replaced(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    running = process._running

    def killed() -> Any:
        child = running()
        child.kill()
        child.wait()
        return child

    monkeypatch.setattr(process, "_running", killed)
    kind, reason = process.render("one", {}, [{"content": "x" * length}])
    assert (kind, "status -9" in reason) == ("refused", True)
    monkeypatch.setattr(process, "_running", running)
    assert render(process, "two") == ("text", "two")


def test_after_sigkill_no_rendering_goes_on() -> None:
    script = (
        "import os, sys, threading, time\n"
        "from thor_dflash.runtime.text import template_process\n"
        "template_process.SECONDS = 0.3\n"
        "render = lambda source: template_process.PROCESS.render(source, {}, [])\n"
        "render('x')\n"
        "print(template_process.PROCESS._child.pid, flush=True)\n"
        "threading.Thread(target=render, args=(sys.argv[1],)).start()\n"
        "time.sleep(0.1)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", script, LOOP]
    parent = subprocess.run(command, check=False, capture_output=True, text=True)
    assert parent.returncode == -signal.SIGKILL
    pid, end = int(parent.stdout), time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}") or _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Nobody may collect the status of an orphan in a container."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"
