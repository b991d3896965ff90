"""Shows the phases of an engine build as progress bars, and ends it on Ctrl-C."""

# tensorrt is not installed where the checkers run: the tests check this file against its bindings.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import signal
from collections.abc import Callable
from threading import Lock, current_thread, main_thread
from types import FrameType
from typing import Any, Self

import tensorrt as trt

from thor_dflash.core.progress import Progress, ProgressTask

DEPTH = 2
"""Levels of phases that are shown; deeper ones change too fast to be read."""


class BuildProgress(trt.IProgressMonitor):
    """Shows the phases of a build as tasks. Use as a context manager around the build: until it
    ends, Ctrl-C raises nothing, which would be lost in whatever callback of TensorRT runs, or crash
    it. The build ends at its next step instead, and `__exit__` raises the interrupt. A second one
    ends the process.
    """

    def __init__(self, name: str, progress: Progress) -> None:
        trt.IProgressMonitor.__init__(self)
        self.stop: BaseException | None = None
        """The exception raised in a callback, which cannot propagate through TensorRT's frames, or
        an interrupt.
        """
        self._before: Callable[[int, FrameType | None], Any] | int | None = None
        self._name = name
        self._progress = progress
        self._lock = Lock()
        self._depth: dict[str, int] = {}
        self._tasks: dict[str, ProgressTask] = {}

    def __enter__(self) -> Self:
        if current_thread() is main_thread():  # no other thread gets signals
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.stop = KeyboardInterrupt()
        signal.signal(number, signal.SIG_DFL)

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        for name in list(self._tasks):  # phases that a failed build left open
            self.phase_finish(name)
        if self.stop is not None:
            raise self.stop

    def phase_start(self, phase_name: str, parent_phase: str, num_steps: int) -> None:
        """Called by TensorRT. `parent_phase` is None at the top level, despite its type stub."""
        try:
            with self._lock:
                depth = self._depth.get(parent_phase, 0) + 1
                self._depth[phase_name] = depth
                if depth > DEPTH or phase_name in self._tasks:
                    return
                task = self._progress.task(f"{self._name}: {phase_name}", num_steps, "steps")
                self._tasks[phase_name] = task.__enter__()
        except BaseException as e:
            self.stop = e

    def step_complete(self, phase_name: str, step: int) -> bool:
        """Called by TensorRT; returning False ends the build."""
        try:
            with self._lock:
                if phase_name in self._tasks:
                    self._tasks[phase_name].advance(1)
        except BaseException as e:
            self.stop = e
        return self.stop is None

    def phase_finish(self, phase_name: str) -> None:
        """Called by TensorRT, also for a phase that was ended early."""
        try:
            with self._lock:
                self._depth.pop(phase_name, None)
                task = self._tasks.pop(phase_name, None)
            if task is not None:
                task.__exit__(None, None, None)
        except BaseException as e:
            self.stop = e
