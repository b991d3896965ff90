"""Several plan servers as one: the least busy one that is ready gets the next request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
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
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])


class Fleet:
    """The servers behind a gateway."""

    def __init__(self, config: GatewayConfig) -> None:
        """Begin to connect to all. An event loop must run."""
        options = _options(config)
        self.members = [
            Member(endpoint, AsyncPlanner(endpoint, options)) for endpoint in config.servers
        ]
        for member in self.members:
            member.tasks.append(asyncio.create_task(_look_after(member)))

    async def stream(self, ask: wire.Ask) -> AsyncIterator[wire.Event]:
        """Answer an ask by whichever server takes it.

        Raises:
            PlanError: no server did; what the first that was there said, or that time is up.
        """
        began = time.monotonic()
        error = PlanError("unreachable", "a plan server must be ready (got none)")
        for member in self._order():
            events = _of(member, replies.rest(ask, began))
            try:
                first = await anext(events)
            except PlanError as e:
                if e.code not in ELSEWHERE:
                    raise
                # A refusal says when to come again; that another is not there says nothing.
                error = e if error.code == "unreachable" else error
                continue
            try:
                yield first
                async for event in events:
                    yield event
            finally:
                await events.aclose()
            return
        raise error

    def _order(self) -> list[Member]:
        # Those not known to be ready come last, not never: health is a second old.
        return sorted(self.members, key=lambda member: (not member.ready, member.active))

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
    return Options(keys=config.keys, token=token, retries=0, timeout_s=2.0)


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
        member.ready = ready and (member.ready or await _meet(member))
        await asyncio.sleep(LOOK_S)


async def _meet(member: Member) -> bool:
    """Learn what serves there and what it takes; whether that was told."""
    hello = await _simple(member, "hello")
    if hello is None or hello["model"] is None:
        return False
    member.model = hello["model"]["model"]
    largest = hello["limits"]["max_message"]
    member.planner.options = replace(member.planner.options, max_message=largest)
    return True
