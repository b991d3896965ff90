"""Handles each request and each event of the worker threads. Runs on the I/O thread."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.bounds import IMAGES_BYTES
from thor_dflash.core.errors import PlanError
from thor_dflash.core.message_text import visible
from thor_dflash.serving.planner.backend import Backend
from thor_dflash.serving.planner.planner import check_deadline, stop_error
from thor_dflash.serving.planner.result import requested_parts
from thor_dflash.serving.protocol import errors, groot, messages, validation
from thor_dflash.serving.protocol.codec import JSON
from thor_dflash.serving.protocol.errors import bad_request
from thor_dflash.serving.protocol.replies import ReuseCounts
from thor_dflash.serving.server import hello, host_info
from thor_dflash.serving.server.decode_queue import DecodeQueue
from thor_dflash.serving.server.event_log import EventLog
from thor_dflash.serving.server.lifecycle import FAILED, RETRY_MS, Lifecycle
from thor_dflash.serving.server.pending import PendingRequests
from thor_dflash.serving.server.plan_log import plan_line
from thor_dflash.serving.server.request_reader import (
    UNEXPECTED,
    DecodedRequest,
    read_request,
    refuse_unread,
)
from thor_dflash.serving.server.scheduler import Job, Peer, Scheduler, job_of
from thor_dflash.serving.server.stats import Stats
from thor_dflash.serving.server.worker_messages import (
    ChunkReady,
    FileWritten,
    JobChecked,
    JobDone,
    PendingRequest,
    PrefixPinned,
    RequestDecoded,
    RequestDone,
    UndecodedRequest,
)
from thor_dflash.serving.server.workers import Log
from thor_dflash.serving.transport.router_socket import ReceivedMessage, RouterSocket

MAX_ENVELOPE = 8
"""Most frames before the body: enough for any reasonable chain of proxies."""
DROPPABLE = ("text", "thinking", "progress")
"""Kinds of chunks that a slow reader may lose; steps and results are kept for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerActions:
    """What the handlers can start in the server."""

    decode: Callable[[UndecodedRequest], None]
    """Give the decode thread a body; it must have none."""
    check: Callable[[Job | PendingRequest], None]
    """Queue work for the check thread."""
    run: Callable[[Job], None]
    """Queue a job for the engine thread, which must be free."""
    write: Callable[[PendingRequest | PrefixPinned], None]
    """Queue work for the file thread."""
    stop: Callable[[], None]
    """Drain the server and end it."""


