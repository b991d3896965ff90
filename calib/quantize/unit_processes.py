"""Runs units of work in processes: in threads, numpy's short loops would wait for Python's lock."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import ForkContext
from multiprocessing.sharedctypes import Synchronized
from typing import Protocol

from thor_dflash.calib.quantize.plan import WorkUnit
from thor_dflash.calib.quantize.staged_checkpoint import Row
from thor_dflash.core.errors import EngineError

POLL = 0.2
"""Seconds from one look at the progress to the next."""
PR_SET_PDEATHSIG = 1
"""Source: Linux, prctl(2)."""


class Advance(Protocol):
    """Takes the progress of a unit."""

    def advance(self, n: int) -> None:
        """Report that `n` more bytes are read."""
        ...


Work = Callable[[WorkUnit, Advance], Row]


class _Stopped(Exception):
    """Another unit has failed, or the run was interrupted."""


class _Shared:
    """Progress that the processes add up, and the order to stop."""

    def __init__(self, context: ForkContext) -> None:
        self._moved: Synchronized[int] = context.Value("q", 0)
        self._stop = context.Event()

    def advance(self, n: int) -> None:
        """See Advance."""
        with self._moved.get_lock():
            self._moved.value += n
        if self._stop.is_set():
            raise _Stopped

    def take(self) -> int:
        """Return the bytes since the last call."""
        with self._moved.get_lock():
            found, self._moved.value = self._moved.value, 0
        return found

    def stop(self) -> None:
        """Have every unit end at its next progress."""
        self._stop.set()


_work: tuple[Work, _Shared] | None = None
"""In a process of the pool: its work."""


def run_units(
    units: Sequence[WorkUnit],
    count: int,
    begin: Callable[[], None],
    work: Work,
    task: Advance,
    finished: Callable[[Row], None],
) -> None:
    """Run units in `count` forked processes, the largest first, and pass on the row of each.

    begin: called in each process first.
    Raises: what a unit raises; EngineError if a process is killed.
    """
    context = multiprocessing.get_context("fork")
    shared = _Shared(context)
    with ProcessPoolExecutor(count, context, _begin, (begin, work, shared)) as pool:
        waiting = {pool.submit(_run, unit) for unit in sorted(units, key=lambda u: -u.reads)}
        try:
            while waiting:
                done, waiting = wait(waiting, POLL, FIRST_COMPLETED)
                task.advance(shared.take())
                for one in done:
                    finished(one.result())
        except BrokenProcessPool as e:
            raise EngineError(
                "the processes of quantize must not be killed (got: one was; is there enough "
                "memory for quantize.threads of them?); the same command continues"
            ) from e
        finally:
            shared.stop()
            pool.shutdown(cancel_futures=True)


def _begin(begin: Callable[[], None], work: Work, shared: _Shared) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process's
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    begin()
    _work = work, shared


def _run(unit: WorkUnit) -> Row:
    assert _work is not None
    work, shared = _work
    return work(unit, shared)
