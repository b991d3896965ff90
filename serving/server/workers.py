"""The worker threads behind the I/O thread: the image threads decode what requests show, the check
thread prepares requests, the engine thread runs jobs, the file thread writes and removes files:
prefixes and traces.

They take work from queues and emit events. None of them touches a socket or the scheduler.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, PriorityQueue, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import structs

from thor_dflash.core.errors import EngineLost, PlanError, RequestError, ThorError
from thor_dflash.core.shortages import shortage
from thor_dflash.serving.planner.backend import Backend, Prepared, StopReason, drive, left_ms
from thor_dflash.serving.planner.planner import final
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.errors import bad_request
from thor_dflash.serving.server.request_reader import UNEXPECTED, DecodedRequest, read_request
from thor_dflash.serving.server.scheduler import Job, Peer
from thor_dflash.serving.server.trace import StepTrace

if TYPE_CHECKING:
    from thor_dflash.runtime.vision.picture import Picture

T = TypeVar("T")
ENGINE_NICENESS = 5
"""Niceness of the engine's threads. They keep every core busy for whole time slices, and a waking
I/O thread or a robot's own controllers would otherwise have to wait for those to end."""
IMAGE_THREADS = 2
"""Images of 16 megapixels take half a second and 250 MB each."""
LEAST_BYTES = 1024
"""What a body that waits to be decoded counts at least in its client's share, bytes."""
WAIT_S_PER_BYTE = 0.05 / (1 << 20)
"""Longest wait of the decode thread for an idle I/O thread, before each body."""
FAULT = "the engine met a fault; the log of the server says more"
"""The whole message for a client: the text of a fault may name files on the server's machine."""

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BackendLoaded:
    """The backend is loaded and runs its self-test."""


@dataclass(frozen=True, slots=True)
class BackendReady:
    """The backend is loaded and has passed its self-test."""

    backend: Backend


@dataclass(frozen=True, slots=True)
class ServerFailed:
    """The backend did not load, was lost, or a thread failed: the server must end."""

    error: ThorError


@dataclass(slots=True, eq=False)
class UndecodedRequest:
    """A body that waits for the decode thread, or is there."""

    peer: Peer
    body: bytes
    abandoned: bool = False
    """Its connection is closed."""

    @property
    def size(self) -> int:
        """The bytes it counts in its client's share."""
        return max(LEAST_BYTES, len(self.body))


@dataclass(frozen=True, slots=True)
class RequestDecoded:
    """The decode thread has read a request."""

    body: UndecodedRequest
    decoded: DecodedRequest


@dataclass(frozen=True, slots=True)
class JobChecked:
    """The check thread has prepared or refused a job."""

    job: Job
    outcome: Prepared | PlanError


PendingMessage = messages.Validate | messages.PrefixDrop | messages.SessionDrop


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A `validate` for the check thread, or a drop for the file thread, unanswered."""

    peer: Peer
    message: PendingMessage
    abandoned: bool = False
    """No client waits for it any more. Written by the I/O thread, read by the worker thread before
    it begins."""


@dataclass(frozen=True, slots=True)
class RequestDone:
    """A thread has finished a `validate` or a drop."""

    request: PendingRequest
    outcome: dict[str, Any] | PlanError | None
    """None if it was abandoned before it began."""


@dataclass(frozen=True, slots=True)
class PrefixPinned:
    """Work for the file thread: a pinned prefix, answered once its file is written or removed."""

    job: Job
    request: messages.PrefixPut
    answer: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FileWritten:
    """The file thread has written or removed the file of a pinned prefix."""

    job: Job
    outcome: dict[str, Any] | PlanError


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """A chunk of the running job."""

    job: Job
    chunk: messages.Chunk


@dataclass(frozen=True, slots=True)
class JobDone:
    """The running job has ended."""

    job: Job
    outcome: messages.Result | dict[str, Any] | PlanError


WorkerEvent = (
    BackendLoaded
    | BackendReady
    | ServerFailed
    | RequestDecoded
    | JobChecked
    | RequestDone
    | FileWritten
    | ChunkReady
    | JobDone
)
FileTask = PendingRequest | PrefixPinned | Callable[[], None]
"""Work for the file thread; a function writes a trace."""
CheckItem = tuple[int, int, Job | PendingRequest | None]
"""An entry of the check thread's priority queue, least first: rank, order of arrival, work item."""


def check_item(order: int, item: Job | PendingRequest | None) -> CheckItem:
    """Rank work for the check thread: plans, then `validate`, then None, which ends the thread."""
    return 2 if item is None else int(isinstance(item, PendingRequest)), order, item


