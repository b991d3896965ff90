"""Handles each request and each post (message) of the other threads. Runs on the I/O thread."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import PlanError
from thor_dflash.core.strict_records import visible
from thor_dflash.serving.planner.backend import Backend, Prepared
from thor_dflash.serving.planner.planner import admit, stopped
from thor_dflash.serving.planner.result import asked
from thor_dflash.serving.protocol import codec, groot, messages, validation
from thor_dflash.serving.protocol.codec import JSON, Head
from thor_dflash.serving.server import hello, host_info, workers
from thor_dflash.serving.server.event_log import EventLog
from thor_dflash.serving.server.lifecycle import FAILED, RETRY_MS, Lifecycle
from thor_dflash.serving.server.pending import PendingRequests
from thor_dflash.serving.server.scheduler import Job, Peer, Scheduler, job_of
from thor_dflash.serving.server.stats import Stats
from thor_dflash.serving.server.workers import (
    ChunkReady,
    FileWritten,
    JobChecked,
    JobDone,
    Log,
    PendingRequest,
    PrefixPinned,
    RequestDone,
)
from thor_dflash.serving.transport import curve
from thor_dflash.serving.transport.router_socket import ReceivedMessage, RouterSocket

ENVELOPE = 8
"""Most frames before the body: enough for any reasonable chain of proxies."""
DROPPABLE = ("text", "thinking", "progress")
"""Kinds of chunks that a slow reader may lose; steps and results are kept for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerActions:
    """The actions that the desk can trigger in the server."""

    check: Callable[[Job | PendingRequest], None]
    """Queue work for the clerk thread."""
    run: Callable[[Job], None]
    """Queue a job for the engine thread, which must be free."""
    keep: Callable[[PendingRequest | PrefixPinned], None]
    """Queue work for the keeper thread."""
    stop: Callable[[], None]
    """Drain the server and end it."""


