"""The public interface of the runtime: a Session answers Requests with Chunks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import EngineError, OutOfMemory, PackageError, RequestError
from thor_dflash.core.extras import extra
from thor_dflash.core.progress import Progress as Reporter
from thor_dflash.core.progress import amount
from thor_dflash.package import manifest as package_manifest
from thor_dflash.package.manifest import Manifest
from thor_dflash.runtime.decoding.block import DecodeProgress, Policy
from thor_dflash.runtime.decoding.loop import DecodeRequest, TokenChunk, decode
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.mtp import own_drafter
from thor_dflash.runtime.decoding.proposers import Proposer
from thor_dflash.runtime.decoding.telemetry import RequestMeter, RequestReport
from thor_dflash.runtime.engines import resolve_options
from thor_dflash.runtime.engines.memory_estimate import per_token, shorter
from thor_dflash.runtime.engines.protocol import Engine
from thor_dflash.runtime.grammar.compiler import Grammar, Grammars
from thor_dflash.runtime.grammar.schema import JsonSchema
from thor_dflash.runtime.grammar.tools import ToolUse
from thor_dflash.runtime.session.admission import (
    Admission,
    Admitted,
    PackageText,
    Request,
    check_request,
    resolve_sampling,
)
from thor_dflash.runtime.session.prefix_cache import PrefixCache
from thor_dflash.runtime.session.recent_answers import RecentAnswers
from thor_dflash.runtime.session.turn_cache import Conversation, TurnCache, TurnStart
from thor_dflash.runtime.text.thinking import Marks
from thor_dflash.runtime.text.tokenizer import Tokenizer
from thor_dflash.runtime.vision.encoder_cache import EncoderCache
from thor_dflash.runtime.vision.picture import Picture
from thor_dflash.runtime.vision.prompt_images import PromptImages

__all__ = ["Request", "RequestReport", "Session", "TokenChunk", "open_session"]


FINALISER_S = 10.0
"""Longest wait at the end of a request for a step of another thread; longer than any step takes."""


class Session:
    """A package loaded on one engine. One sequence at a time: a request ends the one under way,
    also that of another thread.
    """

    def __init__(
        self, model: ModelRunner, tokenizer: Tokenizer | None, choice: tuple[int, ...] = ()
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        """None if the package has no tokenizer."""
        self.choice = choice or (model.chunk,)
        """Values that `model.chunk` may be set to before the first request, in rows."""
        self.prefixes = PrefixCache(model)
        """Stored states that requests continue from. The longest one matching a prompt is used."""
        self.turns = TurnCache(model)
        """States of earlier prompts that requests continue from, kept automatically."""
        vision, sizes = model.manifest.vision, model.manifest.image_patches
        self.encoder = EncoderCache(vision, sizes) if vision else None
        """Images and the vision tower; None if the package has none."""
        self._grammars: Grammars | None = None
        self.answers = RecentAnswers()
        """Answers of earlier requests, by conversation, if they name one."""
        self._admission = Admission(model, tokenizer, self.answers)
        self._report: RequestReport | None = None

    @property
    def manifest(self) -> Manifest:
        """The package's manifest."""
        return self.model.manifest

    @property
    def package_text(self) -> PackageText:
        """What prompts are made and measured with."""
        return PackageText(self.manifest, self.tokenizer, self.model.capacity)

    @property
    def drafter(self) -> Literal["dflash", "mtp", "none"]:
        """The default of a request's drafter: the package's, if it has one."""
        return self.manifest.own_drafter

    def grammar(self, schema: str | Mapping[str, Any] | JsonSchema) -> Grammar:
        """Compile a JSON schema, or return it from the cache. Thread-safe.

        The first call also builds the vocabulary, which takes one second for 250 000 ids.

        Raises:
            RequestError: the schema is not supported, or the package has no tokenizer.
            CompilerBusy: as `Grammars.compile`.
        """
        return self._compiler().compile(schema)

    def call_grammar(self, use: ToolUse, answer: JsonSchema | None = None) -> Grammar:
        """As `grammar`, of the tool calls of a request, or of an answer given instead of them."""
        return self._compiler().compile_calls(use, answer)

    def lark_grammar(self, lark: str) -> Grammar:
        """As `grammar`, of a text of llguidance's Lark that this program made."""
        return self._compiler().compile_lark(lark)

    def _compiler(self) -> Grammars:
        if self._grammars is None:
            if self.tokenizer is None:
                raise RequestError(
                    "schema must be used with a package that has a tokenizer (got one without)"
                )
            manifest = self.manifest
            self._grammars = Grammars(self.tokenizer, manifest.vocab_limit, manifest.stop_tokens)
        return self._grammars

    def images(self, ids: Sequence[int], pictures: Sequence[Picture]) -> PromptImages | None:
        """Put images into a prompt, for a request; None if there are none. Thread-safe.

        Raises:
            RequestError: the package sees no images, or the prompt has another number of them.
        """
        if self.encoder is None:
            if not pictures:
                return None
            raise RequestError(
                f"images must be left out: the package has no vision tower (got {len(pictures)})"
            )
        return self.encoder.insert(ids, pictures)

    def admit(self, request: Request) -> Admitted:
        """Check a request and resolve its options, without starting it. The boundary that it would
        continue from stays until it begins, or until what this returns is gone. Thread-safe.

        Raises:
            RequestError: it does not fit this session.
        """
        admitted = self._admission.admit(request)
        return replace(admitted, lease=self.turns.lease(request.prompt, request.conversation.scope))

    def held(self, prompt: Sequence[int], scope: str = "") -> int:
        """Tokens of a prompt that a request of this scope would not read now. Thread-safe."""
        prefix = self.prefixes.find(prompt)
        return max(self.turns.held(prompt, scope), prefix.held if prefix else 0)

    def generate(self, request: Request | Admitted) -> Iterator[TokenChunk]:
        """Answer one request, which is admitted first unless it has been. Close the iterator to
        cancel.

        Raises:
            RequestError: at the call, as `admit`; nothing was decoded.
            ModelFault: while iterating; the model had no usable choice.
        """
        admitted = self.admit(request) if isinstance(request, Request) else request
        return self._answer(admitted, admitted.policies())

    def read_ahead(
        self,
        prompt: tuple[int, ...],
        conversation: Conversation,
        stopped: Callable[[], bool] = lambda: False,
    ) -> int:
        """Prefill a prompt up to its boundary "prompt", as far as whole chunks go, and keep the
        state there, for a later request that begins alike. Like a request it ends the one under
        way; `stopped` is called before each step. Returns the tokens read.
        """
        model, chunk = self.model, self.model.chunk
        last = max((at for at, kind in conversation.boundaries if kind == "prompt"), default=0)
        end = min(last, len(prompt) - 1, model.limit) // chunk * chunk
        prompt = prompt[: end + 1]
        if not model.reuse or self.held(prompt, conversation.scope) >= end or stopped():
            return 0
        silent, prefix = replace(conversation, boundaries=()), self.prefixes.use(prompt)
        start = TurnStart(self.turns, prompt, end + model.block, silent, prefix, ahead=True)
        request = DecodeRequest(
            prompt=prompt,
            max_tokens=1,
            max_answer=1,
            stop=(),
            proposer=own_drafter(self.manifest),
            policies=(),
            start=start,
        )
        meter = RequestMeter(model.block, {})
        steps = cast("Generator[TokenChunk]", decode(model, request, DecodeProgress(prompt), meter))
        done = 0
        with closing(steps):
            for step in steps:
                done = step.prompt_done
                if done >= end or stopped():
                    break
        with model.alone:
            start.keep(done // chunk, "prompt")
        read = max(0, done - start.report.held)
        self.turns.totals.ahead += read
        return read

    def run(
        self, request: Request, proposer: Proposer, policies: tuple[Policy, ...] = ()
    ) -> Iterator[TokenChunk]:
        """Answer one request with the given proposer and policies; the request's own drafter and
        policy options are ignored.
        """
        stop = tuple(sorted(request.stop))
        check_request(self.model, request, request.max_tokens, stop)
        admitted = Admitted(
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            max_answer=request.max_answer or request.max_tokens,
            stop=stop,
            proposer=proposer,
            opening=self._admission.opening(request),
            conversation=request.conversation,
            sampling=resolve_sampling(request.sampling),
            images=request.images,
        )
        return self._answer(admitted, (*policies, *admitted.policies()))

    def _answer(self, admitted: Admitted, policies: tuple[Policy, ...]) -> Iterator[TokenChunk]:
        model = self.model
        rows = len(admitted.prompt) + admitted.max_tokens + max(model.block, model.chunk)
        # Now, not at the first step: the prefix stays reachable if it is dropped meanwhile.
        prefix = self.prefixes.use(admitted.prompt)
        start = TurnStart(
            self.turns, admitted.prompt, rows, admitted.conversation, prefix, admitted.lease
        )
        request = DecodeRequest(
            prompt=admitted.prompt,
            max_tokens=admitted.max_tokens,
            max_answer=admitted.max_answer,
            stop=admitted.stop,
            proposer=admitted.proposer,
            policies=policies,
            marks=self._marks(admitted.opening),
            sampling=admitted.sampling,
            start=start,
            images=admitted.images,
            encoder=self.encoder,
        )
        return self._chunks(request, start)

    def _marks(self, opening: int) -> Marks | None:
        marks = self.tokenizer.marks if self.tokenizer else None
        return replace(marks, call=opening) if marks else None

    def _chunks(self, request: DecodeRequest, start: TurnStart) -> Iterator[TokenChunk]:
        engine, self._report = self.model.engine, None
        with self.model.alone:
            meter = RequestMeter(self.model.block, engine.busy())
        meter.sampling = request.sampling
        progress, finish = DecodeProgress(request.prompt, request.marks), "cancelled"
        emitted = 0
        try:
            for chunk in decode(self.model, request, progress, meter):
                finish = chunk.finish or finish
                emitted += len(chunk.tokens)
                yield chunk
        except Exception:
            finish = "error"
            raise
        finally:
            busy, meter.reuse = self._busy(), start.report
            if start.conversation.session:
                self.answers.keep(start.conversation.key, request.prompt, progress.tokens)
            self._report = meter.report(finish, progress, emitted, busy)

    def _busy(self) -> Mapping[str, float] | None:
        """Engine seconds by graph; None if another thread's step does not end. An abandoned request
        may be finalised in any thread, also in one that holds a lock for which that step waits.
        """
        if not self.model.alone.acquire(timeout=FINALISER_S):
            return None
        try:
            return self.model.engine.busy()
        finally:
            self.model.alone.release()

    def report(self) -> RequestReport:
        """Telemetry of the last request that ended.

        Raises:
            RequestError: no request has ended yet.
        """
        if self._report is None:
            raise RequestError(
                "report must follow a request that has ended (got a session where none has)"
            )
        return self._report

    def close(self) -> None:
        """Free the engine, once a step that another thread runs has ended. Idempotent."""
        with self.model.alone:
            self.model.engine.close()


def open_session(
    package: Path,
    config: EngineConfig,
    progress: Reporter,
    *,
    choose: bool = False,
    reuse: int = 0,
    check: Callable[[PackageText], object] | None = None,
) -> Session:
    """Check a package and load it, with every prefill step size up to the one that `config` names.
    `reuse` is the memory for the states of earlier turns, bytes, without which none are kept.
    With `choose`, if `config` names none, all sizes are loaded and the caller sets `model.chunk`
    before the first request. `check` may refuse what is to be asked before the engine is loaded,
    which takes seconds.

    Raises:
        PackageError: it is damaged, of another version, or was replaced meanwhile.
        ConfigError: the options do not fit it.
        EngineError: its graphs do not run here.
    """
    resolve_options.threads(config)
    found = package_manifest.read(package)
    capacity, block = resolve_options.capacity(config, found), resolve_options.block(config, found)
    chunk, sizes = resolve_options.chunk(config, found), (found.chunk, *found.chunks)
    choice = sizes if choose and not config.chunk else (chunk,)
    sizes = (chunk, *(rows for rows in sizes if rows != chunk and rows <= max(choice)))
    with ExitStack() as stack:
        try:
            with package_manifest.checking(package, found, progress):
                # Before the weights, so that a bad tokenizer is reported at once.
                tokenizer = Tokenizer.load(package) if found.tokenizer else None
                if check is not None:
                    check(PackageText(found, tokenizer, capacity))
                engine = _ENGINES[found.engine](package, config, progress)
                stack.callback(engine.close)
                model = ModelRunner(engine, found, capacity, block, sizes, reuse, progress)
            if package_manifest.read(package) != found:
                # What was loaded may be of either: files were opened one by one, by their names.
                raise PackageError(
                    f"{package} must stay as it is while it is loaded (got another package); "
                    "open it again"
                )
        except OutOfMemory as e:
            raise EngineError(f"{e}; {_remedy(found, capacity, e.lacks)}") from e
        stack.pop_all()
    return Session(model, tokenizer, choice)


def _remedy(found: Manifest, capacity: int, lacks: int) -> str:
    """Advice when a context of `capacity` tokens takes `lacks` bytes too many."""
    each = f"a token takes {amount(per_token(found), 'bytes')}"
    if fits := shorter(found, capacity, lacks):
        return f"lower engine.capacity from {capacity} to {fits}: {each}"
    return f"no engine.capacity is low enough (now {capacity}, {each}): build with fewer bits"


def _ort(package: Path, config: EngineConfig, progress: Reporter) -> Engine:
    with extra("ort"):
        from thor_dflash.runtime.engines.ort import OrtEngine

    return OrtEngine(package, config.threads)


def _cuda(package: Path, config: EngineConfig, progress: Reporter) -> Engine:
    from thor_dflash.runtime.engines.cuda.engine import CudaEngine

    return CudaEngine(package, config, progress)


def _tensorrt(package: Path, config: EngineConfig, progress: Reporter) -> Engine:
    try:
        from thor_dflash.runtime.engines.tensorrt.engine import TensorRTEngine
    except ImportError as e:
        raise EngineError(
            "engine tensorrt must have TensorRT's Python package; on a Jetson it comes with "
            f"JetPack: python3 -m venv --system-site-packages (got: {e})"
        ) from e
    return TensorRTEngine(package, config, progress)


_ENGINES: dict[str, Callable[[Path, EngineConfig, Reporter], Engine]] = {
    "ort": _ort,
    "cuda": _cuda,
    "tensorrt": _tensorrt,
}
"""Imported on demand: a machine installs only the engine that its packages need."""
