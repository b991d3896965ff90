"""The backend over a real session, with random weights: what serving must not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.constrained_model import PLAN
from support.plan_formats import DOMAIN, skills

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import CompilerBusy
from thor_dflash.runtime.grammar.compiler import COMPILE_S
from thor_dflash.runtime.grammar.schema import read
from thor_dflash.runtime.session import Request, Session
from thor_dflash.serving.client import Chunk, Message, PlanError, PlanRequest, Result
from thor_dflash.serving.planner.backend import Backend, drive
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.planner.planner import LocalPlanner
from thor_dflash.serving.planner.schema_validator import SchemaValidator
from thor_dflash.serving.planner.session_backend import SessionBackend
from thor_dflash.serving.protocol import codec
from thor_dflash.serving.protocol.messages import PrefixPut, Validate
from thor_dflash.serving.protocol.skills import PlanFormatName

SYSTEM = "You plan for one arm. " + "It can pick, place and wait; nothing else at all. " * 6
CONFIG = ServeConfig(thinking_budget=24, max_tokens=40)


@pytest.fixture
def backend(session: Session) -> SessionBackend:
    it = SessionBackend(session, CONFIG)
    for prefix in it.prefixes():
        it.drop(prefix["prefix_id"])
    return it


class Lent(SessionBackend):
    """A backend that leaves its session, which the tests share, open."""

    def close(self) -> None:
        pass


def alone(session: Session, words: str, count: int) -> list[int]:
    """The tokens that the decoding loop gives without a server, and without thinking."""
    assert session.tokenizer
    prompt = session.tokenizer.encode(
        session.tokenizer.render([{"role": "user", "content": words}], thinking=False)
    )
    stop = frozenset(session.manifest.stop_tokens)
    request = Request(prompt=tuple(prompt), max_tokens=count, stop=stop)
    return [token for chunk in session.generate(request) for token in chunk.tokens]


def test_a_schema_that_waits_for_another_one_may_be_sent_again(
    session: Session, backend: SessionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(self: object, schema: object) -> None:
        raise CompilerBusy("another is being compiled")

    monkeypatch.setattr(type(session), "grammar", busy)
    with pytest.raises(PlanError) as caught:
        backend.prepare(PlanRequest(prompt="x", json_schema=PLAN), None)
    error = caught.value
    assert (error.code, error.field, error.retry_after_ms) == (
        "busy",
        "json_schema",
        1e3 * COMPILE_S,
    )


def test_a_plan_is_the_loops_own_tokens(session: Session, backend: SessionBackend) -> None:
    planner = LocalPlanner(backend)
    ask = PlanRequest(prompt="Pick the mug.", thinking="off", parts=("tokens", "text", "timings"))
    result = planner.plan(ask)
    assert list(result.tokens or ()) == alone(session, "Pick the mug.", 40)
    assert result.finish_reason in ("length", "stop")
    assert result.usage.output_tokens == len(result.tokens or ())
    assert result.spec
    assert result.spec.cycles == sum(result.spec.accept_hist) > 0


def test_a_drawn_plan_comes_again_from_the_seed_that_it_reports(backend: SessionBackend) -> None:
    planner = LocalPlanner(backend)
    ask = PlanRequest(
        prompt="Pick the mug.", thinking="off", temperature=1.0, top_k=50, max_tokens=24,
        parts=("tokens",),
    )  # fmt: skip
    first, other = planner.plan(ask), planner.plan(ask)
    assert first.tokens != other.tokens
    assert first.seed is not None
    assert planner.plan(structs.replace(ask, seed=first.seed)).tokens == first.tokens
    greedy = planner.plan(structs.replace(ask, temperature=0))
    rejecting = planner.plan(structs.replace(ask, acceptance="rejection"))
    assert (greedy.seed, greedy.acceptance, first.acceptance) == (None, None, "coupled")
    assert rejecting.acceptance == "rejection"


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 2.0}, {"seed": 2**63}],
    ids=str,
)
def test_numbers_are_checked_in_a_program_s_own_process(
    backend: SessionBackend, wrong: dict[str, Any]
) -> None:
    ask = PlanRequest(**{"prompt": "x", "temperature": 1.0, **wrong})
    with pytest.raises(PlanError) as caught:
        LocalPlanner(backend).plan(ask)
    assert (caught.value.code, caught.value.field) == ("bad_request", *wrong)


def test_answer_tokens_and_thinking_are_counted_apart(backend: SessionBackend) -> None:
    planner = LocalPlanner(backend)
    result = planner.plan(
        PlanRequest(prompt="x", thinking_budget=9, max_tokens=7, parts=("thinking",))
    )
    assert result.usage.output_tokens <= 7
    assert result.usage.thinking_tokens >= 9
    assert result.thinking_closed == "hard"
    off = planner.plan(PlanRequest(prompt="x", thinking_budget=0, max_tokens=7))
    assert off.usage.thinking_tokens == 0


def test_a_schema_is_obeyed_whatever_the_weights(backend: SessionBackend) -> None:
    planner = LocalPlanner(backend)
    for budget in (0, 5):
        ask = PlanRequest(prompt="x", thinking_budget=budget, json_schema=PLAN, max_tokens=400)
        *chunks, result = planner.stream(structs.replace(ask, stream="steps"))
        assert (result.status, result.plan_valid) == ("ok", True), result
        assert SchemaValidator(read(PLAN)).valid(result.plan)
        assert [chunk.step for chunk in chunks] == result.plan["steps"]


@pytest.mark.parametrize("name", ["bt_cpp_xml", "pddl_plan", "nav2_waypoints"])
def test_a_format_is_obeyed_whatever_the_weights(
    backend: SessionBackend, name: PlanFormatName
) -> None:
    ask = PlanRequest(
        prompt="Pick the mug.", thinking="off", stream="steps", skills=skills(name),
        plan_format=name,
    )  # fmt: skip
    *chunks, result = LocalPlanner(backend).stream(ask)
    assert isinstance(result, Result)  # after 40 tokens: cut, or complete
    steps: Any = result.plan["steps"] if result.plan else []
    assert [chunk.step for chunk in chunks if isinstance(chunk, Chunk)] == steps
    assert result.plan_valid == bool(steps)
    assert result.status == ("ok" if result.finish_reason == "stop" else "partial")
    checked = backend.validate(Validate(skills=skills(name), plan_format=name))
    grows = ["number with any count" in line for line in checked["warnings"]]
    assert all(grows)
    assert bool(grows) == (name != "pddl_plan")  # whose skills have no number


@pytest.mark.parametrize(("max_tokens", "steps"), [(30, 0), (80, 1), (160, 2)])
def test_a_plan_that_ends_early_is_still_no_broken_json(
    backend: SessionBackend, max_tokens: int, steps: int
) -> None:
    ask = PlanRequest(prompt="b", thinking="off", json_schema=PLAN, max_tokens=160)
    whole = LocalPlanner(backend).plan(ask)
    result = LocalPlanner(backend).plan(structs.replace(ask, max_tokens=max_tokens))
    assert result.status == ("partial" if result.finish_reason == "length" else "ok")
    assert (result.plan["steps"] if result.plan else []) == whole.plan["steps"][:steps]
    assert result.plan_valid == bool(steps)


def test_what_cannot_be_compiled_is_refused(backend: SessionBackend) -> None:
    with pytest.raises(PlanError) as caught:
        LocalPlanner(backend).plan(PlanRequest(prompt="x", json_schema={"not": {"type": "null"}}))
    assert caught.value.code == "schema_unsupported"


Schemas = tuple[dict[str, Any], ...]
NO_PLAN: Schemas = (
    {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    {"type": ["string", "null"]},
    {"const": "x\ny"},
    {"enum": [1, ["{"]]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"const": 1}, {"type": "null"}]}}},
)


@pytest.mark.parametrize("schema", NO_PLAN, ids=str)
def test_a_schema_under_which_there_is_no_plan_is_refused(
    backend: SessionBackend, schema: dict[str, Any]
) -> None:
    # A mock has no grammar: it looks at the root of a schema alone.
    backends = (backend,) if "$ref" in schema else (backend, MockBackend(CONFIG))
    for each in backends:
        with pytest.raises(
            PlanError, match=r"json_schema must allow an object, .* \(got"
        ) as caught:
            each.prepare(PlanRequest(prompt="x", json_schema=schema), None)
        assert (caught.value.code, caught.value.field) == ("schema_unsupported", "json_schema")
        with pytest.raises(PlanError, match=r"json_schema must allow an object, .* \(got"):
            each.validate(Validate(json_schema=schema))


def test_the_context_is_used_to_its_last_token_and_no_further(backend: SessionBackend) -> None:
    limit, closing = backend.session.model.limit, len(backend.tokenizer.encode(backend._close))
    assert closing
    ask = PlanRequest(prompt="x", thinking="on", thinking_budget=9)
    used = len(backend.prepare(ask, None).prompt) + closing
    for space in (9, 8, 0):
        tight = backend.prepare(structs.replace(ask, max_tokens=limit - used - space), None)
        assert tight.thinks
        assert tight.budget == space, "thinking takes what the answer leaves"
    with pytest.raises(PlanError) as caught:
        backend.prepare(structs.replace(ask, max_tokens=limit - used + 1), None)
    assert caught.value.code == "prompt_too_long"
    plain = PlanRequest(prompt="x", thinking="off")
    used = len(backend.prepare(plain, None).prompt)
    assert backend.prepare(structs.replace(plain, max_tokens=limit - used), None).budget == 0
    with pytest.raises(PlanError, match=f"<= {limit}"):
        backend.prepare(structs.replace(plain, max_tokens=limit - used + 1), None)


def test_cancelling_leaves_the_next_plan_as_it_was(backend: SessionBackend) -> None:
    ask = PlanRequest(prompt="Pick the mug.", thinking_budget=8, parts=("tokens",))
    whole = LocalPlanner(backend).plan(ask).tokens
    for stop_after in (0, 1, 2, 5):
        steps = 0

        def stopped(after: int = stop_after) -> Any:
            nonlocal steps
            steps += 1
            return "cancelled" if steps > after else None

        run = backend.start(backend.prepare(ask, None), None)
        *_, result = drive(run, stopped=stopped)
        assert result.finish_reason == "cancelled"
        assert (result.tokens or ()) == (whole or ())[: len(result.tokens or ())]
        assert LocalPlanner(backend).plan(ask).tokens == whole


def test_a_pinned_prefix_saves_reading_and_changes_nothing(backend: SessionBackend) -> None:
    planner = LocalPlanner(backend)
    chat = (Message(role="system", content=SYSTEM), Message(role="user", content="Pick the mug."))
    ask = PlanRequest(messages=chat, thinking_budget=4, parts=("tokens",))
    cold = planner.plan(ask)
    put = backend.pin(PrefixPut(prefix_id="arm", system=SYSTEM), lambda: False)
    assert put["tokens"] > put["held"] > 0
    prepared = backend.prepare(ask, None)
    assert prepared.cached == put["held"]
    new = len(prepared.prompt) - put["held"]
    assert prepared.min_ms == backend.rates.min_ms(new, 40, whole=False), "deadlines know of it"
    assert prepared.min_ms < backend.rates.min_ms(len(prepared.prompt), 40, whole=False)
    warm = planner.plan(ask)
    named = planner.plan(structs.replace(ask, prefix_id="arm"))
    assert cold.usage.cached_tokens == 0
    assert warm.usage.cached_tokens == named.usage.cached_tokens == put["held"]
    assert warm.tokens == named.tokens == cold.tokens
    for wrong in (
        PlanRequest(prompt="x", prefix_id="arm"),
        PlanRequest(prompt="x", prefix_id="leg"),
    ):
        with pytest.raises(PlanError) as caught:
            planner.plan(wrong)
        assert caught.value.field == "prefix_id"
    assert backend.drop("arm")
    assert not backend.drop("arm")
    assert planner.plan(ask).usage.cached_tokens == 0


@pytest.mark.parametrize("mock", [False, True], ids=["live", "mock"])
def test_a_prefix_insisted_on_that_is_dropped_while_the_plan_waits_is_refused(
    backend: SessionBackend, mock: bool
) -> None:
    it: Backend = MockBackend(CONFIG) if mock else backend
    it.pin(PrefixPut(prefix_id="arm", system=SYSTEM), lambda: False)
    chat = (Message(role="system", content=SYSTEM), Message(role="user", content="x"))
    automatic = it.prepare(PlanRequest(messages=chat, max_tokens=4), None)
    insists = it.prepare(PlanRequest(messages=chat, max_tokens=4, prefix_id="arm"), None)
    it.start(insists, None).close()
    assert it.drop("arm")
    with pytest.raises(PlanError, match="was dropped before its put was answered"):
        it.keep(PrefixPut(prefix_id="arm", system=SYSTEM))
    it.start(automatic, None).close()
    with pytest.raises(
        PlanError, match=r"prefix_id must be a pinned prefix \(got \"arm\"\)"
    ) as caught:
        it.start(insists, None)
    assert (caught.value.code, caught.value.field) == ("bad_request", "prefix_id")


def test_thinking_is_cut_to_what_the_deadline_leaves(backend: SessionBackend) -> None:
    backend.rates.cycle_ms, backend.rates.step_ms = 1.0, {64: 1.0}
    ask = PlanRequest(prompt="x", thinking="on", thinking_budget=120, max_tokens=20)
    prepared = backend.prepare(ask, 60.0)
    assert prepared.thinks
    space = backend.rates.thinking_tokens_left(60.0, len(prepared.prompt), 20)
    run = backend.start(prepared, 60.0)
    *_, result = drive(run)
    *_, free = drive(backend.start(prepared, None))
    assert 0 < space <= result.usage.thinking_tokens < free.usage.thinking_tokens
    assert result.thinking_closed == "hard"
    auto = structs.replace(ask, thinking="auto", thinking_budget=None)
    assert backend.prepare(auto, None).budget == 24
    assert not backend.prepare(auto, 30.0).thinks, "no time to think"


def paths(value: Any, at: str = "") -> set[str]:
    """The paths of all fields of a reply, also of inner ones; of an error's code, its value."""
    if at == ".code":
        return {str(value)}
    if at in (".plan", ".model.quantisation"):
        return {at}  # its fields depend on the plan or on the package's tensors
    if isinstance(value, list):
        return {at}.union(*(paths(item, f"{at}[]") for item in value))
    if not isinstance(value, dict):
        return {at}
    return {at}.union(*(paths(item, f"{at}.{name}") for name, item in value.items()))


