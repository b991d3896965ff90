"""Planning tasks as requests to a session, and the text of its answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from thor_dflash.calib.planbench import Task
from thor_dflash.core.errors import RequestError
from thor_dflash.runtime.session import Request, Session, TokenChunk
from thor_dflash.runtime.text.tokenizer import Answer, Tokenizer

MAX_TOKENS = 512
"""No held-out answer of a working planner-nano is as long, thinking included, tokens."""


def tokenizer_of(session: Session) -> Tokenizer:
    """The tokenizer and chat template of a session's package.

    Raises:
        RequestError: it has none.
    """
    if session.tokenizer is None:
        raise RequestError("the package must have a tokenizer.json (got one without)")
    return session.tokenizer


def request_of(
    session: Session, task: Task, *, thinking: bool = True, most: int = MAX_TOKENS
) -> Request:
    """A task as a request, for at most so many tokens, or as many as the context has left."""
    text = tokenizer_of(session)
    messages = [{"role": role, "content": content} for role, content in task.messages]
    prompt = tuple(text.encode(text.render(messages, thinking)))
    stop = frozenset(session.manifest.stop_tokens)
    left = session.model.limit - len(prompt)
    # A prompt that does not fit is refused by its own error.
    return Request(prompt=prompt, max_tokens=min(most, left) if left > 0 else most, stop=stop)


def tokens_of(chunks: Iterable[TokenChunk]) -> tuple[int, ...]:
    """All tokens of an answer."""
    return tuple(token for chunk in chunks for token in chunk.tokens)


def answer_of(session: Session, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of an answer, without its thinking."""
    answer = Answer(tokenizer_of(session), prompt)
    answer.feed(tokens)
    answer.end()
    return answer.text()
