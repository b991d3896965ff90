"""The backend of a loaded package: turns plan requests into requests to a decoding session."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from thor_dflash.config.build import CLOSING_MESSAGE
from thor_dflash.config.decode import NO_BUDGET, BudgetConfig, RelaxedConfig
from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import PlanError, RequestError
from thor_dflash.core.message_text import show
from thor_dflash.core.progress import Progress, Silent
from thor_dflash.runtime.measure.power import PowerSampler, find_sensors
from thor_dflash.runtime.policies.forced_answer import ForcedAnswer
from thor_dflash.runtime.session import Request, Session
from thor_dflash.runtime.session.prefix_cache import Prefix
from thor_dflash.runtime.session.turn_cache import Conversation
from thor_dflash.runtime.text.prompt_segments import EncodedPrompt
from thor_dflash.runtime.text.tokenizer import Tokenizer, open_at_end
from thor_dflash.runtime.vision.picture import Picture
from thor_dflash.runtime.vision.prompt_images import PromptImages
from thor_dflash.serving.planner import self_test, startup_checks
from thor_dflash.serving.planner.answer_grammar import AnswerGrammars
from thor_dflash.serving.planner.answer_rule import rule_of
from thor_dflash.serving.planner.backend import PlanRun, Prepared
from thor_dflash.serving.planner.latency_model import LatencyModel
from thor_dflash.serving.planner.prefill_tuning import choose_chunk, step_ms
from thor_dflash.serving.planner.prefix_store import PrefixStore
from thor_dflash.serving.planner.request_images import (
    RecentPictures,
    count_tokens,
    read_pictures,
    rules_of,
    with_pictures,
)
from thor_dflash.serving.planner.request_prompt import PromptWriter
from thor_dflash.serving.planner.result import Decoded
from thor_dflash.serving.planner.session_info import describe, looks_up, relaxes
from thor_dflash.serving.planner.session_run import SessionRun
from thor_dflash.serving.planner.tool_request import tool_use
from thor_dflash.serving.protocol import errors, validation
from thor_dflash.serving.protocol import messages as wire
from thor_dflash.serving.protocol.errors import bad_request
from thor_dflash.serving.protocol.replies import EvictionCounts, ModelReply, ReuseCounts

WORTH_THINKING = 32
"""With thinking `auto` and a deadline, the model thinks only if there is time for this many tokens,
or for all of its budget."""
NO_PROMPT = EncodedPrompt((), "")
NO_PICTURES: Mapping[str, Picture] = {}


class SessionBackend:
    """A package loaded on an engine."""

    def __init__(
        self,
        session: Session,
        config: ServeConfig,
        log: Callable[[str], None] = print,
        store: PrefixStore | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Take over a session and, if prefixes can be persisted, the directory that stores them.

        Raises:
            RequestError: the package has no tokenizer.
        """
        assert (store is not None) == bool(config.prefix_dir), "what was promised to persist does"
        if session.tokenizer is None:
            raise RequestError("a package to serve must have a tokenizer.json (got one without)")
        self.session = session
        self.tokenizer: Tokenizer = session.tokenizer
        self.config = config
        self._log = log
        self._progress = progress or Silent()
        self._store = store
        self._skipped: tuple[str, ...] = ()
        own = session.manifest.own_drafter
        if config.drafter in ("dflash", "mtp") and config.drafter != own:
            raise RequestError(
                f"serve.drafter must be auto, lookup or {own}, the package's (got {config.drafter})"
            )
        session.prefixes.budget = config.prefix_mb << 20
        session.answers.each = config.recent_answers
        if session.encoder is not None:
            session.encoder.budget = config.image_mb << 20
        self._rates = LatencyModel(step_sizes=session.model.step_sizes)
        self._close = session.manifest.card.close or CLOSING_MESSAGE
        self._prompts = PromptWriter(session, session.tokenizer)
        self._grammars = AnswerGrammars(session, session.tokenizer)
        self._image_rules = rules_of(session.encoder, session.tokenizer, config)
        self._pictures = RecentPictures()
        self._closing = len(self.tokenizer.encode(self._close))
        self._idle_s = 1e-6 * config.yield_us  # before each step, whose time includes it
        self._golden: str | None = None
        self._answered: tuple[Prepared, Decoded] | None = None
        """The last answer, if it is to be read while the engine is idle."""
        self._sensors = find_sensors()
        self._about = self._described()

    @property
    def rates(self) -> LatencyModel:
        return self._rates

    @property
    def reuse(self) -> ReuseCounts:
        turns = self.session.turns
        counts = asdict(turns.totals)
        evicted = EvictionCounts(**counts.pop("evicted"))
        return ReuseCounts(**counts, evicted=evicted, boundaries=len(turns), bytes=turns.bytes)

    @property
    def about(self) -> ModelReply:
        return self._about

    def _described(self) -> ModelReply:
        return describe(self.session, self.tokenizer, self.config, self._golden)

    # --- warming up

    def warm(self) -> None:
        model = self.session.model
        prompt = self_test.prompt_of(self.session)
        self._check_default()
        limit, idle = self.config.cancel_ms, 1e3 * self._idle_s
        with self._progress.task("measuring prefill steps"):
            worst = choose_chunk(model, self.session.choice, limit, self._log, idle_ms=idle)
            towers = self_test.tower_ms(self.session)
            worst = max([worst, *(idle + ms for ms in towers.values())])
            startup_checks.check_watchdog(self.config.watchdog_s, worst)
            startup_checks.check_reuse(self.config.reuse_mb, self.session.turns)
            usual = [(idle + step_ms(model, rows, 0), rows) for rows in model.step_sizes]

        def latency_model() -> LatencyModel:
            rates = LatencyModel(step_sizes=model.step_sizes, worst_step_ms=worst)
            for ms, rows in usual:
                rates.step(ms, rows)
            for patches, ms in towers.items():
                rates.encoded(idle + ms, patches)
            return rates

        self._rates, self._golden = self_test.run(
            self.session, prompt, latency_model, self._idle_s, self._progress
        )
        self._about = self._described()
        if self._store is not None:
            self._skipped = tuple(self._store.load(self.session.prefixes))
            for line in self._skipped:
                self._log(f"a persisted prefix is left out: {line}")

    def _check_default(self) -> None:
        budget = validation.budget_of(wire.PlanRequest(), self.config)
        prompt = self._prompts.prompt(validation.messages_of("x", None), thinking=budget > 0).ids
        startup_checks.check_answer(
            self.config.max_tokens, self.session.model, len(prompt), self._close_len(prompt, budget)
        )

    # --- requests

    def read_images(self, ask: wire.PlanRequest, scope: str = "") -> Mapping[str, Picture]:
        return read_pictures(ask, self._image_rules, self._pictures, scope)

    def prepare(
        self,
        ask: wire.PlanRequest,
        left_ms: float | None,
        scope: str = "",
        pictures: Mapping[str, Picture] | None = None,
    ) -> Prepared:
        self._check(ask)
        max_tokens = ask.max_tokens or self.config.max_tokens
        rule, use = rule_of(ask), tool_use(ask, self.config.tools)
        grammar = self._grammars.of_answer(use, rule)
        pictures = self.read_images(ask, scope) if pictures is None else pictures
        encoded, budget = self._thinking_prompt(ask, left_ms, max_tokens, scope, pictures)
        prompt, limit = encoded.ids, self.session.model.limit
        closing = self._close_len(prompt, budget)
        self._check_prefix(prompt, ask.prefix_id)
        spare = limit - len(prompt) - max_tokens - closing
        if spare < 0:
            raise errors.too_long(limit, len(prompt), max_tokens, closing)
        conversation = self._conversation(encoded, ask, scope)
        cached = self.session.held(prompt, conversation.scope)
        budget = min(budget, spare) if closing else 0
        reply = max_tokens + closing
        thinking = BudgetConfig(tokens=budget, reply=reply, message=self._close)
        request = Request(
            prompt=prompt,
            max_tokens=budget + reply,
            max_answer=max_tokens,
            stop=frozenset(self.session.manifest.stop_tokens),
            drafter=self.config.drafter,
            drafts=self._drafts(ask),
            grammar=grammar,
            tools=use,
            conversation=conversation,
            budget=thinking if closing else NO_BUDGET,
            relaxed=RelaxedConfig() if ask.accept_mode == "relaxed_thinking" else None,
            sampling=validation.sampling_of(ask),
            images=encoded.images,
        )
        if ask.forced_answer is not None:
            ids = self._prompts.forced_answer(ask, encoded, thinking=budget > 0)
            request = self._forcing(request, ids, ask.forced_accept)
        try:
            admitted = self.session.admit(request)  # now, before this plan displaces others
        except RequestError as e:
            raise PlanError("bad_request", errors.refusal(e)) from e
        return Prepared(
            ask=ask,
            prompt=prompt,
            cached=cached,
            max_tokens=max_tokens,
            budget=budget,
            thinks=closing > 0,
            format=rule.format,
            tools=use.tools if use and use.choice != "none" else (),
            pictures=pictures,
            admitted=admitted,
            grammar_ms=grammar.compile_ms if grammar else 0.0,
            min_ms=self._min_ms(ask, encoded, cached, max_tokens),
        )

    def _min_ms(
        self, ask: wire.PlanRequest, prompt: EncodedPrompt, cached: int, max_tokens: int
    ) -> float:
        new, towers = len(prompt.ids) - cached, self._towers(prompt.images, cached)
        whole = ask.on_deadline == "error"
        return self._rates.min_ms(new, max_tokens, whole=whole, graphs=towers)

    def _drafts(self, ask: wire.PlanRequest) -> tuple[tuple[int, ...], ...]:
        given = ask.drafts or ()
        if given and not looks_up(self.config):
            rule = f"left out, as serve.drafter is {self.config.drafter}"
            raise bad_request(f"drafts must be {rule} (got {show(given)})", "drafts")
        texts = (given,) if isinstance(given, str) else given
        return tuple(self._prompts.encode(text, "drafts").ids for text in texts)

    def _forcing(self, request: Request, ids: tuple[int, ...], accept: float | None) -> Request:
        """A request whose answer is given: these tokens."""
        return Request(
            prompt=request.prompt,
            max_tokens=len(ids),
            stop=request.stop,
            drafter=self.session.drafter,
            conversation=request.conversation,
            forced=ForcedAnswer(ids, accept),
            images=request.images,
        )

    def _conversation(
        self, encoded: EncodedPrompt, ask: wire.PlanRequest, scope: str
    ) -> Conversation:
        kind, name = self.config.reuse, ask.conversation or ask.session or ""
        scopes = {"off": (), "all": (), "client": (scope, ask.cache_scope or "")}
        found = scopes.get(kind, (scope, ask.cache_scope or "", name))
        boundaries = () if kind == "off" else encoded.boundaries
        # Without a name nothing of the turn is kept.
        name = "" if kind == "off" else name
        return Conversation(boundaries=boundaries, scope=json.dumps(found), session=name)

    def _check(self, ask: wire.PlanRequest) -> None:
        validation.check_values(ask)
        validation.check_forced(ask, allowed=self.config.allow_forced)
        if ask.accept_mode == "relaxed_thinking" and not relaxes(self.session, self.config):
            text = "accept_mode must be exact, there is no drafter (got relaxed_thinking)"
            raise PlanError("bad_request", text, field="accept_mode")

    def _thinking_prompt(
        self,
        ask: wire.PlanRequest,
        left_ms: float | None,
        max_tokens: int,
        scope: str,
        pictures: Mapping[str, Picture] = NO_PICTURES,
    ) -> tuple[EncodedPrompt, int]:
        """Return the prompt and the most thinking tokens: 0 with thinking `auto` if the deadline
        leaves no time to think.
        """
        messages = validation.messages_of(ask.prompt, ask.messages)
        tier, variables = self._prompts.effort(ask)
        budget = validation.budget_of(ask, self.config, tier)
        shown = [pictures[name] for name in validation.image_names(ask)]
        shape: Any = {"tools": ask.tools or (), "options": variables, "pictures": len(shown)}

        def written(*, thinking: bool) -> EncodedPrompt:
            prompt = self._prompts.prompt(messages, thinking=thinking, **shape)
            return with_pictures(prompt, self.session.encoder, shown)

        prompt = written(thinking=budget > 0)
        if budget == 0 or left_ms is None or validation.thinking_of(ask, self.config) == "on":
            return prompt, budget
        conversation = self._conversation(prompt, ask, scope)
        held = self.session.held(prompt.ids, conversation.scope)
        towers = self._towers(prompt.images, held)
        spare = self._rates.thinking_tokens_left(
            left_ms, len(prompt.ids) - held, max_tokens, towers
        )
        if spare >= min(WORTH_THINKING, budget):
            return prompt, budget
        return written(thinking=False), 0

    def _towers(self, images: PromptImages | None, held: int) -> list[int]:
        """Runs of the vision tower that a prompt of which `held` tokens are read still needs."""
        encoder = self.session.encoder
        return encoder.pending(images, held) if encoder else []

    def _close_len(self, prompt: tuple[int, ...], budget: int) -> int:
        """Return the tokens of the message that closes the prompt's thinking, 0 without."""
        return self._closing if budget > 0 and open_at_end(self.tokenizer, prompt) else 0

    def _check_prefix(self, prompt: tuple[int, ...], name: str | None) -> None:
        if name is None:
            return
        named = [p for p in self.session.prefixes.list() if p.name == name]
        if not named or prompt[: len(named[0].tokens)] != named[0].tokens:
            rule = "a prefix that the prompt begins with" if named else "a pinned prefix"
            text = f"prefix_id must be {rule} (got {show(name)})"
            raise PlanError("bad_request", text, field="prefix_id")

    def start(self, prepared: Prepared, left_ms: float | None) -> PlanRun:
        admitted = prepared.admitted
        assert admitted is not None
        if left_ms is not None:
            # Recomputed now: the request may have waited in the queue.
            new = len(prepared.prompt) - prepared.cached
            towers = self._towers(admitted.images, prepared.cached)
            spare = self._rates.thinking_tokens_left(left_ms, new, prepared.max_tokens, towers)
            admitted = admitted.with_budget(spare)
        chunks = self.session.generate(admitted)
        # Checked after `generate` has taken the prefix's state: it may have been dropped before.
        self._check_prefix(prepared.prompt, prepared.ask.prefix_id)
        watch = PowerSampler(self._sensors)
        return SessionRun(
            self.session, self.tokenizer, self._rates, prepared, chunks, watch, self._idle_s,
            self._ended,
        )  # fmt: skip

    def _ended(self, prepared: Prepared, decoded: Decoded) -> None:
        called = decoded.finish in ("stop", "forced") and decoded.calls and decoded.calls.calls
        # The next request of an agent may show other images.
        wanted = self.config.idle_prefill and self.session.model.reuse and not prepared.pictures
        self._answered = (prepared, decoded) if wanted and called else None

    def validate(self, request: wire.Validate) -> dict[str, Any]:
        out: dict[str, Any] = {"max_context": self.session.model.limit}
        if request.prompt is not None or request.messages is not None:
            messages = validation.messages_of(request.prompt, request.messages)
            tokens = count_tokens(request, self._image_rules)
            shown = [tokens[name] for name in validation.image_names(request)]
            ids = self._prompts.prompt(messages, thinking=True, pictures=len(shown)).ids
            out["prompt_tokens"] = len(ids) - len(shown) + sum(shown)
        if request.json_schema is not None:
            validation.check_values(wire.PlanRequest(json_schema=request.json_schema))
        rule = rule_of(request)
        if (grammar := self._grammars.of_text(rule)) is not None:
            out["compile_ms"] = grammar.compile_ms
            out["warnings"] = grammar.warnings or rule.warnings
        return out

    # --- prefixes

    def pin(self, request: wire.PrefixPut, stopped: Callable[[], bool]) -> dict[str, Any]:
        one, other = (
            self._prompts.prompt(
                [
                    {"role": "system", "content": request.system},
                    {"role": "user", "content": user},
                ],
                thinking=True,
                field="system",
            ).ids
            for user in ("a", "b")
        )
        # The common beginning of both chats is the part that does not depend on the user's text.
        same = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), 0)
        if same >= (limit := self.session.model.limit):
            text = f"system must be < {limit} tokens with the chat around it (got {same})"
            raise PlanError("prompt_too_long", text, field="system")
        try:
            prefix = self.session.prefixes.put(request.prefix_id, one[:same], stopped=stopped)
        except RequestError as e:  # no memory for it within the budget of prefixes
            raise PlanError("too_large", errors.refusal(e), field="system") from e
        if prefix is None:
            raise PlanError("cancelled", "the prefix was cancelled")
        return _shown(prefix)

    def keep(self, request: wire.PrefixPut) -> None:
        # Only this thread drops prefixes: one that is held now stays held until it is written.
        held = self.session.prefixes.list()
        if all(prefix.name != request.prefix_id for prefix in held):
            raise errors.dropped()
        if self._store is None:
            return
        with self._disk(request.prefix_id):
            if request.persist:
                self._store.keep(self.session.prefixes, request.prefix_id)
            else:
                self._store.drop(request.prefix_id)

    @contextmanager
    def _disk(self, prefix_id: str) -> Generator[None]:
        try:
            yield
        except RequestError as e:
            # The path on this machine goes to the log, not to the client.
            self._log(f"prefix {prefix_id}: {e}")
            text = "the prefix's file could not be changed; the log of the server says why"
            raise PlanError("internal", text) from e

    def prefixes(self) -> list[dict[str, Any]]:
        store, held = self._store, self.session.prefixes.list()
        return [
            {**_shown(prefix), "persisted": store is not None and store.has(prefix)}
            for prefix in held
        ]

    @property
    def skipped(self) -> tuple[str, ...]:
        return self._skipped

    def drop(self, prefix_id: str) -> bool:
        removed = False
        if self._store is not None:
            with self._disk(prefix_id):
                removed = self._store.drop(prefix_id)
        return self.session.prefixes.drop(prefix_id) or removed

    # --- conversations

    def drop_session(self, request: wire.SessionDrop, scope: str = "") -> int:
        named = wire.PlanRequest(session=request.session, cache_scope=request.cache_scope)
        conversation = self._conversation(NO_PROMPT, named, scope)
        self.session.answers.drop(conversation.key)
        return self.session.turns.drop(conversation)

    def idle(self, stopped: Callable[[], bool]) -> float | None:
        answered, self._answered = self._answered, None

        def interrupted() -> bool:
            time.sleep(self._idle_s)  # as before the steps of a request
            return stopped()

        if answered is not None and not stopped():
            self._read_ahead(*answered, interrupted)
        idle_s = self.config.reuse_idle_s
        kept = (self.session.turns, self.session.answers) if idle_s else ()
        return min((due for one in kept if (due := one.expire(idle_s)) is not None), default=None)

    def _read_ahead(
        self, prepared: Prepared, decoded: Decoded, stopped: Callable[[], bool]
    ) -> None:
        """Read an answer as the next request of an agent will repeat it."""
        ask, admitted = prepared.ask, prepared.admitted
        assert admitted is not None
        assert decoded.calls is not None
        calls = decoded.calls.calls
        answer = {
            "role": "assistant",
            "content": decoded.text,
            "tool_calls": [{"function": {"name": c.name, "arguments": c.arguments}} for c in calls],
            **({"reasoning_content": decoded.thinking} if decoded.thinking else {}),
        }
        turns = validation.messages_of(ask.prompt, ask.messages)
        _, variables = self._prompts.effort(ask)
        shape: Any = {"tools": ask.tools or (), "options": variables}
        try:
            prompt = self._prompts.prompt([*turns, answer], thinking=prepared.thinks, **shape)
        except PlanError:
            return  # there is no next turn: the template or the context does not take it
        conversation = replace(admitted.conversation, boundaries=prompt.boundaries)
        self.session.read_ahead(prompt.ids, conversation, stopped)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        self.session.close()


def _shown(prefix: Prefix) -> dict[str, Any]:
    return {
        "prefix_id": prefix.name,
        "tokens": len(prefix.tokens),
        "held": prefix.held,
        "bytes": prefix.bytes,
        "build_ms": prefix.build_ms,
    }
