"""What the rest of the world may know: a Session answers Requests with Chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
from thor_dflash.runtime.policies.grammar import Constrain, Place
from thor_dflash.runtime.policies.grammar_compile import Grammar, Grammars
from thor_dflash.runtime.prefix import Prefixes
from thor_dflash.runtime.propose import Dflash, Nobody, Proposer
from thor_dflash.runtime.telemetry import Meter, Report
from thor_dflash.runtime.text import Text, open_at_end

__all__ = ["Chunk", "Report", "Request", "Session", "open_session"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to answer."""

    prompt: tuple[int, ...]
    max_tokens: int
    stop: frozenset[int] = frozenset()
    drafter: Literal["dflash", "none"] = "dflash"
    grammar: Grammar | None = None
    """What the answer after the thinking must obey; of Session.grammar."""


class Session:
    """A package loaded on one engine. One sequence at a time."""

    def __init__(self, model: Model, text: Text | None) -> None:
        self.model = model
        self.text = text
        """None where the package has no tokenizer."""
        self.prefixes = Prefixes(model)
        """States that requests continue from. The longest that fits a prompt is used."""
        self._grammars: Grammars | None = None
        self._meter: Meter | None = None
        self._report: Report | None = None

    @property
    def manifest(self) -> Manifest:
        """What the package is."""
        return self.model.manifest

    def grammar(self, schema: str | Mapping[str, Any]) -> Grammar:
        """Compile a JSON schema, or find it compiled. Any thread may ask.

        The first call also builds the vocabulary: a second for 250 000 ids.

        Raises:
            RequestError: the schema is not supported, or the package has no tokenizer.
        """
        if self._grammars is None:
            if self.text is None:
                raise RequestError("schema must be for a package with a tokenizer (got one without)")
            manifest = self.manifest
            self._grammars = Grammars(self.text, manifest.vocab_limit, manifest.stop_tokens)
        return self._grammars.compile(schema)

    def generate(self, request: Request) -> Iterator[Chunk]:
        """Answer one request. Close the iterator to cancel.

        Raises:
            RequestError: at once; the request does not fit this session and nothing was decoded.
            ModelFault: while iterating; the model had no usable choice.
        """
        if request.drafter == "dflash" and self.manifest.drafter is None:
            raise RequestError("drafter must be none, the package has no drafter (got dflash)")
        proposer = Dflash() if request.drafter == "dflash" else Nobody()
        return self.run(request, proposer, self._constrain(request))

    def _constrain(self, request: Request) -> tuple[Policy, ...]:
        grammar, text = request.grammar, self.text
        if grammar is None or text is None:
            return ()
        if missing := grammar.vocabulary.stop - request.stop:
            raise RequestError(
                f"stop must hold the ids a grammar ends with (got none of {sorted(missing)})"
            )
        return (Constrain(grammar, Place(thinking=open_at_end(text, request.prompt))),)

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
            prefix=self.prefixes.use(request.prompt),
        )
        return self._answer(plan)

    def _answer(self, plan: Plan) -> Iterator[Chunk]:
        engine, self._report = self.model.engine, None
        cached = plan.prefix.length if plan.prefix else 0
        meter = Meter(self.model.block, engine.busy(), cached)
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