class RequestHandlers:
    """Answers every request. Owns the scheduler."""

    def __init__(
        self,
        router: RouterSocket,
        config: ServeConfig,
        lifecycle: Lifecycle,
        actions: ServerActions,
        token: str | None,
        log: Log,
        log_event: EventLog,
    ) -> None:
        self._router = router
        self._config = config
        self._lifecycle = lifecycle
        self._actions = actions
        self._token = token
        self._log = log
        self._log_event = log_event
        self.scheduler = Scheduler(config.max_queue)
        self.stats = Stats()
        self._pending = PendingRequests()
        largest = config.max_message + IMAGES_BYTES
        self._undecoded = DecodeQueue(actions.decode, config.max_message, largest)
        self._operations: dict[str, Callable[[Peer, Any], None]] = {
            "plan": self._plan,
            "cancel": self._cancel,
            "validate": self._validate,
            "prefix.put": self._prefix_put,
            "prefix.list": self._prefix_list,
            "prefix.drop": self._drop,
            "session.drop": self._drop,
            "hello": self._hello,
            "ping": lambda peer, request: self._result(peer, request.id, groot.RUNNING),
            "health": self._health,
            "stats": self._stats,
            "drain": self._drain,
            "shutdown": self._shutdown,
        }
        self._events: dict[type, Callable[[Any], None]] = {
            RequestDecoded: self._request_decoded,
            ChunkReady: self._send_chunk,
            JobChecked: self._job_checked,
            JobDone: self._job_done,
            FileWritten: lambda event: self.answer(event.job, event.outcome),
            RequestDone: self._request_done,
        }

    def handle_message(self, message: ReceivedMessage) -> None:
        """Answer any message, also a malformed one."""
        at = next((i for i, f in enumerate(message.frames) if i and not f), None)
        # A request without an empty delimiter frame is answered without one, too, along the same
        # hops.
        split = max(1, len(message.frames) - 1) if at is None else at + 1
        envelope, rest = message.frames[:split], message.frames[split:]
        peer = Peer(envelope, JSON, fd=message.fd, arrived=time.monotonic(), key=message.key)
        if split > MAX_ENVELOPE:
            text = f"a message must have <= {MAX_ENVELOPE} frames before its body (got {split})"
            self._refuse_message(peer, bad_request(text))
        elif len(rest) != 1:
            text = f"a message must have one body (got {len(rest)})"
            self._refuse_message(peer, bad_request(text))
        elif self._undecoded.must_wait(peer, rest[0]):
            self._decode_later(peer, rest[0])
        else:
            most = self._config.max_message
            self._handle_request(peer, read_request(rest[0], self._token, most, self._log))

    def _decode_later(self, peer: Peer, body: bytes) -> None:
        try:
            self._undecoded.add(peer, body)
        except PlanError as e:
            self._handle_request(peer, refuse_unread(body, e))

    def handle_event(
        self, event: RequestDecoded | JobChecked | RequestDone | FileWritten | ChunkReady | JobDone
    ) -> None:
        """Handle the event of a worker thread."""
        self._events[type(event)](event)

    # --- operations

    def _handle_request(self, peer: Peer, decoded: DecodedRequest) -> None:
        peer = dataclasses.replace(peer, codec=decoded.codec, groot=decoded.groot)
        request = decoded.outcome
        try:
            if isinstance(request, PlanError):
                raise request
            self.stats.requests[request.op] += 1
            self._operations[request.op](peer, request)
        except PlanError as e:
            self._refuse_message(peer, e, decoded.id)
        except Exception:
            self._log(traceback.format_exc())
            self._refuse(peer, decoded.id, PlanError("internal", UNEXPECTED))

    def _refuse_message(self, peer: Peer, error: PlanError, id: str | None = None) -> None:
        self._log_event("refused", id=id, code=error.code)
        self._refuse(peer, id, error)

    def _plan(self, peer: Peer, request: messages.PlanRequest) -> None:
        backend = self._lifecycle.open()
        validation.check(request)
        if self._config.log_prompts:
            prompt = request.prompt or request.messages
            self._log(visible(f"plan {request.id} asks: {prompt}"))
        self._actions.check(self._arrive(peer, request, backend))

    def _prefix_put(self, peer: Peer, request: messages.PrefixPut) -> None:
        backend = self._lifecycle.open()
        if request.persist and not self._config.prefix_dir:
            text = "persist must be false, as the server has no serve.prefix_dir (got true)"
            raise bad_request(text, "persist")
        self._arrive(peer, request, backend).state = "queued"
        self.dispatch()

    def _arrive(
        self, peer: Peer, request: messages.PlanRequest | messages.PrefixPut, backend: Backend
    ) -> Job:
        job = job_of(peer, request)
        self.scheduler.arrive(job, _retry_after(backend))
        self._log_event("arrived", op=request.op, id=request.id, session=job.session)
        return job

    def _validate(self, peer: Peer, request: messages.Validate) -> None:
        self._lifecycle.open()
        validation.check_prompt(request)
        validation.check_answer(request)
        validation.check_images(request)
        self._actions.check(self._pending.add(peer, request))

    def _drop(self, peer: Peer, request: messages.PrefixDrop | messages.SessionDrop) -> None:
        self._lifecycle.open()
        self._actions.write(self._pending.add(peer, request))

    def _hello(self, peer: Peer, request: messages.Simple) -> None:
        description = hello.server_description(self._config, self._lifecycle.backend)
        self._result(peer, request.id, description)

    def _health(self, peer: Peer, request: messages.Simple) -> None:
        self._result(peer, request.id, self._lifecycle.health(**self._counts()))

    def _stats(self, peer: Peer, request: messages.Simple) -> None:
        now = {**self._counts(), "device": host_info.now()}
        backend = self._lifecycle.backend
        reuse = backend.reuse if backend else ReuseCounts()
        table = {**self.stats.show(), "reuse": reuse, **now}
        self._result(peer, request.id, table)

    def _counts(self) -> dict[str, int]:
        running = int(self.scheduler.running is not None)
        return {"running": running, "waiting": len(self.scheduler.waiting)}

    def _prefix_list(self, peer: Peer, request: messages.Simple) -> None:
        backend = self._lifecycle.loaded()
        table = {"prefixes": backend.prefixes(), "skipped": backend.skipped}
        self._result(peer, request.id, table)

    def _check_admin(self) -> None:
        if not self._config.allow_admin:
            text = "op must be allowed: drain and shutdown need the server's serve.allow_admin"
            raise PlanError("unauthorized", text, field="op")

    def _drain(self, peer: Peer, request: messages.Simple) -> None:
        self._check_admin()
        self._lifecycle.draining = True
        self._ack(peer, request.id, draining=True)

    def _shutdown(self, peer: Peer, request: messages.Simple) -> None:
        self._check_admin()
        self._ack(peer, request.id, stopping=True)
        self._actions.stop()

    def _cancel(self, peer: Peer, request: messages.Cancel) -> None:
        job = self.scheduler.find(request.target, peer, request.session)
        if job is not None and job.state == "writing":
            job = None  # it is done, except for writing the file
        if job is not None and job.state == "running":
            # Before the answer: a client that has it may rely on at most one more step.
            job.stop = job.stop or "cancelled"
        self._log_event("cancel", id=request.target, cancelled=job is not None)
        self._ack(peer, request.id, cancelled=job is not None)
        if job is not None and job.state != "running":
            self.answer(job, stop_error("cancelled"))

    # --- events of the worker threads

    def _request_decoded(self, event: RequestDecoded) -> None:
        if self._undecoded.done(event.body):
            self._handle_request(event.body.peer, event.decoded)

    def _request_done(self, event: RequestDone) -> None:
        peer, id = event.request.peer, event.request.message.id
        if not self._pending.remove(event.request) or event.outcome is None:
            return
        if isinstance(event.outcome, PlanError):
            self._log_event("refused", id=id, code=event.outcome.code)
            self._refuse(peer, id, event.outcome)
        else:
            self._result(peer, id, event.outcome)

    def _job_done(self, event: JobDone) -> None:
        job, outcome = event.job, event.outcome
        if isinstance(outcome, PlanError) and outcome.code in ("engine_fault", "internal"):
            self._lifecycle.last_error = outcome.message
        if isinstance(job.request, messages.PrefixPut) and isinstance(outcome, dict):
            job.state = "writing"
            self._actions.write(PrefixPinned(job, job.request, outcome))
        else:
            self.answer(job, outcome)
        self.dispatch()

    def _send_chunk(self, event: ChunkReady) -> None:
        job = event.job
        if job.state != "running" or job.gone:
            return
        chunk = structs.replace(event.chunk, id=job.request.id, seq=job.seq)
        job.seq += 1
        droppable = chunk.kind in DROPPABLE
        if not self._send(job.peer, chunk, job.request.id, chunk.seq, droppable=droppable):
            self._abandon(job)  # the error that replaced the chunk was its one final answer

    def _job_checked(self, event: JobChecked) -> None:
        job, outcome = event.job, event.outcome
        if job.state != "preparing":
            return
        try:
            if isinstance(outcome, PlanError):
                raise outcome
            assert self._lifecycle.backend is not None, "it has prepared this job"
            rates = self._lifecycle.backend.rates
            now = time.monotonic()
            left = None if job.deadline is None else 1e3 * (job.deadline - now)
            free, spent = self.scheduler.running is None, 1e3 * (now - job.arrived)
            check_deadline(outcome.min_ms, left, rates, spent_ms=spent, free=free)
            displaced = self.scheduler.accept(job, _retry_after(self._lifecycle.backend))
        except PlanError as e:
            self.answer(job, e)
            return
        # Before the displaced jobs are answered: finding their peer gone may remove this job, too.
        job.prepared, job.state = outcome, "queued"
        for old, error in displaced:
            self.answer(old, error)
        self.dispatch()

    def dispatch(self) -> None:
        """Give the engine its next job if it is free."""
        job = self.scheduler.next()
        if job is not None:
            job.state = "running"
            self._log_event("begun", id=job.request.id, session=job.session)
            self._actions.run(job)

    # --- deadlines, lost connections and the end

    def expire(self, now: float) -> None:
        """Answer the jobs whose deadline passed while they waited."""
        for job in self.scheduler.expired(now):
            self.answer(job, stop_error("deadline"))

    def connection_closed(self, fd: int) -> None:
        """Abandon the jobs of a closed connection."""
        self._abandon_all(lambda peer: peer.fd == fd)

    def peer_lost(self, routing: bytes) -> None:
        """Abandon the jobs of a peer that cannot be reached."""
        self._abandon_all(lambda peer: peer.routing == routing)

    def _abandon_all(self, matches: Callable[[Peer], bool]) -> None:
        self.scheduler.forget(matches)
        self._undecoded.abandon(matches)
        self._pending.abandon(matches)
        for job in self.scheduler.jobs():
            if matches(job.peer):
                self._abandon(job)

    def _abandon(self, job: Job) -> None:
        job.gone = True
        self._end_job(job, stop_error("cancelled"))

    def _end_job(self, job: Job, error: PlanError) -> None:
        """Stop a running job, and answer a waiting one. One whose file is written is done."""
        if job.state == "running":
            job.stop = job.stop or "cancelled"
        elif job.state != "writing":
            self.answer(job, error)

    def give_up(self) -> None:
        """End every job now, because the time for draining is over."""
        error = PlanError("draining", "the server stops")
        for job in self.scheduler.jobs():
            self._end_job(job, error)
        self._refuse_pending(error)

    def fail(self) -> None:
        """Answer every waiting client before the process ends, because a thread has failed."""
        error = PlanError("engine_fault", FAILED)
        for job in self.scheduler.jobs():
            job.stop = job.stop or "cancelled"  # the server's end waits for a running engine
            self.answer(job, error)
        self._refuse_pending(error)

    def _refuse_pending(self, error: PlanError) -> None:
        self._undecoded.abandon()  # a client sees its connection close
        for request in self._pending.abandon():
            self._refuse(request.peer, request.message.id, error)

    @property
    def idle(self) -> bool:
        """Whether every accepted request is answered."""
        return not len(self.scheduler) and self._pending.idle and self._undecoded.idle

    # --- replies

    def answer(self, job: Job, outcome: messages.Result | dict[str, Any] | PlanError) -> None:
        """Send the one final answer of a job."""
        if not self.scheduler.remove(job):
            return
        if isinstance(job.request, messages.PlanRequest) and not isinstance(outcome, dict):
            self._log(plan_line(job, outcome))
            if job.deadline is not None:
                self.stats.deadline(outcome, late=time.monotonic() > job.deadline)
        if isinstance(outcome, PlanError):
            self._answer_error(job, outcome)
        elif isinstance(outcome, dict):
            self._log_event("pinned", id=job.request.id, **outcome)
            if not job.gone:
                self._result(job.peer, job.request.id, outcome)
        else:
            self._answer_result(job, outcome)

    def _answer_error(self, job: Job, error: PlanError) -> None:
        id = job.request.id
        self._log_event("refused", id=id, session=job.session, code=error.code, gone=job.gone)
        planned = isinstance(job.request, messages.PlanRequest)
        if planned and error.code in ("cancelled", "preempted", "deadline"):
            self.stats.finished[error.code] += 1
        if not job.gone:
            self._refuse(job.peer, id, error, job.seq)

    def _answer_result(self, job: Job, result: messages.Result) -> None:
        id = job.request.id
        self._log_event(
            "answered", id=id, session=job.session, finish_reason=result.finish_reason,
            plan_valid=result.plan_valid, usage=result.usage, timings=result.timings,
        )  # fmt: skip
        self.stats.result(result)
        assert isinstance(job.request, messages.PlanRequest), "a prefix has no result of this kind"
        if not job.gone:
            answer = structs.replace(requested_parts(result, job.request), id=id, seq=job.seq)
            self._send(job.peer, answer, id, job.seq)

    def _refuse(self, peer: Peer, id: str | None, error: PlanError, seq: int = 0) -> None:
        self.stats.error(error)
        self._send(peer, errors.error_reply(error, id, seq), id, seq)

    def _result(self, peer: Peer, id: str, table: dict[str, Any]) -> None:
        self._send(peer, {"v": messages.VERSION, "id": id, "type": "result", "seq": 0, **table}, id)

    def _ack(self, peer: Peer, id: str, **table: bool) -> None:
        self._send(peer, {"v": messages.VERSION, "id": id, "type": "ack", "seq": 0, **table}, id)

    def _send(
        self, peer: Peer, message: object, id: str | None, seq: int = 0, *, droppable: bool = False
    ) -> bool:
        """Return whether the message could be encoded; if not, an error was sent instead."""
        encoded = True
        try:
            body = peer.body(message)
        except Exception:
            # Caught broadly: one bad answer must not fail the plans of others.
            self._log(traceback.format_exc())
            error = PlanError("internal", "the answer could not be written; the log says why")
            self.stats.error(error)
            body, droppable, encoded = peer.body(errors.error_reply(error, id, seq)), False, False
        if self._router.send(peer.envelope, body, droppable=droppable) == "gone":
            self.peer_lost(peer.routing)
        return encoded


def _retry_after(backend: Backend) -> float:
    """Return in how many ms a place in the queue may be free."""
    return max(RETRY_MS, backend.rates.e2e_ms)
