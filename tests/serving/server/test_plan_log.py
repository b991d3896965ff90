"""The log of a server: one line for each plan, and how it ended."""

from __future__ import annotations

import os
import re
import threading
import time
from typing import Any

import pytest
from support.waiting import PATIENCE_S, until

from thor_dflash.cli.commands.serve import Log
from thor_dflash.core.progress import Lines
from thor_dflash.core.results import Speculation, Usage
from thor_dflash.serving.client import PlanError, PlanRequest, RemotePlanner
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.codec import JSON
from thor_dflash.serving.server.plan_log import plan_line
from thor_dflash.serving.server.scheduler import Job, Peer, job_of


def job(**fields: Any) -> Job:
    peer = Peer((b"peer",), JSON, arrived=time.monotonic() - 1.5)
    return job_of(peer, PlanRequest(prompt="x", id="a1", **fields))


def test_a_line_has_the_tokens_and_the_end_of_a_plan() -> None:
    result = messages.Result(
        finish_reason="stop",
        plan_valid=True,
        usage=Usage(prompt_tokens=117, cached_tokens=64, thinking_tokens=62, output_tokens=173),
        spec=Speculation(accept_len=13.111),
    )
    line = plan_line(job(session="arm"), result)
    assert re.fullmatch(
        r"plan id=a1 session=arm ended=stop status=ok valid=true prompt=117 cached=64 thinking=62 "
        r"answer=173 accept_len=13\.11 ms=15\d\d", line,
    )  # fmt: skip


def test_a_line_of_a_plan_without_a_result() -> None:
    lost = job()
    lost.gone = True
    line = plan_line(lost, PlanError("cancelled", "x"))
    assert re.fullmatch(r"plan id=a1 ended=cancelled ms=15\d\d client=gone", line)


@pytest.mark.parametrize("name", ["a ended=stop", "a\nplan", 'a"b', "\u202eb", ""])
def test_the_name_of_a_session_cannot_forge_a_field(name: str) -> None:
    line = plan_line(job(session=name), PlanError("busy", "x"))
    assert re.search(r' session="(?:[^"\\\n]|\\.)*" ended=busy ', line)


def test_each_plan_is_one_line(house: Any) -> None:
    with RemotePlanner(house.mock().endpoints[0]) as planner:
        planner.plan(PlanRequest(prompt="x", session="arm"))
        planner.ping()
        with pytest.raises(PlanError):
            planner.plan(PlanRequest(prompt="x", json_schema={"type": 5}))
    plans = [line for line in house.log if line.startswith("plan ")]
    assert [re.findall(r"(?:session|ended)=(\w+)", line)[-1] for line in plans] == [
        "stop",
        "schema_invalid",
    ]
    assert " session=arm " in plans[0]


def test_every_line_has_its_time(tmp_path: Any) -> None:
    with (path := tmp_path / "log").open("w") as file:
        log = Log(file)
        log("one\n\ttwo")
        with Lines(log).task("loading"):
            pass
        assert log.close()
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(rf"{stamp} one\n\ttwo\n{stamp} loading\n", path.read_text())


def test_lines_that_a_slow_reader_missed_are_counted() -> None:
    reader, writer = os.pipe()
    with open(reader, "rb") as source, open(writer, "w") as pipe:
        log = Log(pipe)
        for i in range(2000):  # more than the pipe and the queue hold
            log(f"line {i} " + 80 * "x")
        text: list[bytes] = []
        thread = threading.Thread(target=lambda: text.append(source.read()))
        thread.start()
        until(lambda: log._lines.empty())
        log("last")
        assert log.close()
        pipe.close()
        thread.join(PATIENCE_S)
    whole = text[0].decode()
    lost = [int(n.replace(",", "")) for n in re.findall(r"Z ([\d,]+) lines? before this", whole)]
    assert sum(lost) > 0
    assert whole.count("Z line ") + sum(lost) == 2000
    assert whole.endswith("Z last\n")
