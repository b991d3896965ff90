"""Both clients offer the same, and plans that name no session leave each other alone."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.client import AsyncPlanner, Options, PlanRequest, RemotePlanner


def public(kind: type) -> dict[str, Callable[..., Any]]:
    """The public methods of a class by name."""
    return {name: value for name, value in vars(kind).items() if not name.startswith("_")}


def test_both_clients_have_the_same_methods() -> None:
    ours, others = public(RemotePlanner), public(AsyncPlanner)
    assert ours.keys() == others.keys()
    for name, method in ours.items():
        one, other = inspect.signature(method), inspect.signature(others[name])
        assert one.parameters == other.parameters, name
        if name != "stream":
            assert one.return_annotation == other.return_annotation, name
            assert inspect.iscoroutinefunction(others[name]), name


ANSWERS: dict[str, tuple[Any, ...]] = {
    "ping": (), "hello": (), "health": (), "stats": (), "prefixes": (), "skipped": (),
    "cancel": ("nothing",), "drop_prefix": ("nothing",), "drop_session": ("x",),
    "put_prefix": ("p", "You plan."),
}  # fmt: skip


def test_both_clients_get_the_same_answers(house: Any) -> None:
    endpoint = house.mock().endpoints[0]

    async def asked() -> dict[str, Any]:
        async with AsyncPlanner(endpoint) as planner:
            return {name: await getattr(planner, name)(*args) for name, args in ANSWERS.items()}

    with RemotePlanner(endpoint) as planner:
        for name, answer in asyncio.run(asked()).items():
            other = getattr(planner, name)(*ANSWERS[name])
            assert type(other) is type(answer), name
            if isinstance(answer, dict):
                assert other.keys() == answer.keys(), name


async def plans(endpoint: str, options: Options | None = None) -> list[str]:
    """How three plans end that one client requests at once."""
    async with AsyncPlanner(endpoint, options) as planner:
        asked = [planner.plan(PlanRequest(prompt=text)) for text in ("a", "b", "c")]
        found = await asyncio.gather(*asked, return_exceptions=True)
    return [one.code if isinstance(one, PlanError) else one.status for one in found]  # type: ignore[union-attr]


def test_plans_at_once_displace_each_other_only_in_a_session(house: Any) -> None:
    endpoint = house.mock(0.005).endpoints[0]
    assert asyncio.run(plans(endpoint)) == ["ok"] * 3
    assert asyncio.run(plans(endpoint, Options(session="arm")))[:2] == ["preempted"] * 2


@pytest.mark.parametrize("session", [None, "arm"])
def test_a_stream_is_cancelled_by_its_id(house: Any, session: str | None) -> None:
    server, held = house.held()
    held.let(3)
    with RemotePlanner(server.endpoints[0], Options(session=session)) as planner:
        stream = planner.stream(PlanRequest(prompt="x", stream="all"))
        id = next(stream).id
        assert id is not None
        assert not planner.cancel("another")
        assert planner.cancel(id)
        held.let()
        with pytest.raises(PlanError) as caught:
            list(stream)
    assert caught.value.code == "cancelled"


def test_an_error_shows_its_code() -> None:
    error = PlanError("deadline_infeasible", "too short", min_ms=80)
    assert repr(error) == "PlanError('deadline_infeasible', 'too short', min_ms=80)"
