"""A recorded trace on a session: what is reused is what the design says, states are those of a full
prefill, and forced answers leave the state of the recorded ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.constrained_model import package
from support.http_gateway import gateway
from support.recorded_traces import TEMPLATE, rows, write
from support.waiting import until

from thor_dflash.calib.replay import session_replay
from thor_dflash.calib.replay.http_replay import HttpReplay
from thor_dflash.calib.replay.openai_client import OpenAIConnection
from thor_dflash.calib.replay.recorded_trace import RecordedTrace, read_trace
from thor_dflash.calib.replay.replay_report import ReplayReport, ReplayTurn, totals
from thor_dflash.calib.replay.replay_report import text as text_of
from thor_dflash.calib.replay.session_replay import EncodedTurn, SessionReplay
from thor_dflash.cli.main import main
from thor_dflash.cli.report.replay_page import page
from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.serving import ServeConfig
from thor_dflash.core import strict_records
from thor_dflash.core.errors import PlanError, RequestError
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.proposers import NoDrafter
from thor_dflash.runtime.session import Request, Session, open_session
from thor_dflash.runtime.session import session as session_module
from thor_dflash.runtime.session.turn_cache import TurnCache
from thor_dflash.serving.client import Message, PlanRequest
from thor_dflash.serving.planner.session_backend import SessionBackend
from thor_dflash.serving.server.server import serving

CHUNK = 32
TURNS = 6


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    made = package(template=TEMPLATE)
    with closing(open_session(made, EngineConfig(threads=1), Silent(), reuse=8 << 20)) as opened:
        yield opened


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> RecordedTrace:
    return read_trace(write(tmp_path_factory.mktemp("trace") / "t.jsonl", rows(2, TURNS)))


Replayed = tuple[list[ReplayTurn], dict[str, bytes]]


def forget(session: Session) -> None:
    session.turns = TurnCache(session.model)
    session.model.state.log.chunks.clear()


def state(session: Session) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in session.model.state.snapshot().arrays.items()}


@pytest.fixture(scope="module")
def reused(session: Session, trace: RecordedTrace) -> Replayed:
    forget(session)
    found = list(SessionReplay(session, 4.5).run(trace))
    assert [turn.error for turn in found] == [""] * 2 * TURNS
    return found, state(session)


@pytest.fixture(scope="module")
def whole(session: Session, trace: RecordedTrace) -> Replayed:
    """The last turn alone, which reads its whole prompt."""
    forget(session)
    last = trace.conversations[-1]
    found = SessionReplay(session, 4.5, reuse=False).answer(last, last.turns[-1], TURNS)
    return [found], state(session)


@pytest.fixture(scope="module")
def texts(session: Session, trace: RecordedTrace) -> list[EncodedTurn]:
    encoder = SessionReplay(session, 4.5).encoder
    return [encoder.encode(c, turn) for c in trace.conversations for turn in c.turns]


def test_every_turn_continues_from_the_last_whole_chunk_of_the_one_before(
    reused: Replayed, texts: list[EncodedTurn]
) -> None:
    for i, (turn, text) in enumerate(zip(reused[0], texts, strict=True)):
        held = {kind: at // CHUNK * CHUNK for at, kind in texts[i - 1].prompt.boundaries}
        first = held["system"] if i else 0
        assert turn.cached_tokens == (held["prompt"] if turn.turn > 1 else first)
        assert turn.prompt_tokens == len(text.prompt.ids)
        assert turn.answer_tokens == len(text.answer)
        assert (turn.finish, turn.calls) == ("forced", 1)
        assert turn.prefill_steps == -(-(len(text.prompt.ids) - 1 - turn.cached_tokens) // CHUNK)


def test_the_work_before_a_first_token_does_not_depend_on_the_history(
    reused: Replayed, whole: Replayed, texts: list[EncodedTurn]
) -> None:
    """Prefill steps, which are the same on every machine, follow from the new tokens alone."""
    for i, turn in enumerate(reused[0]):
        if turn.turn > 1 and turn.prefill_steps is not None:
            new = len(texts[i].prompt.ids) - len(texts[i - 1].prompt.ids)
            assert 0 <= turn.prefill_steps - new // CHUNK <= 2
    [last] = whole[0]
    assert last.cached_tokens == 0
    assert last.prefill_steps == -(-(len(texts[-1].prompt.ids) - 1) // CHUNK)


def test_the_state_after_a_replay_is_that_without_reuse(reused: Replayed, whole: Replayed) -> None:
    assert reused[1] == whole[1]


def test_a_forced_answer_leaves_the_state_of_that_answer(
    session: Session, trace: RecordedTrace, texts: list[EncodedTurn]
) -> None:
    """Whatever is assumed: the ids are committed, and the next token is the one after them."""
    text = texts[0]
    after = Request(prompt=(*text.prompt.ids, *text.answer), max_tokens=1)
    found: set[tuple[int, ...]] = set()
    for rows_ in (1.0, 4.5, 16.0, "drafter"):
        one = trace.first(1, 1)
        [turn] = SessionReplay(session, rows_).run(one)
        assert turn.answer_tokens == len(text.answer)
        assert session.model.state.length == len(text.prompt.ids) - 1 + len(text.answer)
        if rows_ == 16.0:
            assert turn.cycles == -(-len(text.answer) // 16)
        found |= {tuple(t for c in session.run(after, NoDrafter()) for t in c.tokens)}
    assert len(found) == 1


def test_an_answer_of_the_model_is_scored_and_not_forced(
    session: Session, trace: RecordedTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_replay, "LONGEST_ANSWER", 8)
    [turn] = SessionReplay(session).run(trace.first(1, 1))
    assert turn.finish in ("stop", "length", "grammar_dead_end")
    assert turn.overlap is not None


def test_a_turn_that_does_not_fit_ends_its_conversation(session: Session, tmp_path: Path) -> None:
    long = read_trace(write(tmp_path / "t.jsonl", rows(2, 16)))
    found = list(SessionReplay(session, 16.0).run(long))
    assert [turn.conversation for turn in found if turn.error] == ["c0", "c1"]
    assert "max_tokens" in found[-1].error
    assert totals(found, long.turns, 1.0).missing == long.turns - len(found) + 2


@pytest.mark.parametrize("what", ["replay", "generate"])
def test_a_prompt_that_cannot_fit_is_refused_before_the_engine_is_loaded(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*args: object) -> None:
        raise AssertionError("the engine is loaded")

    monkeypatch.setitem(session_module._ENGINES, "ort", never)
    command = [what, "--package", str(package(template=TEMPLATE))]
    if what == "replay":
        table = rows(2, 2)
        for row in table:
            row["system"] = "x " * 2000
        command.append(str(write(tmp_path / "t.jsonl", table)))
    else:
        (tmp_path / "ids.json").write_text(json.dumps([7] * 2000))
        command += ["--tokens", str(tmp_path / "ids.json")]
    assert main(command) == 2
    assert "less one block" in capsys.readouterr().err


@pytest.mark.parametrize("rows_", [0.5, 17.0])
def test_rows_that_no_block_has(session: Session, rows_: float) -> None:
    with pytest.raises(RequestError):
        SessionReplay(session, rows_)


# ---- over the wire -----------------------------------------------------------------------
ALLOWED = ServeConfig(bind=("tcp://127.0.0.1:*",), allow_forced=True, thinking="off", max_tokens=32)
ANSWER = Message(role="assistant", content="Done.")


class KeptOpen(SessionBackend):
    """A backend that leaves its session to the next one, and needs no warming up."""

    def warm(self) -> None:
        self.session.turns = TurnCache(self.session.model)

    def close(self) -> None:
        pass


def test_a_trace_leaves_the_state_that_it_leaves_in_process(
    session: Session, trace: RecordedTrace
) -> None:
    forget(session)
    local = list(SessionReplay(session, 4.5).run(trace.first(1, 3)))
    want, length = state(session), session.model.state.length
    log: list[str] = []
    with (
        serving(lambda: KeptOpen(session, ALLOWED), ALLOWED, log=log.append) as server,
        gateway(*server.endpoints) as address,
        closing(OpenAIConnection(f"{address}/v1", {})) as connection,
    ):
        until(lambda: any(line.startswith("ready after") for line in log))
        extra = {"max_completion_tokens": 32}
        replay = HttpReplay(connection, "", forced=4.5, extra=extra)
        found = list(replay.run(trace.first(1, 3)))
        refused = list(HttpReplay(connection, "", forced=99.0, extra=extra).run(trace.first(1, 1)))
    assert [turn.error for turn in found] == [""] * 3
    assert state(session) == want
    assert session.model.state.length == length
    for one, other in zip(found, local, strict=True):
        assert (one.finish, one.calls, one.overlap) == ("forced", 1, None)
        assert (one.cycles, one.prompt_tokens) == (other.cycles, other.prompt_tokens)
        assert one.cached_tokens == other.cached_tokens
    assert "forced_accept" in refused[0].error


@pytest.mark.parametrize(
    ("allowed", "fields", "at"),
    [
        (False, {"forced_answer": ANSWER}, "forced_answer"),
        (True, {"forced_accept": 2.0}, "forced_accept"),
        (True, {"forced_answer": Message(role="user", content="x")}, "forced_answer.role"),
        (True, {"forced_answer": ANSWER, "forced_accept": 17.0}, "forced_accept"),
        (True, {"forced_answer": Message(role="assistant", content="", tool_calls=(
            {"function": {"name": "bash", "arguments": "no"}},))},
         "forced_answer.tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_what_is_refused(session: Session, allowed: bool, fields: Any, at: str) -> None:
    backend = SessionBackend(session, ServeConfig(allow_forced=allowed, thinking="off"))
    with pytest.raises(PlanError) as error:
        backend.prepare(PlanRequest(prompt="x", **fields), None)
    assert error.value.code == "bad_request"
    assert error.value.message.startswith(at)


# ---- the command -------------------------------------------------------------------------
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(write(tmp_path / "t.jsonl", rows(2, 2)))
    made, out, old = str(package(template=TEMPLATE)), tmp_path / "x.html", tmp_path / "old.json"
    command = ["replay", trace, "--package", made, "--turns", "2", "--forced-accept", "4.5"]
    command += ["-s", "engine.threads=1", "--reuse-mb", "8"]
    assert main([*command, "--json", "--html", str(out)]) == 0
    old.write_text(text := capsys.readouterr().out)
    report = json.loads(text)
    assert report["totals"]["answered"] == 4
    assert report["totals"]["cached_tokens"] > 0
    assert report["subject"]["forced"] == "4.5"
    assert {turn["finish"] for turn in report["turns"]} == {"forced"}
    well_formed(out.read_text())
    command[command.index("2")] = "1"
    assert main([*command, "--compare", str(old)]) == 2
    assert "replaying" not in capsys.readouterr().err, "refused before the work"
    found = strict_records.decode(ReplayReport, report, "", RequestError)
    assert re.search(r"of them read +(\d+) +\1\n", text_of(found, found)), "both columns"
    assert "before:" not in text_of(found, found)
    other = replace(found, subject=replace(found.subject, target="cuda on GPU, tuned 1a2b"))
    assert "before: cuda on GPU, tuned 1a2b" in text_of(found, other)
    well_formed(html := page(found, other))
    assert "cuda on GPU, tuned 1a2b" in html


def well_formed(html: str) -> None:
    """Check a page as XML, and that it loads nothing."""
    ElementTree.fromstring(re.sub(r"<meta[^>]*>", "", html.replace("<!doctype html>", "")).strip())
    assert "http" not in html


def test_an_interrupt_keeps_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def two(replay: SessionReplay, trace: RecordedTrace) -> Iterator[ReplayTurn]:
        yield ReplayTurn(conversation="c0", turn=1, ttft_ms=5.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(SessionReplay, "run", two)
    trace = str(write(tmp_path / "t.jsonl", rows(1, 2)))
    assert main(["replay", trace, "--package", str(package(template=TEMPLATE)), "--json"]) == 130
    totals_ = json.loads(capsys.readouterr().out)["totals"]
    assert (totals_["answered"], totals_["missing"]) == (1, 1)


# ---- the scripts that measure on a GPU ---------------------------------------------------
@pytest.mark.slow
def test_the_scripts_for_a_gpu_run_to_their_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rehearsed in two parts, the second of which resumes, and conversations without reuse."""
    # Imported here: they need the extras of a GPU's engine.
    agent_trace, agent_whole = map(import_module, ("gpu.agent_trace", "gpu.agent_whole"))
    trace, made = write(tmp_path / "t.jsonl", rows(3, 3)), package(template=TEMPLATE)
    reports = tmp_path / "reports"
    for part in ("--conversations 2", "--from 1 --whole c0 c2", "--conversations 0 --whole c1"):
        run = ["--accept", "4.5", "--reports", str(reports), *part.split()]
        assert agent_trace.main([str(trace), "--package", str(made), *run]) == 0
    found = sorted(path.name for path in reports.glob("*.json"))
    accepts = ["accept-4.5-from-1.json", "accept-4.5.json"]
    assert found == [*accepts, "whole-c0.json", "whole-c1.json", "whole-c2.json"]
    capsys.readouterr()
    given = [str(reports / name) for name in reversed(accepts)]
    without = ["--without", *(str(reports / f"whole-c{i}.json") for i in range(3))]
    command = [str(trace), *given, "--tokenizer", str(made), *without, "--json"]
    assert agent_whole.main(command) == 0
    figures = {(r["section"], r["name"]): r["value"] for r in json.loads(capsys.readouterr().out)}
    done, same = (value for (section, _), value in figures.items() if section == "design")
    assert done == same == figures["whole trace", "turns"] == 9
    name = "prompt tokens read"
    for i in range(3):
        assert figures[f"c{i}, with reuse", name] < figures[f"c{i}, without reuse", name]