@dataclass(slots=True)
class Heartbeat:
    """Time of the engine thread's last heartbeat. Written there, read by the watchdog."""

    busy: bool = False
    at: float = field(default_factory=time.monotonic)
    _excused: tuple[float, float] = (0.0, 0.0)
    """A heartbeat, and seconds after it that do not count. Written by the watchdog only, so that
    it cannot overwrite a newer one."""

    def beat(self, *, busy: bool) -> None:
        """Record a heartbeat: a step is about to run (`busy`), or the job has ended."""
        self.at = time.monotonic()
        self.busy = busy

    def age(self, now: float) -> float:
        """Return the seconds since the last heartbeat, 0 while the engine is idle."""
        at = self.at
        return max(0.0, now - at - self._not_counted(at)) if self.busy else 0.0

    def excuse(self, seconds: float, now: float) -> None:
        """Do not count so many of the seconds from the last heartbeat to `now`."""
        at = self.at
        # The heartbeat may have come after the pause: then no time since it is part of the pause.
        self._excused = at, min(seconds + self._not_counted(at), max(0.0, now - at))

    def _not_counted(self, at: float) -> float:
        since, seconds = self._excused
        return seconds if since == at else 0.0


def decode_requests(
    inbox: SimpleQueue[UndecodedRequest | None],
    emit: Callable[[WorkerEvent], None],
    idle: threading.Event,
    token: str | None,
    most: int,
    log: Log,
) -> None:
    """Decode requests until None arrives, each while the I/O thread is `idle`: a decode holds the
    interpreter lock for milliseconds, and the I/O thread takes that lock again after each call of
    libzmq.
    """
    while (item := inbox.get()) is not None:
        idle.wait(len(item.body) * WAIT_S_PER_BYTE)
        emit(RequestDecoded(item, read_request(item.body, token, most, log)))


def must_decode(job: Job) -> bool:
    """Whether a job has images for the image threads."""
    return isinstance(job.request, messages.PlanRequest) and bool(job.request.images)


def read_images(
    backend: Backend,
    inbox: SimpleQueue[Job | None],
    check: Callable[[Job], None],
    emit: Callable[[WorkerEvent], None],
    log: Log,
) -> None:
    """Decode the images of requests until None arrives, and pass each request on to be checked. A
    large image takes a second, for which no other request waits. As many jobs as the queue of plans
    has places may wait here.
    """
    while (job := inbox.get()) is not None:
        if job.state != "preparing":
            continue  # it was cancelled, or its deadline has passed
        found = _guard(partial(_read_images, backend, job), log)
        if isinstance(found, PlanError):
            emit(JobChecked(job, found))
        else:
            job.pictures = found
            check(job)


def run_checks(
    backend: Backend,
    inbox: PriorityQueue[CheckItem],
    emit: Callable[[WorkerEvent], None],
    log: Log,
) -> None:
    """Check requests until None arrives."""
    while (item := inbox.get()[-1]) is not None:
        if isinstance(item, PendingRequest):
            emit(_finish(backend, item, log))
        elif item.state == "preparing":
            emit(JobChecked(item, _guard(partial(_prepare, backend, item), log)))


def write_files(
    backend: Backend,
    inbox: SimpleQueue[FileTask | None],
    emit: Callable[[WorkerEvent], None],
    log: Log,
) -> None:
    """Write and remove files in order of arrival, until None arrives. A thread of its own, so that
    neither plans nor their checks wait for the disk.
    """
    while (item := inbox.get()) is not None:
        if isinstance(item, PrefixPinned):
            emit(FileWritten(item.job, _guard(partial(_keep, backend, item), log)))
        elif isinstance(item, PendingRequest):
            emit(_finish(backend, item, log))
        else:
            item()


def _finish(backend: Backend, request: PendingRequest, log: Log) -> RequestDone:
    def work() -> dict[str, Any]:
        message = request.message
        if isinstance(message, messages.Validate):
            return backend.validate(message)
        if isinstance(message, messages.SessionDrop):
            return {"boundaries": backend.drop_session(message, request.peer.key)}
        return {"dropped": backend.drop(message.prefix_id)}

    return RequestDone(request, None if request.abandoned else _guard(work, log))


def _keep(backend: Backend, pinned: PrefixPinned) -> dict[str, Any]:
    backend.keep(pinned.request)
    return {**pinned.answer, "persisted": pinned.request.persist}


def _read_images(backend: Backend, job: Job) -> Mapping[str, Picture]:
    assert isinstance(job.request, messages.PlanRequest)
    return backend.read_images(job.request, job.peer.key)


def _prepare(backend: Backend, job: Job) -> Prepared:
    assert isinstance(job.request, messages.PlanRequest)
    return backend.prepare(job.request, left_ms(job.deadline), job.peer.key, job.pictures)