class RequestHandlers:
    """Answers every request; owns the books (the table of jobs)."""

    def __init__(
        self,
        door: RouterSocket,
        config: ServeConfig,
        life: Lifecycle,
        hands: ServerActions,
        token: str | None,
        log: Log,
        tell: EventLog,
    ) -> None:
        self._door = door
        self._config = config
        self._life = life
        self._hands = hands
        self._token = token
        self._log = log
        self._tell = tell
        self.books = Scheduler(config.max_queue)
        self.stats = Stats()
        self._dues = PendingRequests()
        self._simple: dict[str, Callable[[Peer, str], None]] = {
            "hello": self._hello,
            "ping": lambda peer, id: self._result(peer, id, groot.RUNNING),
            "health": self._health,
            "stats": self._stats,
            "prefix.list": self._prefix_list,
            "drain": self._drain,
            "shutdown": self._shutdown,
        }

    # --- letters

    def letter(self, letter: ReceivedMessage) -> None:
        """Answer any message, also a malformed one."""
        at = next((i for i, f in enumerate(letter.frames) if i and not f), None)
        # A request without an empty delimiter frame is answered without one, too, along the same
        # hops.
        split = max(1, len(letter.frames) - 1) if at is None else at + 1
        envelope, rest = letter.frames[:split], letter.frames[split:]
        peer, head = Peer(envelope, JSON, fd=letter.fd), Head(id=None)
        try:
            if split > ENVELOPE:
                text = f"a message must have <= {ENVELOPE} frames before its body (got {split})"
                raise PlanError("bad_request", text)
            if len(rest) != 1:
                raise PlanError("bad_request", f"a message must have one body (got {len(rest)})")
            peer = dataclasses.replace(peer, codec=codec.codec_of(rest[0]))
            head = codec.head_of(peer.codec, rest[0])
            peer = dataclasses.replace(peer, groot=groot.speaks(head))
            self._request(peer, head, rest[0])
        except PlanError as e:
            self._tell("refused", id=codec.id_of(head), code=e.code)
            self._refuse(peer, codec.id_of(head), e)
        except Exception:
            self._log(traceback.format_exc())
            self._refuse(peer, codec.id_of(head), PlanError("internal", workers.UNEXPECTED))

    def _request(self, peer: Peer, head: Head, body: bytes) -> None:
        given = head.api_token if peer.groot else head.token
        if not curve.token_fits(self._token, given):
            text = "token must be the secret in the server's serve.token_file"
            raise PlanError("unauthorized", text, field="token")
        reader = groot.read if peer.groot else codec.read
        request = reader(peer.codec, body, head)
        self.stats.requests[request.op] += 1
        if isinstance(request, messages.Simple):
            self._simple[request.op](peer, request.id)
        elif isinstance(request, messages.Cancel):
            self._cancel(peer, request)
        elif isinstance(request, messages.PrefixDrop):
            self._life.open()
            self._hands.keep(self._dues.take(peer, request))
        elif isinstance(request, messages.Validate):
            self._life.open()
            validation.check_prompt(request)
            self._hands.check(self._dues.take(peer, request))
        else:
            self._work(peer, request)

    def _work(self, peer: Peer, request: messages.PlanRequest | messages.PrefixPut) -> None:
        backend = self._life.open()
        if isinstance(request, messages.PlanRequest):
            validation.check(request)
            if self._config.log_prompts:
                asked = request.prompt or request.messages
                self._log(visible(f"plan {request.id} asks: {asked}"))
        elif request.persist and not self._config.prefix_dir:
            text = "persist must be false, as the server has no serve.prefix_dir (got true)"
            raise PlanError("bad_request", text, field="persist")
        job = job_of(peer, request, time.monotonic())
        self.books.arrive(job, _retry_after(backend))
        self._tell("arrived", op=request.op, id=request.id, session=job.session)
        if isinstance(request, messages.PlanRequest):
            self._hands.check(job)
        else:
            job.state = "queued"
            self.dispatch()

    # --- operations

    def _hello(self, peer: Peer, id: str) -> None:
        self._result(peer, id, hello.server_description(self._config, self._life.backend))

    def _health(self, peer: Peer, id: str) -> None:
        running = self.books.running is not None
        waiting = len(self.books.waiting)
        self._result(peer, id, self._life.health(int(running), waiting))

    def _stats(self, peer: Peer, id: str) -> None:
        running = self.books.running is not None
        waiting = len(self.books.waiting)
        now = {"running": int(running), "waiting": waiting, "device": host_info.now()}
        self._result(peer, id, {**self.stats.show(), **now})

    def _prefix_list(self, peer: Peer, id: str) -> None:
        backend = self._life.loaded()
        self._result(peer, id, {"prefixes": backend.prefixes(), "skipped": backend.skipped})

    def _admin(self) -> None:
        if not self._config.allow_admin:
            text = "op must be allowed: drain and shutdown need the server's serve.allow_admin"
            raise PlanError("unauthorized", text, field="op")

    def _drain(self, peer: Peer, id: str) -> None:
        self._admin()
        self._life.draining = True
        self._ack(peer, id, draining=True)

    def _shutdown(self, peer: Peer, id: str) -> None:
        self._admin()
        self._ack(peer, id, stopping=True)
        self._hands.stop()

    def _cancel(self, peer: Peer, request: messages.Cancel) -> None:
        job = self.books.find(request.target, peer, request.session)
        if job is not None and job.state == "keeping":
            job = None  # it is done, except for writing the file
        if job is not None and job.state == "running":
            # Before the answer: a client that has it may rely on at most one more step.
            job.stop = job.stop or "cancelled"
        self._tell("cancel", id=request.target, cancelled=job is not None)
        self._ack(peer, request.id, cancelled=job is not None)
        if job is not None and job.state != "running":
            self.answer(job, stopped("cancelled"))

    # --- posts of the other threads

    def posted(self, post: JobChecked | RequestDone | FileWritten | ChunkReady | JobDone) -> None:
        """Handle a message from another thread."""
        if isinstance(post, RequestDone):
            self._validated(post)
        elif isinstance(post, ChunkReady):
            self._say(post)
        elif isinstance(post, JobChecked):
            self._checked(post.job, post.outcome)
        elif isinstance(post, FileWritten):
            self.answer(post.job, post.outcome)
        else:
            self._note(post)
            self._ended(post.job, post.outcome)
            self.dispatch()

    def _validated(self, post: RequestDone) -> None:
        peer, id = post.owed.peer, post.owed.request.id
        if not self._dues.settle(post.owed) or post.outcome is None:
            return
        if isinstance(post.outcome, PlanError):
            self._tell("refused", id=id, code=post.outcome.code)
            self._refuse(peer, id, post.outcome)
        else:
            self._result(peer, id, post.outcome)

    def _ended(self, job: Job, outcome: messages.Result | dict[str, Any] | PlanError) -> None:
        if isinstance(job.request, messages.PrefixPut) and isinstance(outcome, dict):
            job.state = "keeping"
            self._hands.keep(PrefixPinned(job, job.request, outcome))
        else:
            self.answer(job, outcome)

    def _say(self, post: ChunkReady) -> None:
        job, chunk = post.job, structs.replace(post.chunk, id=post.job.request.id, seq=post.job.seq)
        if job.state != "running" or job.gone:
            return
        job.seq += 1
        droppable = chunk.kind in DROPPABLE
        if not self._send(job.peer, chunk, job.request.id, chunk.seq, droppable=droppable):
            self._abandon(job)  # the error that replaced the chunk was its one final answer

    def _checked(self, job: Job, outcome: Prepared | PlanError) -> None:
        if job.state != "preparing":
            return
        try:
            if isinstance(outcome, PlanError):
                raise outcome
            assert self._life.backend is not None, "it has prepared this job"
            now = time.monotonic()
            left = None if job.deadline is None else 1e3 * (job.deadline - now)
            free, spent = self.books.running is None, 1e3 * (now - job.arrived)
            admit(outcome.min_ms, left, self._life.backend.rates, spent_ms=spent, free=free)
            displaced = self.books.accept(job, _retry_after(self._life.backend))
        except PlanError as e:
            self.answer(job, e)
            return
        # Before the displaced jobs are answered: finding their peer gone may remove this job, too.
        job.prepared, job.state = outcome, "queued"
        for old, error in displaced:
            self.answer(old, error)
        self.dispatch()

    def _note(self, post: JobDone) -> None:
        error = post.outcome
        if isinstance(error, PlanError) and error.code in ("engine_fault", "internal"):
            self._life.last_error = error.message

    def dispatch(self) -> None:
        """Give the engine its next job if it is free."""
        job = self.books.next()
        if job is not None:
            job.state = "running"
            self._tell("begun", id=job.request.id, session=job.session)
            self._hands.run(job)

    # --- time and connections

    def expire(self, now: float) -> None:
        """Answer the jobs whose deadline passed while they waited."""
        for job in self.books.expired(now):
            self.answer(job, stopped("deadline"))

    def left(self, fd: int) -> None:
        """Abandon the jobs of a closed connection."""
        self._part(lambda peer: peer.fd == fd)

    def lost(self, routing: bytes) -> None:
        """Abandon the jobs of a peer that cannot be reached."""
        self._part(lambda peer: peer.routing == routing)

    def _part(self, hers: Callable[[Peer], bool]) -> None:
        self._dues.give_up(hers)
        for job in self.books.jobs():
            if hers(job.peer):
                self._abandon(job)

    def _abandon(self, job: Job) -> None:
        job.gone = True
        if job.state == "running":
            job.stop = job.stop or "cancelled"
        elif job.state != "keeping":
            self.answer(job, stopped("cancelled"))

    def give_up(self) -> None:
        """End every job now, because the time for draining is over."""
        for job in self.books.jobs():
            if job.state == "running":
                job.stop = job.stop or "cancelled"
            elif job.state != "keeping":
                self.answer(job, PlanError("draining", "the server stops"))
        self._owe_nothing(PlanError("draining", "the server stops"))

    def fail(self) -> None:
        """Answer every waiting client before the process ends, because a thread has failed."""
        for job in self.books.jobs():
            job.stop = job.stop or "cancelled"  # the server's end waits for a running engine
            self.answer(job, PlanError("engine_fault", FAILED))
        self._owe_nothing(PlanError("engine_fault", FAILED))

    def _owe_nothing(self, error: PlanError) -> None:
        for owed in self._dues.give_up():
            self._refuse(owed.peer, owed.request.id, error)

    @property
    def idle(self) -> bool:
        """Whether every accepted request is answered."""
        return not len(self.books) and self._dues.idle

    # --- answers

    def answer(self, job: Job, outcome: messages.Result | dict[str, Any] | PlanError) -> None:
        """Send the one final answer of a job."""
        if not self.books.leave(job):
            return
        id, seq = job.request.id, job.seq
        if isinstance(outcome, PlanError):
            self._tell("refused", id=id, session=job.session, code=outcome.code, gone=job.gone)
            planned = isinstance(job.request, messages.PlanRequest)
            if planned and outcome.code in ("cancelled", "preempted", "deadline"):
                self.stats.finished[outcome.code] += 1
            if not job.gone:
                self._refuse(job.peer, id, outcome, seq)
            return
        if isinstance(outcome, dict):
            self._tell("pinned", id=id, **outcome)
            if not job.gone:
                self._result(job.peer, id, outcome)
            return
        self._tell(
            "answered", id=id, session=job.session, finish_reason=outcome.finish_reason,
            plan_valid=outcome.plan_valid, usage=outcome.usage, timings=outcome.timings,
        )  # fmt: skip
        self.stats.result(outcome)
        assert isinstance(job.request, messages.PlanRequest), "a prefix has no result of this kind"
        if not job.gone:
            told = structs.replace(asked(outcome, job.request), id=id, seq=seq)
            self._send(job.peer, told, id, seq)

    def _refuse(self, peer: Peer, id: str | None, error: PlanError, seq: int = 0) -> None:
        self.stats.error(error)
        self._send(peer, codec.error_reply(error, id, seq), id, seq)

    def _result(self, peer: Peer, id: str, fields_: dict[str, Any]) -> None:
        self._send(
            peer, {"v": messages.VERSION, "id": id, "type": "result", "seq": 0, **fields_}, id
        )

    def _ack(self, peer: Peer, id: str, **fields_: bool) -> None:
        self._send(peer, {"v": messages.VERSION, "id": id, "type": "ack", "seq": 0, **fields_}, id)

    def _send(
        self, peer: Peer, message: object, id: str | None, seq: int = 0, *, droppable: bool = False
    ) -> bool:
        """Return whether the message could be encoded; if not, an error was sent instead."""
        written = True
        try:
            body = peer.body(message)
        except Exception:
            # Caught broadly: one bad answer must not fail the plans of others.
            self._log(traceback.format_exc())
            error = PlanError("internal", "the answer could not be written; the log says why")
            self.stats.error(error)
            body, droppable, written = peer.body(codec.error_reply(error, id, seq)), False, False
        if self._door.send(peer.envelope, body, droppable=droppable) == "gone":
            self.lost(peer.routing)
        return written


def _retry_after(backend: Backend) -> float:
    """Return in how many ms a place in the queue may be free."""
    return max(RETRY_MS, backend.rates.e2e_ms)
