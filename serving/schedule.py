"""Who is served next: a bounded queue, latest wins per session. Pure bookkeeping, one thread.

A job is in the books from its arrival until it is answered; it is answered exactly once because
only `leave` takes it out, and only who takes it out answers it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from thor_dflash.errors import PlanError
from thor_dflash.serving import groot, wire
from thor_dflash.serving.backend import Prepared, Stop
from thor_dflash.serving.codec import Codec

SESSIONS = 1024
"""Sessions whose latest generation is remembered."""
CORRELATED = 4
"""Bytes of the number that REQ_CORRELATE adds to a request. A routing id of libzmq has 5."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Where an answer goes."""

    envelope: tuple[bytes, ...]
    """The frames before the body, as they came: the routing id first."""
    codec: Codec
    groot: bool = False
    """It speaks the GR00T dialect."""
    fd: int = -1
    """The connection it came by."""

    @property
    def routing(self) -> bytes:
        """The routing id: of the client, or of the proxy before it."""
        return self.envelope[0]

    @property
    def client(self) -> tuple[bytes, ...]:
        """Who it is: the same for every message of one socket, behind whatever proxies."""
        hops = tuple(frame for frame in self.envelope if frame)
        # With REQ_CORRELATE the last frame before the empty one is a number of the request.
        counted = len(hops) > 1 and hops != self.envelope and len(hops[-1]) == CORRELATED
        return hops[:-1] if counted else hops

    def body(self, message: object) -> bytes:
        """A message as this peer reads it."""
        return self.codec.encode(groot.answer(message) if self.groot else message)


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One plan, or one prefix to pin, from arrival to answer."""

    request: wire.Ask | wire.PrefixPut
    peer: Peer
    session: str
    arrived: float
    """Monotonic, s."""
    deadline: float | None = None
    """Monotonic, s."""
    state: Literal["preparing", "queued", "running", "keeping", "left"] = "preparing"
    """keeping: a prefix is pinned, and the keeper sees to its file. Nothing stops it any more."""
    prepared: Prepared | None = None
    stop: Stop | None = None
    """Why to end early. Written by the I/O thread, read by the engine thread at every step."""
    seq: int = 0
    """Chunks sent."""
    instead_of: Job | None = None
    """Of a full queue: while this one is checked, no other counts on its place."""
    gone: bool = False
    """Nobody is there to hear the answer."""

    @property
    def priority(self) -> int:
        """9 is the most urgent."""
        return self.request.priority if isinstance(self.request, wire.Ask) else 5

    @property
    def generation(self) -> int | None:
        """State of the world it was asked in."""
        return self.request.generation if isinstance(self.request, wire.Ask) else None


def job_of(peer: Peer, request: wire.Ask | wire.PrefixPut, now: float) -> Job:
    """A request that arrived at `now` (monotonic, s) as a job."""
    named = request.session if isinstance(request, wire.Ask) else None
    ms = request.deadline_ms if isinstance(request, wire.Ask) else None
    return Job(
        request=request,
        peer=peer,
        # Longer than an Id may be where the name is of the wire: no session can take a peer's.
        session=named or "peer:" + ":".join(hop.hex() for hop in peer.client).rjust(64, "0"),
        arrived=now,
        deadline=None if ms is None else now + 1e-3 * ms,
    )


class Schedule:
    """The jobs in the house."""

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._jobs: list[Job] = []
        self._latest: OrderedDict[str, int] = OrderedDict()

    @property
    def running(self) -> Job | None:
        """The job the engine has."""
        return next((job for job in self._jobs if job.state == "running"), None)

    @property
    def waiting(self) -> list[Job]:
        """Jobs before their turn, in order of arrival."""
        return [job for job in self._jobs if job.state != "running"]

    def __len__(self) -> int:
        return len(self._jobs)

    def jobs(self) -> list[Job]:
        """All of them, in order of arrival."""
        return list(self._jobs)

    def arrive(self, job: Job, retry_after_ms: float) -> None:
        """Take a job in, to be checked. The others go on as if it had not come.

        Raises:
            PlanError: stale, busy, or an id that is in use. Nothing has changed.
        """
        self._check_id(job)
        self._check_generation(job)
        pending = self._pending()
        # Counted as if all that is being checked were accepted: no session takes others' room by
        # plans that displace each other. So those that a session has under check are bounded, too.
        leaving = self._leaving((job, *reversed(pending)))
        own = sum(one.session == job.session for one in pending)
        full = len(self._jobs) + 1 - len(leaving) > self._room
        if full:
            job.instead_of = self._least_urgent(job, leaving)
        if own > self._max_queue or (full and job.instead_of is None):
            raise self._busy(retry_after_ms)
        self._jobs.append(job)

    def accept(self, job: Job, retry_after_ms: float) -> list[tuple[Job, PlanError]]:
        """A job was found fit, and others make way for it: the running one is told to stop. Gives
        the waiting ones it displaces, each with its answer.

        Raises:
            PlanError: stale, or busy, where who would have made way is no longer there and others
                took the room. Nothing has changed.
        """
        self._check_generation(job)
        job.instead_of = None
        out = self._displaced(job)
        leaving = self._leaving((job,))
        # Those still under check may be refused: they take nobody's place, and have none to give.
        leaving.update(self._pending())
        if len(self._jobs) - len(leaving) >= self._room:
            other = self._least_urgent(job, leaving)
            if other is None:
                raise self._busy(retry_after_ms)
            text = "a more urgent plan took its place in a full queue"
            out.append((other, PlanError("preempted", text)))
        self._remember(job)
        running = self.running
        if running and self._preempts(job, running):
            running.stop = running.stop or "preempted"
        return out

    @property
    def _room(self) -> int:
        """One more than may wait: the one that runs, or is on its way to a free engine."""
        return self._max_queue + 1

    def _busy(self, retry_after_ms: float) -> PlanError:
        return PlanError(
            "busy", f"plans that wait must be <= {self._max_queue} (got as many)",
            retry_after_ms=retry_after_ms,
        )  # fmt: skip

    def _pending(self) -> list[Job]:
        return [one for one in self._jobs if one.state == "preparing"]

    def _leaving(self, comers: Iterable[Job]) -> set[Job]:
        """Who will be gone once these are accepted, the latest first."""
        found: set[Job] = set()
        running, waiting = self.running, self.waiting
        for one in comers:
            if one in found:
                continue
            found |= {old for old, _ in self._displaced(one)}
            if running and (running.stop or self._preempts(one, running)):
                found.add(running)
            if one.instead_of in waiting:
                found.add(one.instead_of)
        return found

    def _least_urgent(self, job: Job, leaving: Container[Job]) -> Job | None:
        """Of the plans that wait and that a job may displace; of equals the newest."""
        if not isinstance(job.request, wire.Ask) or job.request.preempt != "lower":
            return None
        lower = [
            one
            for one in reversed(self.waiting)
            if isinstance(one.request, wire.Ask)
            and one.priority < job.priority
            and one not in leaving
        ]
        return min(lower, key=lambda one: one.priority, default=None)

    def _check_id(self, job: Job) -> None:
        for other in self._jobs:
            if other.peer.client == job.peer.client and other.request.id == job.request.id:
                shown = job.request.id
                raise PlanError("bad_request", f"id must not be in use (got {shown})", field="id")

    def _check_generation(self, job: Job) -> None:
        if job.generation is None:
            return
        latest = self._latest.get(job.session, job.generation)
        if job.generation < latest:
            raise PlanError(
                "stale", f"generation must be >= {latest} (got {job.generation})",
                field="generation",
            )  # fmt: skip

    def _remember(self, job: Job) -> None:
        if job.generation is None:
            return
        self._latest[job.session] = job.generation
        self._latest.move_to_end(job.session)
        if len(self._latest) > SESSIONS:
            self._latest.popitem(last=False)

    def _displaced(self, job: Job) -> list[tuple[Job, PlanError]]:
        out: list[tuple[Job, PlanError]] = []
        for old in takewhile(lambda other: other is not job, self.waiting):
            older = None not in (job.generation, old.generation) and (
                (old.generation or 0) < (job.generation or 0)
            )
            if old.session == job.session and older:
                out.append((old, PlanError("stale", "a plan for a newer generation arrived")))
            elif (
                old.session == job.session and self._same(job) and isinstance(old.request, wire.Ask)
            ):
                out.append((old, PlanError("preempted", "a later plan of its session arrived")))
        return out

    @staticmethod
    def _same(job: Job) -> bool:
        return isinstance(job.request, wire.Ask) and job.request.preempt != "none"

    def _preempts(self, job: Job, running: Job) -> bool:
        if not isinstance(job.request, wire.Ask) or not isinstance(running.request, wire.Ask):
            return False
        if self._same(job) and running.session == job.session:
            return True
        return job.request.preempt == "lower" and running.priority < job.priority

    def next(self) -> Job | None:
        """The job to run now, if the engine is free: the most urgent, then the oldest. Nobody gets
        more urgent by waiting: who may wait for so long only says its deadline.
        """
        if self.running:
            return None
        ready = [job for job in self._jobs if job.state == "queued"]
        # max takes the first of equals, and jobs are in order of arrival.
        return max(ready, key=lambda job: job.priority, default=None)

    def leave(self, job: Job) -> bool:
        """Take a job out; whether it still was in."""
        if job.state == "left":
            return False
        self._jobs.remove(job)
        job.state = "left"
        return True

    def expired(self, now: float) -> list[Job]:
        """Jobs whose deadline passed before their turn."""
        return [job for job in self.waiting if job.deadline is not None and job.deadline <= now]

    def first_deadline(self) -> float | None:
        """When the next waiting job expires, monotonic s."""
        return min((job.deadline for job in self.waiting if job.deadline is not None), default=None)

    def find(self, target: str, peer: Peer, session: str | None) -> Job | None:
        """A job by its id, of this client or of the session that is named."""
        for job in self._jobs:
            mine = job.peer.client == peer.client or (
                session is not None and session == job.session
            )
            if job.request.id == target and mine:
                return job
        return None