def lower_priority() -> None:
    """Lower the priority of this thread and of the threads it creates."""
    thread = threading.get_native_id()
    with suppress(OSError):  # not every system has priorities per thread
        # Keep a higher niceness that the process was started with; root could lower it here.
        nice = max(ENGINE_NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
        os.setpriority(os.PRIO_PROCESS, thread, nice)


def run_engine(
    load: Callable[[], Backend],
    inbox: SimpleQueue[Job | None],
    emit: Callable[[WorkerEvent], None],
    heartbeat: Heartbeat,
    log: Log,
    traced: Callable[[Job, object, StepTrace], None] = lambda job, outcome, trace: None,
) -> None:
    """Load, warm up, then run jobs until None arrives; `traced` gets the steps of each job."""
    # Before the engine creates its own threads, which inherit the niceness of this one.
    lower_priority()
    if (backend := _begun(load, emit, log)) is None:
        return
    emit(BackendReady(backend))
    try:
        while (job := _next_job(backend, inbox, emit, heartbeat, log)) is not None:
            heartbeat.beat(busy=True)
            trace = StepTrace(job.arrived)
            lost: list[EngineLost] = []
            outcome = _guard(
                partial(_alive, partial(_run, backend, job, emit, heartbeat, trace), lost), log
            )
            heartbeat.beat(busy=False)
            traced(job, outcome, trace)  # before the server learns that the last job has ended
            emit(JobDone(job, outcome))
            if lost:
                emit(ServerFailed(lost[0]))
                return
    finally:
        backend.close()


def _next_job(
    backend: Backend,
    inbox: SimpleQueue[Job | None],
    emit: Callable[[WorkerEvent], None],
    heartbeat: Heartbeat,
    log: Log,
) -> Job | None:
    """Wait for the next job, and let the backend use the time until there is one; None: end."""

    def wanted() -> bool:
        heartbeat.beat(busy=True)
        return not inbox.empty()

    while inbox.empty():
        lost: list[EngineLost] = []
        more_s = _guard(partial(_alive, partial(backend.idle, wanted), lost), log)
        heartbeat.beat(busy=False)
        if lost:
            emit(ServerFailed(lost[0]))
            return None
        with suppress(Empty):  # after a fault, which is in the log, the next try is after a job
            return inbox.get(timeout=None if isinstance(more_s, PlanError) else more_s)
    return inbox.get()


def _begun(
    load: Callable[[], Backend], emit: Callable[[WorkerEvent], None], log: Log
) -> Backend | None:
    """Load and warm up; None if that failed, which is then emitted."""
    backend: Backend | None = None
    try:
        backend = load()
        emit(BackendLoaded())
        backend.warm()
    except ThorError as e:
        emit(ServerFailed(e))
    except BaseException as e:  # as in _guard
        text = shortage(e)
        if not text:
            log(traceback.format_exc())
            text = "the backend must load (got an unexpected fault, see the log)"
        emit(ServerFailed(ThorError(text)))
    else:
        return backend
    if backend is not None:
        # This process may go on without a server, and would keep the prefix directory locked.
        backend.close()
    return None


def _run(
    backend: Backend,
    job: Job,
    emit: Callable[[WorkerEvent], None],
    heartbeat: Heartbeat,
    trace: StepTrace,
) -> messages.Result | dict[str, Any]:
    if isinstance(job.request, messages.PrefixPut):

        def halted() -> bool:
            heartbeat.beat(busy=True)
            return job.stop is not None

        return backend.pin(job.request, halted)
    assert job.prepared is not None
    queue_ms = 1e3 * (time.monotonic() - job.arrived)

    def stopped() -> StopReason | None:
        heartbeat.beat(busy=True)
        return job.stop

    run = backend.start(job.prepared, left_ms(job.deadline))
    trace.begin()
    result: messages.Result | None = None
    for event in drive(run, job.deadline, stopped, trace.stepped):
        if isinstance(event, messages.Chunk):
            emit(ChunkReady(job, event))
        else:
            result = event
    assert result is not None
    return final(_queued(result, queue_ms), job.request)


def _alive(work: Callable[[], T], lost: list[EngineLost]) -> T:
    """Run `work` and note in `lost` an engine that this process cannot recover."""
    try:
        return work()
    except EngineLost as e:
        lost.append(e)
        raise


def _queued(result: messages.Result, queue_ms: float) -> messages.Result:
    """Return the result with times measured from the job's arrival, not from its start."""
    t = result.timings
    if t is None:
        return result
    later = replace(
        t,
        queue_ms=queue_ms,
        ttft_ms=t.ttft_ms + queue_ms,
        ttfa_ms=None if t.ttfa_ms is None else t.ttfa_ms + queue_ms,
        e2e_ms=t.e2e_ms + queue_ms,
    )
    return structs.replace(result, timings=later)


def _guard(work: Callable[[], T], log: Log) -> T | PlanError:
    """Turn every failure into the answer of its request, also a panic of a Rust library, which is
    no Exception. Unforeseen ones are logged; their text is not sent.
    """
    try:
        return work()
    except PlanError as e:
        return e
    except RequestError as e:
        return bad_request(str(e))
    except ThorError as e:
        log(f"engine fault: {e}")
        return PlanError("engine_fault", FAULT)
    except BaseException as e:
        log(shortage(e) or traceback.format_exc())
        return PlanError("internal", UNEXPECTED)
