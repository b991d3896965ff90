"""Several plan servers as one: the least busy ready server gets the next request.

Plans of a session go to the server that already has plans of that session, because only that server
knows which of them is the newest. Turns of a conversation go to the server that had the last one,
if others are as busy: it has read the turns before.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass, field, replace
from typing import Any

from thor_dflash.config.serving import GatewayConfig
from thor_dflash.core.errors import Code, PlanError
from thor_dflash.serving.client import AsyncPlanner, LostRequest, Options, connection
from thor_dflash.serving.client.retry import with_time_left
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.transport import access

SOON_S = 0.8
"""Longest wait for the answers of all servers: health probes of a gateway usually give up after one
second."""
LOOK_S = 1.0
"""Interval of the health checks of each server."""
MAX_CONVERSATIONS = 1024
"""Most conversations whose last server is remembered."""
ELSEWHERE: frozenset[Code] = frozenset({"busy", "not_ready", "draining", "unreachable"})
"""Error codes after which another server is tried."""


@dataclass(slots=True)
class Member:
    """One server."""

    endpoint: str
    planner: AsyncPlanner
    ready: bool = False
    unsure: bool = False
    """Whether the last health check found it not ready: it may hang, or come back with another
    model."""
    model: str = ""
    active: int = 0
    """Number of this gateway's plans on it."""
    prefixes: frozenset[str] = frozenset()
    """Names of its pinned prefixes at the last health check."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])


@dataclass(slots=True, eq=False)
class _ActivePlan:
    """A plan in progress."""

    request: messages.PlanRequest
    model: str
    """The requested model; "" for any."""
    began: float
    """Monotonic, s."""
    member: Member | None = None
    """The server that has the plan or was sent it last."""
    late: bool = False
    """Whether a later plan of its session has arrived since."""


PoolEvent = tuple[Member, messages.Event]
"""A server and an event from it."""


class ServerPool:
    """The servers behind a gateway."""

    def __init__(self, config: GatewayConfig) -> None:
        """Begin to connect to all servers. An event loop must be running."""
        options = _options(config)
        self._active: list[_ActivePlan] = []
        self._readers: OrderedDict[tuple[str | None, str], Member] = OrderedDict()
        """The last server of each conversation, by scope and name; the latest is the last."""
        self.members = [
            Member(endpoint, AsyncPlanner(endpoint, options)) for endpoint in config.servers
        ]
        for member in self.members:
            member.tasks.append(asyncio.create_task(_look_after(member)))

    async def knows(self, model: str) -> bool:
        """Return whether any server has a model, ready or not.

        Raises:
            PlanError: no server whose model is known has it, and the model of another
                one is unknown; the error says why.
        """
        strange = [member for member in self.members if not member.model]
        if strange and all(member.model != model for member in self.members):
            found = await asyncio.gather(*(_error_of(_meet(member)) for member in strange))
            errors = [e for e in found if e is not None]
            if errors and all(member.model != model for member in self.members):
                raise max(errors, key=_informative)
        return any(member.model == model for member in self.members)

    async def stream(
        self, request: messages.PlanRequest, model: str = ""
    ) -> AsyncGenerator[PoolEvent]:
        """Answer a plan on the first server with this model (with any, if "") that accepts it.

        Raises:
            PlanError: no server accepted it (the most informative of their errors), the deadline
                passed, or the plan failed on its server.
        """
        plan = _ActivePlan(request, model, time.monotonic())
        for other in self._others(plan):
            other.late = True
        self._active.append(plan)
        try:
            member, first, events = await self._take(plan)
            try:
                self._remember(plan.request, member)
                if not member.model:  # no health check has learned it yet
                    await _error_of(_meet(member))
                yield member, first
                async for event in events:
                    yield member, event
            finally:
                await events.aclose()
        finally:
            self._active.remove(plan)

    async def _take(
        self, plan: _ActivePlan
    ) -> tuple[Member, messages.Event, AsyncGenerator[messages.Event]]:
        """Return the server that accepted the plan, its first event and the remaining events."""
        error: PlanError | None = None
        left = [member for member in self.members if plan.model in ("", member.model)]
        while left:
            # Rank again for each try: the session's plans may have moved meanwhile.
            member = plan.member = min(left, key=lambda member: self._rank(member, plan))
            left.remove(member)
            try:
                if member.unsure:
                    await _meet(member)
                    if plan.model not in ("", member.model):
                        continue
                events = _stream(member, with_time_left(plan.request, plan.began))
                return member, await anext(events), events
            except PlanError as e:
                self._check_elsewhere(e, plan)
                error = (
                    e if error is None else max(error, e, key=_informative)
                )  # the first of equals
        raise error or PlanError("unreachable", "a plan server must be ready (got none)")

    def _remember(self, request: messages.PlanRequest, member: Member) -> None:
        if request.conversation:
            key = request.cache_scope, request.conversation
            self._readers[key] = member
            self._readers.move_to_end(key)
            if len(self._readers) > MAX_CONVERSATIONS:
                self._readers.popitem(last=False)

    def _others(self, plan: _ActivePlan) -> list[_ActivePlan]:
        """Return the other plans of its session."""
        session = plan.request.session
        return [
            other
            for other in self._active
            if session is not None and other.request.session == session and other is not plan
        ]

    def _at_home(self, member: Member | None, plan: _ActivePlan) -> bool:
        return any(other.member is member for other in self._others(plan))

    def _rank(self, member: Member, plan: _ActivePlan) -> tuple[bool, bool, bool, int, bool]:
        """Return the sort key of a server for a plan; the least goes first."""
        prefix = plan.request.prefix_id
        conversation = plan.request.cache_scope, plan.request.conversation or ""
        return (
            # Even if not ready: only there can this plan displace an older one of its session.
            not self._at_home(member, plan),
            # Servers not known to be ready are tried last, not skipped: health is a second old.
            not member.ready,
            prefix is not None and prefix not in member.prefixes,
            member.active,
            self._readers.get(conversation) is not member,
        )

    def _check_elsewhere(self, e: PlanError, plan: _ActivePlan) -> None:
        """Raise the error to answer with, unless another server may be tried after this refusal."""
        # A request that ended its server must not end the next one.
        if isinstance(e, LostRequest) or (e.code not in ELSEWHERE and not _no_prefix(e)):
            raise e
        if plan.late:
            # Sent again, by the gateway or by its client, it would displace the later plan.
            raise PlanError("preempted", "a later plan of its session arrived") from e
        if e.code == "busy" and self._at_home(plan.member, plan):
            raise e  # on another server it could not displace the session's older plans

    def serves(self, model: str) -> bool:
        """Return whether the last known model of a server is this one, or unknown."""
        return any(member.model in ("", model) for member in self.members)

    def known(self) -> set[str]:
        """Return the last known model names of all servers."""
        return {member.model for member in self.members if member.model}

    def models(self) -> list[str]:
        """Return the model names of the ready servers, each once."""
        return sorted({member.model for member in self.members if member.ready})

    async def everywhere(self, op: str) -> list[tuple[Member, dict[str, Any] | None]]:
        """Run a control operation on every server; None for one that fails or exceeds SOON_S."""
        answers = await asyncio.gather(*(_call_or_none(member, op) for member in self.members))
        return list(zip(self.members, answers, strict=True))

    async def close(self) -> None:
        """Close every connection."""
        tasks = [task for member in self.members for task in member.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # All at once: a plan that fails on one closing server must not be sent to another.
        await asyncio.gather(*(member.planner.close() for member in self.members))


def check(config: GatewayConfig) -> None:
    """Refuse servers that cannot be connected to as configured, before an event loop exists.

    Raises:
        ConfigError: a malformed endpoint, or keys or a secret that cannot be read.
    """
    for endpoint in config.servers:
        connection.check(endpoint, _options(config), "gateway.servers")


def _options(config: GatewayConfig) -> Options:
    # No retries: after a refusal the next server is tried instead.
    token = access.read_token(config.token_file)
    return Options(
        keys=config.keys,
        token=token,
        retries=0,
        timeout_s=2.0,
        plan_timeout_s=config.plan_timeout_s,
    )


def _no_prefix(e: PlanError) -> bool:
    return e.code == "bad_request" and e.field == "prefix_id"


def _informative(e: PlanError) -> int:
    """Rank a refusal: unreachable is the least informative, a missing prefix is next."""
    return 0 if e.code == "unreachable" else 1 if _no_prefix(e) else 2


async def _stream(member: Member, request: messages.PlanRequest) -> AsyncGenerator[messages.Event]:
    member.active += 1
    events = member.planner.stream(request)
    try:
        async for event in events:
            yield event
    finally:
        member.active -= 1
        await events.aclose()


async def _call(member: Member, op: str) -> dict[str, Any]:
    """Run a control operation within SOON_S.

    Raises:
        PlanError: it failed, or took longer.
    """
    try:
        async with asyncio.timeout(SOON_S):
            return await member.planner.simple(op)
    except TimeoutError:
        text = f"{member.endpoint} must answer {op} (got nothing in {SOON_S:g} s)"
        raise PlanError("unreachable", text) from None


async def _call_or_none(member: Member, op: str) -> dict[str, Any] | None:
    try:
        return await _call(member, op)
    except PlanError:
        return None


async def _look_after(member: Member) -> None:
    while True:
        try:
            ready = bool((await member.planner.simple("health"))["ready"])
            # Each time: between two looks a server may have restarted with another model.
            if ready:
                await _meet(member)
        except PlanError:
            ready = False
        member.ready, member.unsure = ready, not ready
        await asyncio.sleep(LOOK_S)


async def _meet(member: Member) -> None:
    """Learn a server's model, its largest message and its prefixes.

    Raises:
        PlanError: it did not answer, or is still starting.
    """
    hello = await _call(member, "hello")
    if hello["model"] is None:
        text = f"{member.endpoint} must be ready (got one that is still starting)"
        raise PlanError("not_ready", text)
    member.model = hello["model"]["model"]
    member.prefixes = frozenset(prefix["prefix_id"] for prefix in hello["prefixes"])
    largest = hello["limits"]["max_message"]
    member.planner.options = replace(member.planner.options, max_message=largest)


async def _error_of(work: Awaitable[None]) -> PlanError | None:
    try:
        await work
    except PlanError as e:
        return e
    return None
