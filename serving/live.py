"""The backend over a session: the decode loop, one step at a time."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

from thor_dflash import manifest as package_manifest
from thor_dflash.config import ServeConfig
from thor_dflash.errors import ModelFault, RequestError
from thor_dflash.runtime.propose import Dflash, Nobody, Proposer
from thor_dflash.runtime.session import Request, Session
from thor_dflash.runtime.text import Text
from thor_dflash.serving import fields, policies, wire
from thor_dflash.serving.backend import About, Prepared, Run
from thor_dflash.serving.liverun import LiveRun
from thor_dflash.serving.rates import MARGIN, Rates
from thor_dflash.serving.refusal import PlanError

SELF_TEST = "Self-test: put the cup on the table, then bring the plate to the kitchen."
SELF_TOKENS = 48
"""Tokens the self-test decodes three times: three blocks or more, and a second of a Thor."""
WORTH_THINKING = 32
"""Fewer tokens of thinking than this are not begun under `auto`."""


class LiveBackend:
    """A package loaded on an engine."""

    def __init__(self, session: Session, config: ServeConfig) -> None:
        """Take a session over.

        Raises:
            RequestError: its package has no tokenizer.
        """
        if session.text is None:
            raise RequestError("a package to serve must have a tokenizer (got one without)")
        self.session = session
        self.text: Text = session.text
        self.config = config
        self._rates = Rates(chunk_tokens=session.manifest.chunk)
        self._pins = policies.Pins(session, config.prefix_mb)
        self._grammars = policies.Grammars(session)
        self._golden: str | None = None

    @property
    def rates(self) -> Rates:
        """See Backend."""
        return self._rates

    @property
    def about(self) -> About:
        """See Backend."""
        m = self.session.manifest
        tokenizer = m.files.get("tokenizer.json")
        return About(
            model=m.sources["target"].directory,
            engine=m.engine,
            quantisation={
                name: {kind: share.bytes for kind, share in kinds.items()}
                for name, kinds in m.quantisation.items()
            },
            package_sha256=hashlib.sha256(package_manifest.render(m).encode()).hexdigest(),
            tokenizer_sha256=tokenizer.sha256 if tokenizer else None,
            golden_sha256=self._golden,
            max_context=self.session.model.limit,
            block=m.block,
            features=policies.FEATURES,
        )

    def proposer(self) -> Proposer:
        """Who guesses."""
        return Dflash() if self.session.manifest.drafter else Nobody()

    def warm(self) -> None:
        """See Backend. Speculation must give the very tokens of plain decoding, twice."""
        prompt = self._prompt([{"role": "user", "content": SELF_TEST}], thinking=True)
        count = min(SELF_TOKENS, self.session.model.limit - len(prompt))
        request = Request(prompt=prompt, max_tokens=max(1, count))
        plain = self._decode(request, Nobody())
        for _ in range(2):
            self._rates = Rates(chunk_tokens=self.session.manifest.chunk)
            if self._decode(request, self.proposer()) != plain:
                raise ModelFault(
                    "the self-test must decode the same tokens with and without the drafter "
                    "(got others): the package or the machine is damaged"
                )
        self._grammars.warm()
        self._golden = hashlib.sha256(repr(plain).encode()).hexdigest()

    def _decode(self, request: Request, proposer: Proposer) -> tuple[int, ...]:
        tokens: list[int] = []
        last = time.perf_counter()
        for chunk in self.session.run(request, proposer):
            now = time.perf_counter()
            tokens += chunk.tokens
            if chunk.prompt_done:
                self._rates.chunk(1e3 * (now - last))
            else:
                self._rates.cycle(1e3 * (now - last), len(chunk.tokens), thinking=False)
            last = now
        return tuple(tokens)

    def prepare(self, ask: wire.Ask, left_ms: float | None) -> Prepared:
        """See Backend."""
        fields.check_values(ask)
        max_tokens = ask.max_tokens or self.config.max_tokens
        started = time.perf_counter()
        schema = fields.schema_of(ask)
        grammar = None if schema is None else self._grammars.compile(schema)
        grammar_ms = 1e3 * (time.perf_counter() - started)
        messages = fields.messages_of(ask.prompt, ask.messages)
        budget = self._budget(ask, left_ms, messages, max_tokens)
        prompt = self._prompt(messages, thinking=budget > 0)
        cached = self._pins.cached(prompt, ask.prefix_id)
        room = self.session.model.limit - len(prompt) - max_tokens
        if room < 0:
            limit = self.session.model.limit
            raise PlanError(
                "prompt_too_long",
                f"prompt and max_tokens together must be <= {limit} tokens "
                f"(got {len(prompt)} + {max_tokens})",
                field="prompt",
            )
        return Prepared(
            ask=ask,
            prompt=prompt,
            cached=cached,
            max_tokens=max_tokens,
            budget=min(budget, policies.thinking_fits(self.session, room)),
            schema=schema,
            grammar=grammar,
            grammar_ms=grammar_ms,
            min_ms=self._rates.min_ms(
                len(prompt) - cached, max_tokens, whole=ask.on_deadline == "error"
            ),
        )

    def _budget(
        self, ask: wire.Ask, left_ms: float | None, messages: list[object], max_tokens: int
    ) -> int:
        mode = ask.thinking or self.config.thinking
        if mode == "off":
            return 0
        budget = fields.budget_of(ask, self.config.thinking_budget)
        if mode == "on" or left_ms is None or budget == 0:
            return budget
        prompt = len(self._prompt(messages, thinking=True))
        room = self._rates.thinking_room(left_ms, prompt, max_tokens)
        return budget if room >= min(WORTH_THINKING, budget) else 0

    def _prompt(self, messages: list[object], *, thinking: bool) -> tuple[int, ...]:
        try:
            return tuple(self.text.encode(self.text.render(messages, thinking)))
        except RequestError as e:
            raise PlanError("bad_request", str(e), field="messages") from e

    def start(self, prepared: Prepared, left_ms: float | None) -> Run:
        """See Backend."""
        budget = prepared.budget
        if left_ms is not None:
            # By the clock of this moment: the request may have waited in the queue.
            new = len(prepared.prompt) - prepared.cached
            room = self._rates.thinking_room(left_ms, new, prepared.max_tokens)
            budget = min(budget, room)
        allowed = prepared.max_tokens
        if prepared.budget:
            allowed += policies.thinking_tokens(self.session, budget)
        shaping = policies.compose(self.session, prepared, budget)
        request = Request(
            prompt=prepared.prompt,
            max_tokens=allowed,
            stop=frozenset(self.session.manifest.stop_tokens),
        )
        chunks = self._pins.run(request, self.proposer(), shaping.policies, prepared)
        return LiveRun(self.session, self.text, self._rates, prepared, shaping, chunks)

    def validate(self, request: wire.Validate) -> dict[str, Any]:
        """See Backend."""
        out: dict[str, Any] = {"max_context": self.session.model.limit}
        if request.prompt is not None or request.messages is not None:
            messages = fields.messages_of(request.prompt, request.messages)
            out["prompt_tokens"] = len(self._prompt(messages, thinking=True))
        if request.json_schema is not None:
            fields.check_values(wire.Ask(json_schema=request.json_schema))
            started = time.perf_counter()
            self._grammars.compile(request.json_schema)
            out["compile_ms"] = 1e3 * (time.perf_counter() - started)
        return out

    def pin(self, request: wire.PrefixPut, stopped: Callable[[], bool]) -> dict[str, Any]:
        """See Backend."""
        return self._pins.put(request, stopped)

    def prefixes(self) -> list[dict[str, Any]]:
        """See Backend."""
        return self._pins.list()

    def drop(self, prefix_id: str) -> bool:
        """See Backend."""
        return self._pins.drop(prefix_id)

    def close(self) -> None:
        """See Backend."""
        self.session.close()
