"""The plan server: one I/O thread that always answers, one engine thread that decodes.

    client --- ROUTER --- I/O thread (handlers, scheduler) --- check thread (tokenise, compile)
                              |                                  |
                              +--- image threads (decode) -------+
                              |
                              +--- decode thread (large requests)
                              |
                              +--- engine thread (prefill, decode)
                              |
                              +--- file thread (persisted prefixes, traces)

Only the I/O thread touches the sockets and the scheduler. The other threads take work from queues
and emit events, which it handles.
"""

from __future__ import annotations

import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from queue import Empty, PriorityQueue, SimpleQueue

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import ThorError
from thor_dflash.core.message_text import visible
from thor_dflash.serving.planner.backend import Backend
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.server import worker_messages, workers
from thor_dflash.serving.server.event_log import EventLog
from thor_dflash.serving.server.handlers import RequestHandlers, ServerActions
from thor_dflash.serving.server.lifecycle import Lifecycle
from thor_dflash.serving.server.scheduler import Job
from thor_dflash.serving.server.systemd import ALIVE, Notify
from thor_dflash.serving.server.trace import StepTrace, write
from thor_dflash.serving.server.worker_messages import (
    BackendLoaded,
    BackendReady,
    CheckItem,
    FileTask,
    PendingRequest,
    ServerFailed,
    UndecodedRequest,
    WorkerEvent,
)
from thor_dflash.serving.server.workers import Log
from thor_dflash.serving.transport import access
from thor_dflash.serving.transport.router_socket import ReceivedMessage, RouterSocket

TICK_S = 1.0
"""Longest sleep of the I/O thread: it feeds systemd's watchdog, which is set in seconds."""
PAUSED_S = 2 * TICK_S
"""Pause of the I/O thread after which the whole process is taken to have been stopped (SIGSTOP, a
suspended machine, a debugger), and the engine with it."""
READING_S = 0.5
"""Wait between the last answer of a drain and closing the sockets: when a connection is lost,
libzmq drops messages that the client has received but not yet read (pipe_t::terminate after a
hiccup, with ZMQ_IMMEDIATE set)."""
MOMENT_S = 0.2
"""Time given to threads to end by themselves where waiting longer is not worth it."""
EXIT_HUNG = 70
"""Exit status of a server whose engine hangs: EX_SOFTWARE, systemd restarts it."""


