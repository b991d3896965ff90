"""Admission: turns a request's options into a proposer and policies, or refuses the request."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from thor_dflash.config.decode import (
    GREEDY,
    NO_BUDGET,
    NO_DRAFT_LIMITS,
    RELAXED,
    BudgetConfig,
    DraftConfig,
    RelaxedConfig,
    SamplingConfig,
)
from thor_dflash.core.errors import RequestError
from thor_dflash.core.message_text import show
from thor_dflash.package.manifest import Manifest
from thor_dflash.plugins.accept.record import LOG_MARGIN, PROBABILITY_DELTA
from thor_dflash.runtime.decoding.block import AcceptRule, Policy, Sampling
from thor_dflash.runtime.decoding.draft_chooser import DraftChooser
from thor_dflash.runtime.decoding.lookup import LookupTexts
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.mtp import own_drafter
from thor_dflash.runtime.decoding.proposers import NoDrafter, Proposer
from thor_dflash.runtime.grammar.compiler import Grammar
from thor_dflash.runtime.grammar.policy import Constrain, ForbidToken, Place, leads
from thor_dflash.runtime.grammar.tools import ToolUse
from thor_dflash.runtime.policies.effort import TokenLimits, resolve_limits
from thor_dflash.runtime.policies.forced_answer import ForcedAnswer
from thor_dflash.runtime.policies.limits import TokenLimit
from thor_dflash.runtime.policies.relaxed_acceptance import RelaxedThinking
from thor_dflash.runtime.policies.speculation_gate import GateRule, SpeculationGate, StepCosts
from thor_dflash.runtime.policies.thinking_budget import SoftClose, ThinkingBudget
from thor_dflash.runtime.session.recent_answers import RecentAnswers
from thor_dflash.runtime.session.turn_cache import NO_CONVERSATION, Conversation, Lease
from thor_dflash.runtime.text.packed_ids import packed
from thor_dflash.runtime.text.thinking import Marks, Thinking
from thor_dflash.runtime.text.tokenizer import END_THINK, Tokenizer
from thor_dflash.runtime.vision.prompt_images import PromptImages

_RULES = {"margin": LOG_MARGIN, "delta": PROBABILITY_DELTA}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to answer."""

    prompt: tuple[int, ...]
    max_tokens: int
    """Of thinking and answer together."""
    max_answer: int | None = None
    """Of the answer, not counting the thinking before it; None: as max_tokens."""
    stop: frozenset[int] = frozenset()
    drafter: Literal["auto", "dflash", "mtp", "lookup", "none"] = "dflash"
    """auto: the package's drafter, if it has one, and lookup."""
    drafts: tuple[tuple[int, ...], ...] = ()
    """Texts that the answer after the thinking may repeat; only for lookup."""
    grammar: Grammar | None = None
    """Constrains the answer after the thinking; made by Session.grammar."""
    tools: ToolUse | None = None
    """Those that the prompt declares. Needs `grammar` if its calls are constrained."""
    budget: BudgetConfig = NO_BUDGET
    relaxed: RelaxedConfig | None = None
    """None: strict acceptance."""
    gate: bool = False
    draft: DraftConfig = NO_DRAFT_LIMITS
    conversation: Conversation = NO_CONVERSATION
    """Where later prompts may continue this one."""
    sampling: SamplingConfig = GREEDY
    images: PromptImages | None = None
    """Made by Session.images; its prompt is this one."""
    forced: ForcedAnswer | None = None
    """Commit these ids as the answer, whatever the model would choose. `max_tokens` is their
    number, and no other option shapes the answer."""


