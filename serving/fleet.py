"""Several plan servers as one: the least busy one that is ready gets the next request.

Plans of one session go where it has some already, because only their own server knows which of them
is the newest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

from thor_dflash.errors import Code, PlanError
from thor_dflash.serve_config import GatewayConfig
from thor_dflash.serving import replies, security, wire
from thor_dflash.serving.aclient import AsyncPlanner
from thor_dflash.serving.replies import Options

SOON_S = 0.8
"""For the answers of all servers: who probes a gateway gives up after a second, as a rule."""
LOOK_S = 1.0
"""Between two looks at every server's health."""
ELSEWHERE: frozenset[Code] = frozenset({"busy", "not_ready", "draining", "unreachable"})
"""Refusals that another server may not have."""


@dataclass(slots=True)
class Member:
    """One server."""

    endpoint: str
    planner: AsyncPlanner
    ready: bool = False
    model: str = ""
    active: int = 0
    """Plans of this gateway."""
    prefixes: frozenset[str] = frozenset()
    """Names of what is pinned there, a look old."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])


@dataclass(slots=True, eq=False)
class _Turn:
    """A plan that is under way."""

    ask: wire.Ask
    model: str
    """The only one that will do; "" for any."""
    began: float
    """Monotonic, s."""
    member: Member | None = None
    """That has it, or is asked."""
    late: bool = False
    """A later plan of its session has come since."""


Said = tuple[Member, wire.Event]
"""By whom, and what."""


class Fleet:
    """The servers behind a gateway."""

    def __init__(self, config: GatewayConfig) -> None:
        """Begin to connect to all. An event loop must run."""
        options = _options(config)
        self._turns: list[_Turn] = []
        self.members = [
            Member(endpoint, AsyncPlanner(endpoint, options)) for endpoint in config.servers
        ]
        for member in self.members:
            member.tasks.append(asyncio.create_task(_look_after(member)))

    async def knows(self, model: str) -> bool:
        """Whether a server has a model, ready or not.

        Raises:
            PlanError: none of those that were met has it, and why another one was not met.
        """
        strange = [member for member in self.members if not member.model]
        if strange and all(member.model != model for member in self.members):
            met = await asyncio.gather(*(_meet(member) for member in strange))
            errors = [e for e in met if e is not None]
            if errors and all(member.model != model for member in self.members):
                raise max(errors, key=_says)
        return any(member.model == model for member in self.members)

    async def stream(self, ask: wire.Ask, model: str = "") -> AsyncGenerator[Said]:
        """Answer an ask by whichever server of a model takes it; of any, where none is named.

        Raises:
            PlanError: no server did; what the first that was there said, or that time is up.
        """
        turn = _Turn(ask, model, time.monotonic())
        for other in self._others(turn):
            other.late = True
        self._turns.append(turn)
        try:
            member, first, events = await self._take(turn)
            try:
                if not member.model:  # no look has met it yet
                    await _meet(member)
                yield member, first
                async for event in events:
                    yield member, event
            finally:
                await events.aclose()
        finally:
            self._turns.remove(turn)

    async def _take(self, turn: _Turn) -> tuple[Member, wire.Event, AsyncGenerator[wire.Event]]:
        """Who has taken it, the first event and the rest."""
        error: PlanError | None = None
        left = [member for member in self.members if turn.model in ("", member.model)]
        while left:
            # Anew for each try: where the session has its plans may have changed meanwhile.
            member = turn.member = min(left, key=lambda member: self._rank(member, turn))
            left.remove(member)
            events = _of(member, replies.rest(turn.ask, turn.began))
            try:
                return member, await anext(events), events
            except PlanError as e:
                self._check_elsewhere(e, turn)
                error = e if error is None else max(error, e, key=_says)  # of equals the first
        raise error or PlanError("unreachable", "a plan server must be ready (got none)")

    def _others(self, turn: _Turn) -> list[_Turn]:
        """Plans of its session."""
        session = turn.ask.session
        return [
            other
            for other in self._turns
            if session is not None and other.ask.session == session and other is not turn
        ]

    def _at_home(self, member: Member | None, turn: _Turn) -> bool:
        return any(other.member is member for other in self._others(turn))

    def _rank(self, member: Member, turn: _Turn) -> tuple[bool, bool, bool, int]:
        """Whom to ask first: the least."""
        prefix = turn.ask.prefix_id
        return (
            # Ready or not: an older plan is displaced there or nowhere.
            not self._at_home(member, turn),
            # Those not known to be ready come last, not never: health is a second old.
            not member.ready,
            prefix is not None and prefix not in member.prefixes,
            member.active,
        )

    def _check_elsewhere(self, e: PlanError, turn: _Turn) -> None:
        """Raise what is to be answered where no other server is to be asked after a refusal."""
        if e.code not in ELSEWHERE and not _no_prefix(e):
            raise e
        if turn.late:
            # Asked again, here or by its client, it would displace that one.
            raise PlanError("preempted", "a later plan of its session arrived") from e
        if e.code == "busy" and self._at_home(turn.member, turn):
            raise e  # taken elsewhere, it would displace none of those

    def models(self) -> list[str]:
        """Names of the models of servers that take plans, each once."""
        return sorted({member.model for member in self.members if member.ready})

    async def everywhere(self, op: str) -> list[tuple[Member, dict[str, Any] | None]]:
        """A control operation's answer of every server, None of one that does not answer soon."""
        answers = await asyncio.gather(*(_soon(member, op) for member in self.members))
        return list(zip(self.members, answers, strict=True))

    async def close(self) -> None:
        """Close every connection."""
        tasks = [task for member in self.members for task in member.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Together: a plan that one lets go must not be taken to the next.
        await asyncio.gather(*(member.planner.close() for member in self.members))


def check(config: GatewayConfig) -> None:
    """Refuse servers that no connection can be begun to, before there is an event loop.

    Raises:
        ConfigError: a malformed endpoint, or keys or a secret that cannot be read.
    """
    for endpoint in config.servers:
        replies.check(endpoint, _options(config), "gateway.servers")


def _options(config: GatewayConfig) -> Options:
    # One try each: what one server refuses, the next one may take.
    token = security.read_token(config.token_file)
    return Options(
        keys=config.keys,
        token=token,
        retries=0,
        timeout_s=2.0,
        plan_timeout_s=config.plan_timeout_s,
    )


def _no_prefix(e: PlanError) -> bool:
    return e.code == "bad_request" and e.field == "prefix_id"


def _says(e: PlanError) -> int:
    """How much a refusal says: when to come again, what to ask for, or, of one that is not there,
    nothing.
    """
    return 0 if e.code == "unreachable" else 1 if _no_prefix(e) else 2


async def _of(member: Member, ask: wire.Ask) -> AsyncGenerator[wire.Event]:
    member.active += 1
    events = member.planner.stream(ask)
    try:
        async for event in events:
            yield event
    finally:
        member.active -= 1
        if isinstance(events, AsyncGenerator):
            await events.aclose()


async def _simple(member: Member, op: str) -> dict[str, Any] | None:
    try:
        return await member.planner.simple(op)
    except PlanError:
        return None


async def _soon(member: Member, op: str) -> dict[str, Any] | None:
    try:
        async with asyncio.timeout(SOON_S):
            return await _simple(member, op)
    except TimeoutError:
        return None


async def _look_after(member: Member) -> None:
    while True:
        health = await _simple(member, "health")
        ready = bool(health and health["ready"])
        # Asked again of one that was away: it may have come back as another.
        member.ready = ready and (member.ready or await _meet(member) is None)
        if ready and (found := await _simple(member, "prefix.list")) is not None:
            member.prefixes = frozenset(prefix["prefix_id"] for prefix in found["prefixes"])
        await asyncio.sleep(LOOK_S)


async def _meet(member: Member) -> PlanError | None:
    """Learn what serves there and what it takes; why that was not told, if it was not."""
    try:
        async with asyncio.timeout(SOON_S):
            hello = await member.planner.simple("hello")
    except TimeoutError:
        text = f"{member.endpoint} must say what it serves (got nothing in {SOON_S:g} s)"
        return PlanError("unreachable", text)
    except PlanError as e:
        return e
    if hello["model"] is None:
        return PlanError("not_ready", f"{member.endpoint} must be ready (got one that starts)")
    member.model = hello["model"]["model"]
    largest = hello["limits"]["max_message"]
    member.planner.options = replace(member.planner.options, max_message=largest)
    return None