class Server:
    """Serves one backend. `run` belongs to one thread; `stop` may be called from any thread and
    from signal handlers.
    """

    def __init__(
        self,
        load: Callable[[], Backend],
        config: ServeConfig,
        *,
        log: Log = print,
        notify: Notify = lambda state: None,
        die: Callable[[int], object] = os._exit,
    ) -> None:
        """Bind first, so that clients can connect and read the state while the backend loads.

        Raises:
            ConfigError: an endpoint, a key, the secret or the events file cannot be used.
        """
        token = access.read_token(config.token_file)
        self._log_event = EventLog(config.events, log)
        self._router = RouterSocket(config)
        self._config = config
        self._load = load
        self._log = log
        self._notify = notify
        self._die = die
        self._token = token
        self._lifecycle = Lifecycle(config.watchdog_s)
        self._events: SimpleQueue[WorkerEvent] = SimpleQueue()
        self._checks: PriorityQueue[CheckItem] = PriorityQueue()
        self._images: SimpleQueue[Job | None] = SimpleQueue()
        self._order = count()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._undecoded: SimpleQueue[UndecodedRequest | None] = SimpleQueue()
        self._files: SimpleQueue[FileTask | None] = SimpleQueue()
        actions = ServerActions(
            decode=self._undecoded.put, check=self._check, run=self._jobs.put,
            write=self._files.put, stop=self._end,
        )  # fmt: skip
        self._handlers = RequestHandlers(
            self._router, config, self._lifecycle, actions, token, log, self._log_event
        )
        self._state = ""
        self._threads: list[threading.Thread] = []
        self._ending = False
        self._stops = 0
        self._stopped_at = math.inf
        self._notified = 0.0
        self._watched = time.monotonic()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The endpoints it listens on, with actual port numbers."""
        return self._router.endpoints

    def stop(self) -> None:
        """Accept no more work, finish the accepted work, end. The second call ends at once."""
        self._stops += 1
        self._end()

    def _end(self) -> None:
        """Drain and end, for a `shutdown` request. Not counted as a stop: a client that repeats it
        must not cut other clients' plans short; only signals can.
        """
        self._stopped_at = min(self._stopped_at, time.monotonic())
        self._ending = True
        self._router.wake()

    def ended(self, within_s: float = 0.0) -> bool:
        """Return whether all its threads have ended, after waiting up to `within_s` seconds."""
        until = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def run(self) -> None:
        """Serve until stopped. Threads may outlive this call (see `ended`): one that hangs, one
        still loading the backend, or any of them after a second stop.

        Raises:
            ThorError: the backend did not load, the engine was lost, or a thread failed.
        """
        self._log_event.start()
        try:
            self._start(self._decode_requests)
            self._start(self._run_engine)
            while not self._finished():
                self._poll_once()
        finally:
            self._close()
        if self._lifecycle.failed is not None:
            raise self._lifecycle.failed

    # --- worker threads

    def _start(self, target: Callable[[], None]) -> None:
        # Daemon threads: a hung engine must not keep the process alive past its end.
        thread = threading.Thread(target=lambda: self._run_thread(target), daemon=True)
        thread.start()
        self._threads.append(thread)  # not before: one that was not started cannot be joined

    def _decode_requests(self) -> None:
        idle, most = self._router.idle, self._config.max_message
        workers.decode_requests(self._undecoded, self._emit, idle, self._token, most, self._log)

    def _run_engine(self) -> None:
        heartbeat = self._lifecycle.heartbeat
        workers.run_engine(self._load, self._jobs, self._emit, heartbeat, self._log, self._traced)

    def _read_images(self, backend: Backend) -> None:
        workers.read_images(backend, self._images, self._queue_check, self._emit, self._log)

    def _run_thread(self, target: Callable[[], None]) -> None:
        """Run a thread's work. Any exception ends the server, which would otherwise look healthy
        and answer nothing.
        """
        try:
            target()
        except BaseException:  # a panic in a Rust library does not derive from Exception
            fault = "the server's threads must go on (got an unexpected fault, see the log)"
            self._emit(ServerFailed(ThorError(fault)))
            self._log(traceback.format_exc())

    def _check(self, item: Job | PendingRequest) -> None:
        if isinstance(item, Job) and workers.must_decode(item):
            self._images.put(item)
        else:
            self._queue_check(item)

    def _queue_check(self, item: Job | PendingRequest | None) -> None:
        """Queue work for the check thread. Called by the I/O thread and the image threads."""
        self._checks.put(worker_messages.check_item(next(self._order), item))

    def _emit(self, event: WorkerEvent) -> None:
        """Queue an event for the I/O thread. May be called from any thread."""
        self._events.put(event)
        self._router.wake()

    def _traced(self, job: Job, outcome: object, trace: StepTrace) -> None:
        """Have the file thread write the trace of a slow job. Runs on the engine thread, which must
        not wait for the disk.
        """
        limit = self._config.trace_slow_ms
        if limit and trace.took_ms() >= limit:
            result = outcome if isinstance(outcome, messages.Result) else None
            self._files.put(partial(self._write_trace, job, trace, result))

    def _write_trace(self, job: Job, trace: StepTrace, result: messages.Result | None) -> None:
        try:
            path = write(Path(self._config.trace_dir), job.request.id, trace.events(result))
        except OSError as e:
            self._log(f"serve.trace_dir must be a directory that can be written (got: {e})")
        else:
            name = visible(job.request.id)
            self._log(f"plan {name} took {trace.took_ms():.0f} ms: a trace of it is in {path}")

    # --- the I/O thread

    def _poll_once(self) -> None:
        for received in self._router.wait(self._timeout()):
            if isinstance(received, ReceivedMessage):
                self._handlers.handle_message(received)
            else:
                self._handlers.connection_closed(received.fd)
        for event in _drain(self._events):
            self._handle_event(event)
        now = time.monotonic()
        self._handlers.expire(now)
        for routing in self._router.retry(now):
            self._handlers.peer_lost(routing)
        self._handlers.dispatch()  # a job may have waited for one that has left
        self._watch(now)
        self._drain_and_stop(now)
        self._log_state()

    def _timeout(self) -> float:
        now = time.monotonic()
        due = [self._handlers.scheduler.first_deadline(), self._lifecycle.stop_by]
        return max(0.002, min([TICK_S, *(at - now for at in due if at is not None)]))

    def _handle_event(self, event: WorkerEvent) -> None:
        if isinstance(event, BackendLoaded):
            self._lifecycle.warming = True
        elif isinstance(event, BackendReady):
            self._ready(event.backend)
        elif isinstance(event, ServerFailed):
            self._lifecycle.failed = event.error
            self._handlers.fail()
        else:
            self._handlers.handle_event(event)

    def _ready(self, backend: Backend) -> None:
        self._start(lambda: workers.run_checks(backend, self._checks, self._emit, self._log))
        for _ in range(workers.IMAGE_THREADS):
            self._start(partial(self._read_images, backend))
        self._start(lambda: workers.write_files(backend, self._files, self._emit, self._log))
        lifecycle = self._lifecycle
        lifecycle.backend = backend
        lifecycle.ready_after_s = time.monotonic() - lifecycle.started
        self._notify("READY=1")
        self._log(f"ready after {lifecycle.ready_after_s:.1f} s on {', '.join(self.endpoints)}")

    def _log_state(self) -> None:
        state = self._lifecycle.state(self._handlers.scheduler.running is not None)
        if state != self._state:
            self._state = state
            self._log_event("state", state=state, error=self._lifecycle.last_error)

    def _watch(self, now: float) -> None:
        heartbeat = self._lifecycle.heartbeat
        if (paused := now - self._watched) > PAUSED_S:
            heartbeat.excuse(paused, now)
        self._watched = now
        age = heartbeat.age(now)
        if age > self._config.watchdog_s:
            self._log(f"the engine gave no sign of life for {age:.1f} s: the server ends")
            self._die(EXIT_HUNG)
        if now - self._notified >= TICK_S:
            self._notified = now
            self._notify(ALIVE)

    def _drain_and_stop(self, now: float) -> None:
        lifecycle = self._lifecycle
        if self._ending and not lifecycle.stopping:
            lifecycle.draining = lifecycle.stopping = True
            lifecycle.stop_by = now + self._config.drain_s
            self._notify("STOPPING=1")
            if (n := len(self._handlers.scheduler)) and self._stops < 2:
                within = f"{'s' * (n > 1)}, for up to {self._config.drain_s:g} s"
                signals = "one more signal ends" if self._stops else "two signals end"
                self._log(f"finishing {n} plan{within}; {signals} the server at once")
        if lifecycle.stopping and (self._stops > 1 or (lifecycle.stop_by or now) <= now):
            self._handlers.give_up()

    def _finished(self) -> bool:
        if self._lifecycle.failed is not None:
            return True
        return self._lifecycle.stopping and self._handlers.idle and not self._router.holding

    def _close(self) -> None:
        self._jobs.put(None)
        self._undecoded.put(None)
        self._files.put(None)
        self._queue_check(None)
        for _ in range(workers.IMAGE_THREADS):
            self._images.put(None)
        begun = time.monotonic()
        # Wait in short intervals: a second stop may arrive meanwhile.
        while not self.ended(MOMENT_S / 10) and time.monotonic() < begun + self._patience_s():
            pass
        self._log_event("ended")
        self._log_event.close()
        if self._stops < 2 and self._router.last_sent >= self._stopped_at:
            time.sleep(max(0.0, self._router.last_sent + READING_S - time.monotonic()))
        self._router.close()

    def _patience_s(self) -> float:
        """Return how long to wait for the threads, s: only briefly while the backend still loads,
        as no client can have a plan yet, and after a second stop, which must not wait.
        """
        loading = self._lifecycle.backend is None and self._lifecycle.failed is None
        return MOMENT_S if loading or self._stops > 1 else self._config.watchdog_s


def _drain(events: SimpleQueue[WorkerEvent]) -> Iterator[WorkerEvent]:
    while True:
        try:
            yield events.get_nowait()
        except Empty:
            return


@contextmanager
def serving(
    load: Callable[[], Backend], config: ServeConfig, *, log: Log = print
) -> Generator[Server]:
    """Run a server on its own thread for the duration of the `with` block."""
    server = Server(load, config, log=log)
    failed: list[ThorError] = []

    def run() -> None:
        try:
            server.run()
        except ThorError as e:
            failed.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        server.stop()
        thread.join(config.drain_s + config.watchdog_s)
        # This process goes on, and the caller may free what the backend still uses.
        server.ended(config.watchdog_s)
