"""Replays a recorded trace on a session of this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from thor_dflash.calib.replay.command_overlap import overlap
from thor_dflash.calib.replay.recorded_trace import (
    Message,
    RecordedConversation,
    RecordedTrace,
    RecordedTurn,
)
from thor_dflash.calib.replay.replay_report import ReplayTurn
from thor_dflash.core.errors import RequestError
from thor_dflash.runtime.decoding.loop import TokenChunk
from thor_dflash.runtime.grammar.tools import ToolUse
from thor_dflash.runtime.policies.forced_answer import ForcedAnswer
from thor_dflash.runtime.session import Request, Session
from thor_dflash.runtime.session.admission import PackageText
from thor_dflash.runtime.session.turn_cache import Conversation
from thor_dflash.runtime.text.prompt_segments import EncodedPrompt, PromptEncoder, written_answer
from thor_dflash.runtime.text.tokenizer import Answer, Tokenizer
from thor_dflash.runtime.text.tool_calls import tools_of

LONGEST_ANSWER = 1024
"""max_completion_tokens of the benchmark."""
Rows = float | Literal["drafter"]
"""How forced answers are committed: an assumed number of tokens per cycle, or what the drafter
agrees with."""


@dataclass(frozen=True, slots=True)
class EncodedTurn:
    """A turn as token ids."""

    prompt: EncodedPrompt
    answer: tuple[int, ...]
    """As the template writes the recorded answer, its end included."""


@dataclass
class TurnEncoder:
    """Turns as the chat template writes them. Turns that were encoded before cost a lookup."""

    tokenizer: Tokenizer
    thinking: bool = False
    _encoder: PromptEncoder = field(init=False)

    def __post_init__(self) -> None:
        self._encoder = PromptEncoder(self.tokenizer)

    def encode(self, conversation: RecordedConversation, turn: RecordedTurn) -> EncodedTurn:
        """The ids of a turn.

        Raises:
            RequestError: the template refuses it, or writes an answer in another place than where
                it lets the model begin one.
        """
        prompt = self._render(conversation, turn.messages)
        answer = dict(turn.answer)
        if not self.thinking:
            answer.pop("reasoning_content", None)
        whole = self._render(conversation, (*turn.messages, answer))
        ids = self.tokenizer.encode(written_answer(prompt, whole))
        return EncodedTurn(self._encoder.encode(prompt), tuple(ids))

    def _render(self, conversation: RecordedConversation, messages: Sequence[Message]) -> str:
        # The template of a recorded answer without a text reads the same as that of an empty one.
        given = [{"content": "", **message} for message in messages]
        return self.tokenizer.render(given, self.thinking, conversation.tools)


def check_fits(package: PackageText, trace: RecordedTrace, *, thinking: bool) -> None:
    """Refuse a trace of which the context cannot hold the first turn of any conversation, before
    anything is loaded; the later ones are longer.

    Raises:
        RequestError: it cannot, or the template refuses a turn.
    """
    if package.tokenizer is None:
        raise RequestError("a package to replay on must have a tokenizer (got one without)")
    encoder, least = TurnEncoder(package.tokenizer, thinking), 0
    for conversation in trace.conversations:
        prompt = encoder.encode(conversation, conversation.turns[0]).prompt.ids
        if len(prompt) < package.limit:
            return
        least = min(least or len(prompt), len(prompt))
    if least:
        raise RequestError(
            f"the first turn of a conversation must be < {package.limit} tokens, the context of "
            f"{package.capacity} less one block (got {least} or more)"
        )


@dataclass
class SessionReplay:
    """Answers the turns of a trace one after the other, each once the one before has ended."""

    session: Session
    forced: Rows | None = None
    """None: the model answers, with the frame of the calls constrained."""
    thinking: bool = False
    reuse: bool = True
    """Whether turns name their boundaries. Without, each one reads its whole prompt."""
    encoder: TurnEncoder = field(init=False)

    def __post_init__(self) -> None:
        self.encoder = TurnEncoder(self._tokenizer, self.thinking)
        rows = self.session.model.block
        if isinstance(self.forced, float) and not 1 <= self.forced <= rows:
            raise RequestError(
                f"--forced-accept must be 1 to {rows} tokens or drafter (got {self.forced:g})"
            )
        if self.forced == "drafter" and self.session.manifest.drafter is None:
            raise RequestError("--forced-accept drafter must go with a drafter (got none)")

    @property
    def _tokenizer(self) -> Tokenizer:
        if self.session.tokenizer is None:
            raise RequestError("a package to replay on must have a tokenizer (got one without)")
        return self.session.tokenizer

    def run(self, trace: RecordedTrace) -> Iterator[ReplayTurn]:
        """Answer every turn. An error ends its conversation."""
        for conversation in trace.conversations:
            for index, turn in enumerate(conversation.turns):
                found = self.answer(conversation, turn, index + 1)
                yield found
                if found.error:
                    break

    def answer(
        self, conversation: RecordedConversation, turn: RecordedTurn, number: int
    ) -> ReplayTurn:
        """Answer one turn; `number` is its place in the conversation, from 1."""
        try:
            encoded = self.encoder.encode(conversation, turn)
            chunks, steps = self._start(conversation, encoded), 0
            tokens: list[int] = []
            for chunk in chunks:
                steps += bool(chunk.prompt_rows)
                tokens += chunk.tokens
        except RequestError as e:
            return ReplayTurn(conversation=conversation.name, turn=number, error=str(e))
        report = self.session.report()
        calls = self._calls(conversation, encoded, tokens)
        times = report.timings
        return ReplayTurn(
            conversation=conversation.name,
            turn=number,
            prompt_tokens=report.usage.prompt_tokens,
            cached_tokens=report.usage.cached_tokens,
            answer_tokens=report.completion_tokens,
            prefill_steps=steps,
            prefill_ms=times.prefill_ms,
            ttft_ms=times.ttft_ms,
            decode_ms=times.decode_ms,
            swap_ms=report.reuse.swap_ms,
            cycles=report.spec.cycles,
            boundary=report.reuse.boundary,
            why=report.reuse.why,
            finish="forced" if self.forced is not None else report.finish,
            calls=len(calls),
            overlap=None if self.forced is not None else overlap(_recorded(turn.answer), calls),
        )

    def _calls(
        self, conversation: RecordedConversation, encoded: EncodedTurn, tokens: Sequence[int]
    ) -> list[dict[str, Any]]:
        tools = tools_of(list(conversation.tools))
        answer = Answer(self._tokenizer, encoded.prompt.ids, tools)
        answer.feed(tokens)
        answer.end()
        calls = answer.calls.calls if answer.calls is not None else []
        return [{"function": {"name": c.name, "arguments": c.arguments}} for c in calls]

    def _start(self, conversation: RecordedConversation, turn: EncodedTurn) -> Iterator[TokenChunk]:
        session = self.session
        reuse = Conversation(
            boundaries=turn.prompt.boundaries if self.reuse else (), session=conversation.name
        )
        if self.forced is not None:
            rows = None if self.forced == "drafter" else self.forced
            request = Request(
                prompt=turn.prompt.ids,
                max_tokens=len(turn.answer),
                drafter=session.drafter,
                conversation=reuse,
                forced=ForcedAnswer(turn.answer, rows),
            )
            return session.generate(request)
        use = None
        if conversation.tools:
            use = ToolUse(tools=tools_of(list(conversation.tools)))
        most = min(LONGEST_ANSWER, session.model.limit - len(turn.prompt.ids))
        request = Request(
            prompt=turn.prompt.ids,
            max_tokens=max(1, most),
            stop=frozenset(session.manifest.stop_tokens),
            drafter=session.drafter,
            grammar=session.call_grammar(use) if use is not None and use.constrained else None,
            tools=use,
            conversation=reuse,
        )
        return session.generate(request)


def _recorded(answer: Message) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = answer.get("tool_calls") or []
    return calls
