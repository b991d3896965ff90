"""One request on a session: its steps, the chunks to send for them, and the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import cast

from thor_dflash.core.results import Timings, Usage
from thor_dflash.runtime.decoding.block import DecodeFinish
from thor_dflash.runtime.measure.power import PowerSampler
from thor_dflash.runtime.session import RequestReport, Session, TokenChunk
from thor_dflash.runtime.text.tokenizer import Answer, Tokenizer
from thor_dflash.serving.planner import result as outcome
from thor_dflash.serving.planner.backend import Prepared, StopReason
from thor_dflash.serving.planner.chunk_stream import ChunkWriter
from thor_dflash.serving.planner.latency_model import LatencyModel
from thor_dflash.serving.planner.request_images import image_results
from thor_dflash.serving.protocol import messages


class SessionRun:
    """See backend.Run."""

    def __init__(
        self,
        session: Session,
        text: Tokenizer,
        rates: LatencyModel,
        prepared: Prepared,
        chunks: Iterator[TokenChunk],
        watch: PowerSampler,
        yield_s: float = 0.0,
        ended: Callable[[Prepared, outcome.Decoded], None] = lambda prepared, decoded: None,
    ) -> None:
        self._session = session
        self._rates = rates
        self._prepared = prepared
        self._forced = prepared.admitted is not None and prepared.admitted.forced is not None
        self._chunks = chunks
        self._yield_s = yield_s
        self._ended = ended
        self._phase: messages.Phase = "prefill"
        self._answer = Answer(text, prepared.prompt, prepared.tools)
        self._writer = ChunkWriter(prepared.ask.stream, prepared.format)
        self._tokens: list[int] = []
        self._finish: messages.Finish | None = None
        self._cycles = 0
        """Cycles since the first token of the answer."""
        self._begun = False
        self._start = time.perf_counter()
        self._watch = watch
        watch.start()

    @property
    def done(self) -> bool:
        return self._finish is not None

    @property
    def phase(self) -> messages.Phase:
        return self._phase

    def step(self) -> Sequence[messages.Chunk]:
        before = time.perf_counter()
        self._begun = True
        if self._yield_s:
            time.sleep(self._yield_s)  # measured as part of the step: deadlines must allow for it
        chunk = next(self._chunks)
        ms = 1e3 * (time.perf_counter() - before)
        if chunk.encoded:
            self._rates.encoded(ms, chunk.encoded)
            return ()
        if chunk.prompt_done:
            self._rates.step(ms, chunk.prompt_rows)
            return self._writer.prefill(chunk.prompt_done)
        thinking = self._prepared.thinks and not self._answered
        self._phase = "thinking" if thinking else "answer"
        # An assumed acceptance is not what the next answer will have.
        self._rates.cycle(ms, 0 if self._forced else len(chunk.tokens), thinking=thinking)
        self._tokens += chunk.tokens
        pieces = self._answer.feed(chunk.tokens)
        self._cycles += self._answered > 0
        if not self._forced:
            self._rates.accepted(self._answered, self._cycles)
        if chunk.finish:
            self._finish = self._named(chunk.finish)
            pieces += self._answer.end()
        calls = self._answer.take_calls()
        return self._writer.cycle(pieces, len(self._tokens), calls)

    @property
    def _answered(self) -> int:
        return len(self._tokens) - self._answer.thinking_tokens

    def _named(self, finish: DecodeFinish) -> messages.Finish:
        if self._forced:
            return "forced"
        if finish == "stop" or finish == "grammar_dead_end":
            return finish
        return "length" if self._answered or not self._prepared.thinks else "thinking_exhausted"

    def result(self, stop: StopReason | None) -> messages.Result:
        self.close()
        report = self._report()
        now = time.perf_counter()
        finish = self._finish or stop or "error"
        if finish == "stop":
            self._rates.plan(1e3 * (now - self._start), self._answered)
        decoded = outcome.Decoded(
            finish=finish,
            text=self._answer.text(),
            thinking=self._answer.thinking(),
            tokens=tuple(self._tokens),
            usage=Usage(
                prompt_tokens=len(self._prepared.prompt),
                cached_tokens=report.usage.cached_tokens if report else 0,
                thinking_tokens=self._answer.thinking_tokens,
                output_tokens=self._answered,
            ),
            timings=self._timings(report, now),
            spec=report.spec if report else None,
            closed=report.close if report else "",
            calls=self._answer.calls,
            reuse=report.reuse if report else None,
            images=self._images(),
        )
        self._ended(self._prepared, decoded)
        return outcome.result(self._prepared, decoded)

    def _images(self) -> tuple[messages.ImageResult, ...] | None:
        admitted = self._prepared.admitted
        images = admitted.images if admitted else None
        if images is None:
            return None
        spent = {images.pictures[n].digest: ms for n, ms in images.encode_ms.items()}
        return image_results(self._prepared.pictures, spent)

    def _report(self) -> RequestReport | None:
        # Before the first step, the session's report is still that of the previous request.
        return self._session.report() if self._begun else None

    def _timings(self, report: RequestReport | None, now: float) -> Timings:
        e2e, grammar_ms = 1e3 * (now - self._start), self._prepared.grammar_ms
        if report is None:
            return Timings(e2e_ms=e2e, grammar_ms=grammar_ms)
        energy = self._energy(now)
        return replace(report.timings, e2e_ms=e2e, grammar_ms=grammar_ms, energy_j=energy)

    def _energy(self, now: float) -> dict[str, float] | None:
        power = self._watch.power([(self._start, now)])
        # After a failed reading the energy of a part would look like that of the whole plan.
        return None if power.failed else {rail.name: rail.joules for rail in power.rails} or None

    def close(self) -> None:
        cast("Generator[TokenChunk]", self._chunks).close()
        self._watch.stop()
