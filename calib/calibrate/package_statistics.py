"""Runs documents through a package on its own engine, and sums up what its linears receive and its
caches hold.

Tokens run in verify blocks, each committed whole: a prefill graph ends before the last layer's
products, whose results no later token reads.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

import thor_dflash
from thor_dflash.calib.calibrate.activations import ActivationSums
from thor_dflash.calib.calibrate.observed_steps import (
    ObservedStep,
    ProgramObserver,
    StepObserver,
)
from thor_dflash.calib.quantize.statistics import norms_fingerprint, statistics_file
from thor_dflash.core.progress import Progress
from thor_dflash.core.tensors import Array
from thor_dflash.package.manifest import Manifest, identity
from thor_dflash.runtime.engines.protocol import Call, Engine
from thor_dflash.runtime.session import Session

ROWS = 64
"""Rows of each step that are held until all threads sum them up: 0.4 GB of the 27B, and as much
again that is being summed up."""


def observer(package: Path, engine: Engine) -> StepObserver:
    """Return the observer of an engine, ort or cuda. Imports lazily, as `tracer` does."""
    if type(engine).__name__ == "OrtEngine":
        from thor_dflash.calib.calibrate.graph_observer import GraphObserver
        from thor_dflash.runtime.engines.ort import OrtEngine

        assert isinstance(engine, OrtEngine)
        return GraphObserver(package, engine)
    from thor_dflash.calib.check.step_runner import StepRunner
    from thor_dflash.runtime.engines.cuda.engine import CudaEngine

    assert isinstance(engine, CudaEngine)
    return ProgramObserver(StepRunner(engine))


def package_statistics(
    session: Session,
    show: StepObserver,
    documents: Sequence[tuple[int, ...]],
    threads: int,
    progress: Progress,
) -> bytes:
    """Return the file of statistics of a package's target.

    documents: token ids, at least one each; none longer than the session's context.
    threads: of the sums; 0: every core.
    Raises: CheckpointError if activations are not finite.
    """
    model, total = session.model, sum(map(len, documents))
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        held = _HeldRows(show, pool, model.block)
        with progress.task("calibrating", total, "tokens") as task:
            for tokens in documents:
                model.state.reset()
                for begin in range(0, len(tokens), model.block):
                    part = tokens[begin : begin + model.block]
                    at = begin + np.arange(len(part))
                    model.write_tokens(part)
                    model.verify(partial(held.run, at=at))
                    model.state.commit(len(part))
                    task.advance(len(part))
        held.add()
        held.wait()
    kv_heads = session.manifest.target.attention.kv_heads
    inputs = {name: one for sums in held.sums.values() for name, one in sums.inputs().items()}
    cache = {
        int(step.split(".")[1]): one  # of layers.3.self_attn
        for step, sums in held.sums.items()
        if (one := sums.cache(kv_heads)) is not None
    }
    norms = norms_fingerprint(session.manifest.target.layers, show.weights.__getitem__)
    own = _metadata(session, documents)
    return statistics_file(inputs, cache, {"model": norms, **own})


def _metadata(session: Session, documents: Sequence[tuple[int, ...]]) -> dict[str, str]:
    manifest = session.manifest
    return {
        "tokens": str(sum(map(len, documents))),
        "documents": str(len(documents)),
        "corpus": hashlib.sha256(repr(documents).encode()).hexdigest(),
        "source": manifest.sources["target"].directory,
        "weights": " ".join(_weight_kinds(manifest)),
        "engine": f"{manifest.engine}, verify blocks of {session.model.block} rows, activations "
        f"{manifest.activations}, cache {manifest.kv}, on {session.model.engine.device}",
        "package": identity(manifest),
        "producer": f"thor-dflash {thor_dflash.__version__}",
    }


def _weight_kinds(manifest: Manifest) -> list[str]:
    """Return the kinds of weights of the target's linears."""
    # Those of a drafter and of a vision tower have a prefix.
    kinds = (kind for name, kind in manifest.quantisation.items() if "." not in name)
    return sorted({kind for found in kinds for kind in found})


@dataclass(slots=True)
class _HeldRows:
    """Rows of steps, until there are ROWS of each."""

    show: StepObserver
    pool: ThreadPoolExecutor
    block: int
    """Rows of a step, with the padding."""
    sums: dict[str, ActivationSums] = field(default_factory=dict[str, ActivationSums])
    """Step -> its sums."""
    steps: dict[str, list[ObservedStep]] = field(default_factory=dict[str, list[ObservedStep]])
    at: list[Array] = field(default_factory=list[Array])
    """Positions of the rows that count, of each block."""
    adding: list[Future[None]] = field(default_factory=list["Future[None]"])

    def run(self, call: Call, at: Array) -> None:
        """Run a verify whose first rows are at these positions; the others are padding."""
        for step in self.show.run(call):
            self.steps.setdefault(step.name, []).append(step)
        self.at.append(at)
        if len(self.at) * self.block >= ROWS:
            self.add()

    def add(self) -> None:
        """Begin to add the rows to the sums, each step in a thread, while the next blocks run."""
        self.wait()
        for name in self.steps:
            self.sums.setdefault(name, ActivationSums())
        self.adding = [self.pool.submit(self._add, x, self.at) for x in self.steps.values()]
        self.steps, self.at = {}, []

    def wait(self) -> None:
        """Wait until all rows before those held are in the sums, and raise what went wrong."""
        for one in self.adding:
            one.result()

    def _add(self, steps: Sequence[ObservedStep], positions: Sequence[Array]) -> None:
        # A block at a time: its temporaries stay in a core's cache.
        for step, at in zip(steps, positions, strict=True):
            x = {port: rows[: len(at)] for port, rows in step.rows.items()}
            x |= {port: self.show.weights[name] for port, name in step.weights.items()}
            self.sums[step.name].step(step.op, step.name, x, step.attributes, at)
