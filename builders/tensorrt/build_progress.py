"""Shows the phases of an engine build as progress bars."""

# tensorrt is not installed where the checkers run: the tests check this file against its bindings.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from threading import Lock

import tensorrt as trt

from thor_dflash.core.progress import Progress, ProgressTask

DEPTH = 2
"""Levels of phases that are shown; deeper ones change too fast to be read."""


class BuildProgress(trt.IProgressMonitor):
    """Shows the phases of a build as tasks. An exception in a callback, such as a keyboard
    interrupt, ends the build.
    """

    def __init__(self, name: str, progress: Progress) -> None:
        trt.IProgressMonitor.__init__(self)
        self.stop: BaseException | None = None
        """The exception raised in a callback; it cannot propagate through TensorRT's frames."""
        self._name = name
        self._progress = progress
        self._lock = Lock()
        self._depth: dict[str, int] = {}
        self._tasks: dict[str, ProgressTask] = {}

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

    def close(self) -> None:
        """End the phases that a failed build left open."""
        for name in list(self._tasks):
            self.phase_finish(name)