@dataclass(frozen=True, slots=True)
class PackageText:
    """What prompts are made and measured with: known before an engine is loaded."""

    manifest: Manifest
    tokenizer: Tokenizer | None
    """None if the package has none."""
    capacity: int
    """Tokens of the context."""

    @property
    def limit(self) -> int:
        """Maximum tokens of prompt and answer together: one block stays free."""
        return self.capacity - self.manifest.block

    def check_length(self, prompt: int, max_tokens: int) -> None:
        """Refuse a prompt and an answer that do not fit into the context.

        Raises:
            RequestError: both together are longer than `limit`.
        """
        if (need := prompt + max_tokens) > self.limit:
            raise RequestError(
                f"prompt and max_tokens together must be <= {self.limit} tokens, the context of "
                f"{self.capacity} less one block (got {prompt} + {max_tokens} = {need})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A request that was checked, with its options resolved. Answering it does not change it."""

    prompt: tuple[int, ...]
    max_tokens: int
    """Of thinking, its closing message and answer together."""
    max_answer: int
    """Without the thinking."""
    stop: tuple[int, ...]
    proposer: Proposer
    budget: ThinkingBudget | None = None
    gate: StepCosts | None = None
    """The measured costs that decide whether to draft; None: always."""
    relaxed: RelaxedThinking | None = None
    grammar: Grammar | None = None
    forbid: ForbidToken | None = None
    """The opening of a tool call, if no tool may be called and no grammar excludes it."""
    opening: int = -1
    """Id that opens a tool call, if one may be made."""
    sampling: Sampling | None = None
    """None: greedy."""
    thinks: bool = False
    """Whether the prompt ends inside a thinking block."""
    conversation: Conversation = NO_CONVERSATION
    forced: ForcedAnswer | None = None
    lease: Lease | None = None
    """Keeps the boundary that it will continue from while it waits."""
    images: PromptImages | None = None

    def with_budget(self, tokens: int) -> Admitted:
        """Lower the thinking budget, if there is one, to `tokens`. The reply keeps its length."""
        if self.budget is None or (cut := self.budget.limit - tokens) <= 0:
            return self
        budget = replace(self.budget, limit=tokens)
        return replace(self, max_tokens=self.max_tokens - cut, budget=budget)

    def policies(self) -> tuple[Policy, ...]:
        """The policies of one run, in the order in which they shape a block."""
        made: list[Policy] = []
        if self.forced is not None:
            made.append(replace(self.forced))
        if self.budget is not None:
            made.append(replace(self.budget))
        if self.gate is not None:
            made.append(SpeculationGate(self.gate, time.perf_counter, GateRule()))
        if self.relaxed is not None:
            made.append(self.relaxed)
        if self.forbid is not None:
            made.append(self.forbid)
        if (found := self.grammar) is not None:
            place = Place(thinking=self.thinks, opening=found.opening, text=found.free)
            made.append(Constrain(found, place))
        return (*made, TokenLimit(self.max_tokens, self.max_answer))


class Admission:
    """Admits requests to one session, on any thread. Keeps measured costs and tokenised messages
    between requests.
    """

    def __init__(
        self, model: ModelRunner, tokenizer: Tokenizer | None, answers: RecentAnswers
    ) -> None:
        """`answers`: those of earlier requests, by conversation."""
        self._model = model
        self._answers = answers
        self._tokenizer = tokenizer
        self._costs = StepCosts()
        self._messages: dict[str, tuple[int, ...]] = {}

    def admit(self, request: Request) -> Admitted:
        """Check a request and decide how to answer it.

        Raises:
            RequestError: it does not fit, its options contradict each other, or they do not suit
                this package.
        """
        proposer = self._proposer(request)
        if request.forced is not None:
            _check_forced(request.forced, self._model.block, drafted=request.drafter != "none")
        tokenizer = self._tokenizer
        thinks = Thinking(tokenizer.marks if tokenizer else None, request.prompt).inside
        budget, max_tokens = None, request.max_tokens
        if _budgeted(request.budget):
            self._marks("a thinking budget")
            if thinks:
                limits, budget = self._budget(request)
                max_tokens = limits.total
        sampling = resolve_sampling(request.sampling)
        if sampling and sampling.rejection and request.relaxed is not None:
            raise RequestError(
                "decode.sampling.acceptance must be coupled with accept relaxed (got rejection)"
            )
        relaxed = None if request.relaxed is None else self._relaxed(request, request.relaxed)
        _check_stop(request)
        stop = tuple(sorted(request.stop))
        check_request(self._model, request, max_tokens, stop)
        return Admitted(
            prompt=request.prompt,
            max_tokens=max_tokens,
            max_answer=request.max_answer or max_tokens,
            stop=stop,
            proposer=proposer,
            budget=budget,
            gate=self._costs if request.gate else None,
            relaxed=relaxed,
            grammar=request.grammar,
            forbid=self._forbidden(request),
            opening=self.opening(request),
            sampling=sampling,
            thinks=thinks,
            conversation=request.conversation,
            forced=request.forced,
            images=request.images,
        )

    def opening(self, request: Request) -> int:
        """The id that opens a tool call; -1 if none may be made."""
        if request.tools is None or request.tools.choice == "none":
            return -1
        return self._call_marks()[0]

    def _forbidden(self, request: Request) -> ForbidToken | None:
        if request.tools is None or request.tools.choice != "none" or request.grammar:
            return None
        vocab = self._model.manifest.vocab_limit
        return ForbidToken(self._call_marks()[0], self._model.block, vocab)

    def _call_marks(self) -> tuple[int, int]:
        marks = self._tokenizer.call_marks if self._tokenizer else None
        if marks is None:
            raise RequestError(
                "tools must be used with a package whose tokenizer has <tool_call> "
                "(got one without)"
            )
        return marks

    def _marks(self, what: str) -> Marks:
        marks = self._tokenizer.marks if self._tokenizer else None
        if marks is None:
            raise RequestError(
                f"{what} must be used with a package whose tokenizer has <think> and </think> "
                "(got one without)"
            )
        return marks

    def _proposer(self, request: Request) -> Proposer:
        drafter = self._drafter(request)
        if request.drafter not in ("auto", "lookup"):
            if request.drafts:
                raise RequestError(
                    f"drafts must go with drafter auto or lookup (got {request.drafter})"
                )
            return drafter
        drafts = self._drafts(request)
        named = request.conversation.key if request.conversation.session else ""

        def texts() -> LookupTexts:
            return LookupTexts(session=self._answers.of(named) if named else (), drafts=drafts)

        return DraftChooser(drafter, request.prompt, texts)

    def _drafts(self, request: Request) -> tuple[tuple[int, ...], ...]:
        """The texts given with a request, each behind the end of the thinking."""
        vocab = self._model.manifest.target.vocab
        for i, ids in enumerate(request.drafts):
            if wrong := [token for token in ids if not 0 <= token < vocab]:
                raise RequestError(f"drafts[{i}] must be ids 0 to {vocab - 1} (got {wrong[0]})")
        lead = request.prompt[-2:]
        if self._tokenizer is not None and self._tokenizer.marks is not None:
            lead = tuple(self._tokenizer.encode(f"{END_THINK}\n\n"))
        return tuple((*lead, *ids) for ids in request.drafts)

    def _drafter(self, request: Request) -> Proposer:
        own = self._model.manifest.own_drafter
        without = own == "none"
        if request.drafter in ("none", "lookup") or (request.drafter == "auto" and without):
            got = "a package without a drafter" if without else f"drafter {request.drafter}"
            for name, used in (
                ("accept relaxed", request.relaxed is not None),
                ("gate on", request.gate),
                ("decode.draft options", request.draft != NO_DRAFT_LIMITS),
            ):
                if used:
                    raise RequestError(f"{name} must be used with a drafter (got {got})")
            return NoDrafter()
        drafter = self._model.manifest.drafter
        if drafter is None or request.drafter not in ("auto", own):
            raise RequestError(f"drafter must be {own}, the package's (got {request.drafter})")
        windows = [layer.window for layer in drafter.layers]
        self._check_window("window", request.draft.window, [w for w in windows if w], "sliding")
        limits = [self._model.limit for w in windows if not w]
        self._check_window("full", request.draft.full, limits, "full")
        return own_drafter(self._model.manifest, request.draft)

    def _check_window(self, name: str, value: int, bounds: Sequence[int], kind: str) -> None:
        """Check a window of the drafter's layers of one kind; `bounds` has one of each layer."""
        block = self._model.block
        rule = (
            f"0 or {block} to {min(bounds)} tokens"
            if bounds
            else f"0, the drafter has no {kind} layers"
        )
        if value and not (bounds and block <= value <= min(bounds)):
            raise RequestError(f"decode.draft.{name} must be {rule} (got {value})")

    def _budget(self, request: Request) -> tuple[TokenLimits, ThinkingBudget]:
        config, card = request.budget, self._model.manifest.card
        if config.effort == "none" and config.tokens < 0:
            raise RequestError(
                'decode.budget.effort must not be "none" for a prompt that begins to think '
                "(got one with an open <think>)"
            )
        close = self._closing(request)
        found = resolve_limits(config, card, len(close), request.max_tokens)
        soft = None
        if config.close == "soft":
            self._check_ends(request)
            soft = SoftClose(math.ceil(config.soften * found.think), -math.log(config.ratio))
        return found, ThinkingBudget(found.think, close, soft)

    def _check_ends(self, request: Request) -> None:
        """A soft close mark ends its block like a stop id, so it needs one of the stop slots."""
        ends = 1 if request.tools is None else 2
        slots = self._model.graphs["accept"].inputs["stop"].at({})[0] - ends
        if len(request.stop) > slots:
            raise RequestError(
                f"stop must hold at most {slots} ids if decode.budget.close is soft "
                f"(got {len(request.stop)})"
            )

    def _closing(self, request: Request) -> tuple[int, ...]:
        assert self._tokenizer is not None
        own, cards = request.budget.message, self._model.manifest.card.close
        message = own or cards
        card = message and message == cards
        name = "the package's card.close" if card else "decode.budget.message"
        ids = self._messages.get(message) or tuple(self._tokenizer.encode(message))
        close = self._marks("a thinking budget").close
        if ids.count(close) != 1:
            raise RequestError(f"{name} must hold </think> once (got {show(message)})")
        after, grammar = ids[ids.index(close) + 1 :], request.grammar
        words = message.partition(END_THINK)[2]
        if grammar and (words.strip("\n") or not leads(after, grammar.vocabulary)):
            raise RequestError(
                f"{name} must have at most a blank line after </think> where a grammar follows "
                f"(got {show(words)})"
            )
        if request.stop.intersection(ids):
            raise RequestError(f"{name} must hold no token that ends answers (got {show(message)})")
        self._messages[message] = ids
        return ids

    def _relaxed(self, request: Request, config: RelaxedConfig) -> RelaxedThinking:
        marks = self._marks("accept relaxed")
        assert self._tokenizer is not None
        k, margin = RELAXED[config.rule]
        if config.k > (vocab := self._model.manifest.target.vocab):
            raise RequestError(
                f"decode.relaxed.k must be at most {vocab}, the vocabulary (got {config.k})"
            )
        ids = {*self._model.manifest.stop_tokens, *self._tokenizer.tools}
        # The accept operator never accepts a stop id of the request as a near miss: those ids need
        # no slot here.
        never = tuple(sorted(ids - request.stop))
        slots = self._model.graphs["accept"].inputs["strict"].at({})[0]
        if len(never) > slots:
            raise RequestError(
                f"stop and tool ids of the package must be at most {slots} for accept relaxed, not "
                f"counting the request's stop ids (got {len(never)})"
            )
        return RelaxedThinking(
            AcceptRule(
                rule=_RULES[config.rule],
                top_k=config.k or k,
                margin=margin if config.margin < 0 else config.margin,
                close=marks.close,
                never=never,
            )
        )


def resolve_sampling(config: SamplingConfig) -> Sampling | None:
    """Return how to draw tokens, with a seed, which is drawn if there is none; None: greedy."""
    if config.temperature == 0:
        return None
    config = config.seeded()
    return Sampling(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        seed=config.seed,
        rejection=config.acceptance == "rejection",
    )


def _budgeted(config: BudgetConfig) -> bool:
    """Whether the request sets a thinking budget.

    Raises:
        RequestError: it asks for a soft close without a budget.
    """
    budgeted = config.tokens >= 0 or bool(config.effort)
    if config.close == "soft" and not budgeted:
        raise RequestError(
            "decode.budget.close must be hard unless decode.budget.tokens or decode.budget.effort "
            "sets a budget (got soft)"
        )
    return budgeted


def _check_forced(forced: ForcedAnswer, block: int, *, drafted: bool) -> None:
    rows = forced.rows
    if rows is None and not drafted:
        raise RequestError("forced_accept must be given without a drafter (got none)")
    if rows is not None and not 1 <= rows <= block:
        raise RequestError(f"forced_accept must be 1 to {block} tokens per cycle (got {rows:g})")


def _check_stop(request: Request) -> None:
    """Refuse a request whose stop ids lack one that its grammar ends with."""
    grammar = request.grammar
    if grammar is not None and (missing := grammar.vocabulary.stop - request.stop):
        raise RequestError(
            "stop must hold every stop id of the package if there is a grammar "
            f"(got none of {sorted(missing)})"
        )


def _all_below(vocab: int, prompt: Sequence[int]) -> bool:
    try:
        ids = np.frombuffer(packed(prompt), np.int64)
    except OverflowError:
        return False
    return bool(ids.min() >= 0 and ids.max() < vocab)


def check_request(
    model: ModelRunner, request: Request, max_tokens: int, stop: Sequence[int]
) -> None:
    """Refuse a request that could not be finished.

    Raises:
        RequestError: naming the field, the rule and the value.
    """
    vocab, prompt = model.manifest.target.vocab, request.prompt
    if not prompt:
        raise RequestError("prompt must have at least one token (got none)")
    if request.images is not None:
        assert request.images.prompt == prompt, "its own"
    elif not _all_below(vocab, prompt):
        i, token = next((i, t) for i, t in enumerate(prompt) if not 0 <= t < vocab)
        raise RequestError(f"prompt[{i}] must be 0 to {vocab - 1} (got {token})")
    if max_tokens < 1:
        raise RequestError(f"max_tokens must be >= 1 (got {max_tokens})")
    package = PackageText(model.manifest, None, model.capacity)
    package.check_length(len(prompt), max_tokens)
    slots = model.graphs["accept"].inputs["stop"].at({})[0]
    if len(stop) > slots:
        raise RequestError(f"stop must hold at most {slots} ids (got {len(stop)})")
    if wrong := [token for token in stop if not 0 <= token < vocab]:
        raise RequestError(f"stop must be ids 0 to {vocab - 1} (got {wrong[0]})")