REQUESTS: tuple[dict[str, Any], ...] = (
    {"op": "plan", "prompt": "x", "max_tokens": 30, "thinking_budget": 4, "json_schema": PLAN},
    {"op": "plan", "prompt": "x", "max_tokens": 0},
    {"op": "plan", "prompt": "x", "max_tokens": 1 << 20},
    {"op": "plan", "prompt": "x", "prefix_id": "leg"},
    {"op": "cancel", "target": "x"},
    {"op": "validate"},
    {"op": "validate", "prompt": "x"},
    {"op": "validate", "messages": [{"role": "user", "content": "x"}]},
    {"op": "validate", "json_schema": PLAN},
    {"op": "validate", "json_schema": {"type": "array"}},
    {"op": "validate", "skills": DOMAIN, "plan_format": "pddl_plan"},
    {"op": "validate", "skills": DOMAIN, "plan_format": "nav2_waypoints"},
    {"op": "session.drop", "session": "x"},
    {"op": "prefix.put", "prefix_id": "arm", "system": SYSTEM},
    {"op": "prefix.list"},
    {"op": "prefix.drop", "prefix_id": "arm"},
    *({"op": op} for op in ("hello", "ping", "health", "stats", "drain", "shutdown")),
)


def test_a_mock_answers_with_the_fields_of_a_live_server(
    session: Session, house: Any, tmp_path: Path
) -> None:
    assert {request["op"] for request in REQUESTS} == codec.OPERATIONS.keys()
    reported: list[list[set[str]]] = []
    for name, backend in (("live", Lent(session, CONFIG)), ("mock", MockBackend(CONFIG))):
        server = house.serve(backend, bind=(f"ipc://{tmp_path}/{name}",), allow_admin=True)
        peer = house.peer(server)
        reported.append([paths(peer.ask(id="a", **request)) for request in REQUESTS])
    for request, live, mock in zip(REQUESTS, *reported, strict=True):
        assert live == mock, request
