"""What the rest of the world may know: a Session answers Requests with Chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thor_dflash import manifest as package_manifest
from thor_dflash.config import EngineConfig
from thor_dflash.errors import ConfigError, RequestError
from thor_dflash.manifest import Manifest
from thor_dflash.progress import Progress as Reporter
from thor_dflash.runtime.block import Limit, Policy, Progress
from thor_dflash.runtime.decode import Chunk, Plan, check, decode
from thor_dflash.runtime.engine import Engine
from thor_dflash.runtime.engines.ort import OrtEngine
from thor_dflash.runtime.model import Model
from thor_dflash.runtime.propose import Dflash, Nobody, Proposer
from thor_dflash.runtime.telemetry import Meter, Report
from thor_dflash.runtime.text import Text

__all__ = ["Chunk", "Report", "Request", "Session", "open_session"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to answer."""

    prompt: tuple[int, ...]
    max_tokens: int
    stop: frozenset[int] = frozenset()
    drafter: Literal["dflash", "none"] = "dflash"


class Session:
    """A package loaded on one engine. One sequence at a time."""

    def __init__(self, model: Model, text: Text | None) -> None:
        self.model = model
        self.text = text
        """None where the package has no tokenizer."""
        self._meter: Meter | None = None
        self._report: Report | None = None

    @property
    def manifest(self) -> Manifest:
        """What the package is."""
        return self.model.manifest

    def generate(self, request: Request) -> Iterator[Chunk]:
        """Answer one request. Close the iterator to cancel.

        Raises:
            RequestError: at once; the request does not fit this session and nothing was decoded.
            ModelFault: while iterating; the model had no usable choice.
        """
        if request.drafter == "dflash" and self.manifest.drafter is None:
            raise RequestError("drafter must be none, the package has no drafter (got dflash)")
        proposer = Dflash() if request.drafter == "dflash" else Nobody()
        return self.run(request, proposer)

    def run(
        self, request: Request, proposer: Proposer, policies: tuple[Policy, ...] = ()
    ) -> Iterator[Chunk]:
        """Answer one request with any proposer and policies."""
        stop = tuple(sorted(request.stop))
        check(self.model, request.prompt, request.max_tokens, stop)
        plan = Plan(
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            stop=stop,
            proposer=proposer,
            policies=(*policies, Limit(request.max_tokens)),
        )
        return self._answer(plan)

    def _answer(self, plan: Plan) -> Iterator[Chunk]:
        engine, self._report = self.model.engine, None
        meter = Meter(self.model.block, engine.busy())
        progress, finish = Progress(prompt=plan.prompt), "cancelled"
        try:
            for chunk in decode(self.model, plan, progress, meter):
                finish = chunk.finish or finish
                yield chunk
        except Exception:
            finish = "error"
            raise
        finally:
            self._report = meter.report(finish, len(progress.tokens), engine.busy())

    def report(self) -> Report:
        """Telemetry of the last request that ended.

        Raises:
            RequestError: none has.
        """
        if self._report is None:
            raise RequestError("report must follow a request that ended (got none)")
        return self._report

    def close(self) -> None:
        """Free the engine. Idempotent."""
        self.model.engine.close()


def open_session(package: Path, config: EngineConfig, progress: Reporter) -> Session:
    """Check a package and load it.

    Raises:
        PackageError: it is damaged or of another version.
        ConfigError: the options do not fit it.
        EngineError: its graphs do not run here.
    """
    found = package_manifest.read(package)
    package_manifest.verify(package, found, progress)
    capacity = config.capacity or found.capacity
    if not found.block < capacity <= found.target.max_position:
        raise ConfigError(
            f"engine.capacity must be {found.block + 1} to "
            f"{found.target.max_position}, the model's longest (got {capacity})"
        )
    engine = _ENGINES[found.engine](package, config)
    with progress.task("loading graphs"):
        model = Model(engine, found, capacity)
    return Session(model, Text.load(package) if found.tokenizer else None)


def _ort(package: Path, config: EngineConfig) -> Engine:
    return OrtEngine(package, config.threads)


_ENGINES: dict[str, Callable[[Path, EngineConfig], Engine]] = {"ort": _ort}
