"""The worker threads behind the I/O thread: the decode thread reads the bodies of requests, the
image threads decode what they show, the check thread prepares them, the engine thread runs jobs,
the file thread writes and removes files: prefixes and traces.

They take work from queues and emit events (see worker_messages). None of them touches a socket or
the scheduler.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
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
from thor_dflash.serving.server.heartbeat import Heartbeat
from thor_dflash.serving.server.request_reader import UNEXPECTED, read_request
from thor_dflash.serving.server.scheduler import Job
from thor_dflash.serving.server.trace import StepTrace
from thor_dflash.serving.server.worker_messages import (
    BackendLoaded,
    BackendReady,
    CheckItem,
    ChunkReady,
    FileTask,
    FileWritten,
    JobChecked,
    JobDone,
    PendingRequest,
    PrefixPinned,
    RequestDecoded,
    RequestDone,
    ServerFailed,
    UndecodedRequest,
    WorkerEvent,
)

if TYPE_CHECKING:
    from thor_dflash.runtime.vision.picture import Picture

T = TypeVar("T")
ENGINE_NICENESS = 5
"""Niceness of the engine's threads. They keep every core busy for whole time slices, and a waking
I/O thread or a robot's own controllers would otherwise have to wait for those to end."""
IMAGE_THREADS = 2
"""Images of 16 megapixels take half a second and 250 MB each."""
WAIT_S_PER_BYTE = 0.05 / (1 << 20)
"""Longest wait of the decode thread for an idle I/O thread, before each body."""
FAULT = "the engine met a fault; the log of the server says more"
"""The whole message for a client: the text of a fault may name files on the server's machine."""

Log = Callable[[str], None]


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
    """Answer a `validate` or a drop, unless it was abandoned."""

    def work() -> dict[str, Any]:
        message = request.message
        if isinstance(message, messages.Validate):
            return backend.validate(message)
        if isinstance(message, messages.SessionDrop):
            return {"boundaries": backend.drop_session(message, request.peer.key)}
        return {"dropped": backend.drop(message.prefix_id)}

    return RequestDone(request, None if request.abandoned else _guard(work, log))


def _keep(backend: Backend, pinned: PrefixPinned) -> dict[str, Any]:
    """Write or remove the file of a pinned prefix; return the whole answer to its request."""
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
    if (backend := _open_backend(load, emit, log)) is None:
        return
    emit(BackendReady(backend))
    try:
        while (job := _next_job(backend, inbox, emit, heartbeat, log)) is not None:
            heartbeat.beat(busy=True)
            trace = StepTrace(job.arrived)
            lost: list[EngineLost] = []
            run = partial(_run, backend, job, emit, heartbeat, trace)
            outcome = _guard(partial(_noting_loss, run, lost), log)
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
        more_s = _guard(partial(_noting_loss, partial(backend.idle, wanted), lost), log)
        heartbeat.beat(busy=False)
        if lost:
            emit(ServerFailed(lost[0]))
            return None
        with suppress(Empty):  # after a fault, which is in the log, the next try is after a job
            return inbox.get(timeout=None if isinstance(more_s, PlanError) else more_s)
    return inbox.get()


def _open_backend(
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
    """Run a job: a plan, whose chunks are emitted and whose result is returned, or the pinning of a
    prefix, whose answer is returned.
    """
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


def _noting_loss(work: Callable[[], T], lost: list[EngineLost]) -> T:
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
