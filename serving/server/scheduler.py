"""The scheduler: a bounded queue where the latest plan of a session wins. Bookkeeping only, used by
one thread.

A job is in the table from its arrival until it is answered. It is answered exactly once: only
`remove` takes it out, and only the caller for whom `remove` returns True answers it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

from thor_dflash.core.errors import PlanError
from thor_dflash.core.message_text import show
from thor_dflash.serving.planner.backend import Prepared, StopReason
from thor_dflash.serving.protocol import groot, messages
from thor_dflash.serving.protocol.codec import Codec
from thor_dflash.serving.protocol.errors import bad_request

if TYPE_CHECKING:
    from thor_dflash.runtime.vision.picture import Picture

CLAIM_S = 60.0
"""How long a connection that was refused for lack of a place is remembered, so that others leave it
its share."""
MAX_CLAIMS = 256
"""Most of them; the oldest is forgotten."""
MAX_SESSIONS = 1024
"""Most sessions whose latest generation is remembered."""
REQUEST_NUMBER_BYTES = 4
"""Bytes of the request number that REQ_CORRELATE adds. A routing id made by libzmq has 5."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The sender of a request, and recipient of its answer."""

    envelope: tuple[bytes, ...]
    """The frames before the body, as received: the routing id first."""
    codec: Codec
    groot: bool = False
    """Whether it speaks the GR00T dialect."""
    fd: int = -1
    """File descriptor of the connection that the request arrived on."""
    arrived: float = 0.0
    """When the request arrived, monotonic, s."""
    key: str = ""
    """The client's public CURVE key; "" without encryption, where all clients are of one machine.
    Unlike `client`, it outlives a connection."""

    @property
    def routing(self) -> bytes:
        """The routing id of the client, or of the last proxy before this server."""
        return self.envelope[0]

    @property
    def client(self) -> tuple[bytes, ...]:
        """The identity of the client: equal for all messages of a socket, also through proxies."""
        hops = tuple(frame for frame in self.envelope if frame)
        # With REQ_CORRELATE the last frame before the empty one is the number of the request.
        counted = len(hops) > 1 and hops != self.envelope and len(hops[-1]) == REQUEST_NUMBER_BYTES
        return hops[:-1] if counted else hops

    def body(self, message: object) -> bytes:
        """Encode a message in this peer's codec and dialect."""
        return self.codec.encode(groot.answer(message) if self.groot else message)


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One plan, or one prefix to pin, from arrival to answer."""

    request: messages.PlanRequest | messages.PrefixPut
    peer: Peer
    session: str
    arrived: float
    """Monotonic, s."""
    deadline: float | None = None
    """Monotonic, s."""
    state: Literal["preparing", "queued", "running", "writing", "left"] = "preparing"
    """writing: the prefix is pinned, and the file thread writes or removes its file; the job can no
    longer be stopped."""
    pictures: Mapping[str, Picture] | None = None
    """Its images, once an image thread has read them."""
    prepared: Prepared | None = None
    stop: StopReason | None = None
    """Why to end early. Written by the I/O thread, read by the engine thread at every step."""
    seq: int = 0
    """Number of chunks sent."""
    instead_of: Job | None = None
    """The job in a full queue that this one is to displace. While this job is being checked, no
    other new job may claim that place."""
    gone: bool = False
    """The client has disconnected; no answer is sent."""

    @property
    def priority(self) -> int:
        """9 is the most urgent."""
        return self.request.priority if isinstance(self.request, messages.PlanRequest) else 5

    @property
    def generation(self) -> int | None:
        """The generation (state of the world) that the plan was requested for."""
        return self.request.generation if isinstance(self.request, messages.PlanRequest) else None


def job_of(peer: Peer, request: messages.PlanRequest | messages.PrefixPut) -> Job:
    """Make a job of a request of a peer."""
    named = request.session if isinstance(request, messages.PlanRequest) else None
    ms = request.deadline_ms if isinstance(request, messages.PlanRequest) else None
    return Job(
        request=request,
        peer=peer,
        # Longer than the longest Id that a client may send: no session name of a client can equal
        # the default name of another peer.
        session=named or "peer:" + ":".join(hop.hex() for hop in peer.client).rjust(64, "0"),
        arrived=peer.arrived,
        deadline=None if ms is None else peer.arrived + 1e-3 * ms,
    )


class Scheduler:
    """The table of jobs: every job from its arrival to its answer."""

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._jobs: list[Job] = []
        self._latest: OrderedDict[str, int] = OrderedDict()
        self._claims: OrderedDict[bytes, tuple[Peer, int]] = OrderedDict()
        """By connection: the sender of the request that was last refused for lack of a place, and
        its priority. The latest is the last."""

    @property
    def running(self) -> Job | None:
        """The job that the engine is running."""
        return next((job for job in self._jobs if job.state == "running"), None)

    @property
    def waiting(self) -> list[Job]:
        """All jobs that the engine has yet to run, in order of arrival."""
        return [job for job in self._jobs if job.state not in ("running", "writing")]

    def __len__(self) -> int:
        return len(self._jobs)

    def jobs(self) -> list[Job]:
        """All jobs, in order of arrival."""
        return list(self._jobs)

    def arrive(self, job: Job, retry_after_ms: float) -> None:
        """Add a job that is still to be checked. Until it is accepted, it affects no other job.

        Raises:
            PlanError: stale, busy, or an id that is in use. The table is unchanged.
        """
        self._check_id(job)
        self._check_generation(job)
        self._check_puts(job, retry_after_ms)
        pending = self._pending()
        # Count as if every job being checked were accepted: then no session can fill the queue
        # with plans that displace each other. For that reason the number of jobs that one session
        # has under check (`own`) is bounded, too.
        leaving = self._leaving((job, *reversed(pending)))
        own = sum(one.session == job.session for one in pending)
        full = self._placed + 1 - len(leaving) > self._places
        if full:
            job.instead_of = self._least_urgent(job, leaving)
        if own > self._max_queue or (full and job.instead_of is None):
            self._claim(job)
            raise self._busy(retry_after_ms)
        self._check_share(job, leaving, retry_after_ms)
        self._jobs.append(job)

    def accept(self, job: Job, retry_after_ms: float) -> list[tuple[Job, PlanError]]:
        """Accept a job that passed its check. If it preempts the running job, that one is stopped.
        Returns the waiting jobs that it displaces, each with its answer.

        Raises:
            PlanError: stale; or busy, if the job it was to displace has left and others have taken
                the place. The table is unchanged.
        """
        self._check_generation(job)
        job.instead_of = None
        out = self._displaced(job)
        leaving = self._leaving((job,))
        # Jobs still being checked may yet be refused: they hold no place and have none to give up.
        leaving.update(self._pending())
        if self._placed - len(leaving) >= self._places:
            other = self._least_urgent(job, leaving)
            if other is None:
                self._claim(job)
                raise self._busy(retry_after_ms)
            text = "a more urgent plan took its place in a full queue"
            out.append((other, PlanError("preempted", text)))
        self._remember(job)
        running = self.running
        if running and self._preempts(job, running):
            running.stop = running.stop or "preempted"
        return out

    @property
    def _places(self) -> int:
        """The most jobs with a place: those that may wait, and one that runs or is about to."""
        return self._max_queue + 1

    @property
    def _placed(self) -> int:
        """How many jobs have a place: the engine is free while prefixes wait for the disk."""
        return sum(one.state != "writing" for one in self._jobs)

    def _busy(self, retry_after_ms: float) -> PlanError:
        return PlanError(
            "busy", f"waiting plans must be <= {self._max_queue} (got one more: the queue is full)",
            retry_after_ms=retry_after_ms,
        )  # fmt: skip

    def _pending(self) -> list[Job]:
        return [one for one in self._jobs if one.state == "preparing"]

    def _leaving(self, comers: Iterable[Job]) -> set[Job]:
        """Return the jobs that leave if `comers`, given newest first, are accepted."""
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
        """Return the least urgent waiting plan that `job` may displace, the newest among equals."""
        if not isinstance(job.request, messages.PlanRequest) or job.request.preempt != "lower":
            return None
        lower = [
            one
            for one in reversed(self.waiting)
            if isinstance(one.request, messages.PlanRequest)
            and one.priority < job.priority
            and one not in leaving
        ]
        return min(lower, key=lambda one: one.priority, default=None)

    def _claim(self, job: Job) -> None:
        self._claims.pop(job.peer.routing, None)
        self._claims[job.peer.routing] = job.peer, job.priority
        if len(self._claims) > MAX_CLAIMS:
            self._claims.popitem(last=False)

    def forget(self, matches: Callable[[Peer], bool]) -> None:
        """Forget which of the matching peers were refused for lack of a place: they are gone."""
        for routing, (peer, _) in list(self._claims.items()):
            if matches(peer):
                del self._claims[routing]

    def _check_share(self, job: Job, leaving: Container[Job], retry_after_ms: float) -> None:
        """Refuse a connection its job beyond its share of the places, as long as others that are as
        urgent were refused lately. By connection: a client can send any number of sessions, and of
        envelopes as if through proxies.
        """
        own = job.peer.routing
        claiming = {
            routing
            for routing, (peer, priority) in self._claims.items()
            if routing != own and peer.arrived > job.arrived - CLAIM_S and priority >= job.priority
        }
        if not claiming:
            return
        placed = [one for one in self._jobs if one.state != "writing" and one not in leaving]
        held = sum(one.peer.routing == own and one is not job.instead_of for one in placed)
        holding = {one.peer.routing for one in placed if one.priority >= job.priority}
        share = max(1, self._places // len(claiming | holding | {own}))
        if held >= share:
            text = f"plans of one client must be <= {share} while others wait for a place"
            raise PlanError("busy", f"{text} (got one more)", retry_after_ms=retry_after_ms)

    def _check_id(self, job: Job) -> None:
        for other in self._jobs:
            if other.peer.client == job.peer.client and other.request.id == job.request.id:
                shown = show(job.request.id)
                text = f"id must not be that of a request under way (got {shown})"
                raise bad_request(text, "id")

    def _check_puts(self, job: Job, retry_after_ms: float) -> None:
        if isinstance(job.request, messages.PlanRequest):
            return
        puts = sum(isinstance(one.request, messages.PrefixPut) for one in self._jobs)
        if puts >= self._places:
            raise PlanError(
                "busy", f"prefix.put requests under way must be <= {self._places} (got one more)",
                retry_after_ms=retry_after_ms,
            )  # fmt: skip

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
        if len(self._latest) > MAX_SESSIONS:
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
                old.session == job.session
                and self._same(job)
                and isinstance(old.request, messages.PlanRequest)
            ):
                out.append((old, PlanError("preempted", "a later plan of its session arrived")))
        return out

    @staticmethod
    def _same(job: Job) -> bool:
        return isinstance(job.request, messages.PlanRequest) and job.request.preempt != "none"

    def _preempts(self, job: Job, running: Job) -> bool:
        if not isinstance(job.request, messages.PlanRequest) or not isinstance(
            running.request, messages.PlanRequest
        ):
            return False
        if self._same(job) and running.session == job.session:
            return True
        return job.request.preempt == "lower" and running.priority < job.priority

    def next(self) -> Job | None:
        """Return the job to run now if the engine is free: the most urgent, then the oldest.
        Waiting does not raise a job's priority; a deadline bounds the wait instead. The order of a
        session's jobs holds: while images of one are decoded, those behind it wait.
        """
        if self.running:
            return None
        ready = [job for job in self._jobs if job.state == "queued" and not self._behind(job)]
        # max returns the first of equals, and jobs are in order of arrival.
        return max(ready, key=lambda job: job.priority, default=None)

    def _behind(self, job: Job) -> bool:
        """Whether an older job of its session, as urgent, is still being checked."""
        older = takewhile(lambda other: other is not job, self._jobs)
        return any(
            one.state == "preparing" and one.session == job.session and one.priority >= job.priority
            for one in older
        )

    def remove(self, job: Job) -> bool:
        """Remove a job. Returns whether it was still in the table."""
        if job.state == "left":
            return False
        self._jobs.remove(job)
        job.state = "left"
        return True

    def expired(self, now: float) -> list[Job]:
        """Return the waiting jobs whose deadline has passed."""
        return [job for job in self.waiting if job.deadline is not None and job.deadline <= now]

    def first_deadline(self) -> float | None:
        """Return the earliest deadline of the waiting jobs, monotonic, s."""
        return min((job.deadline for job in self.waiting if job.deadline is not None), default=None)

    def find(self, target: str, peer: Peer, session: str | None) -> Job | None:
        """Find a job by its id among those of this client and of the given session. Clients may
        use the same ids: a job of that session goes first, and among those the client's own.
        """

        def fits(job: Job) -> tuple[bool, bool]:
            return job.session == session, job.peer.client == peer.client

        found = [job for job in self._jobs if job.request.id == target and any(fits(job))]
        return max(found, key=fits, default=None)
