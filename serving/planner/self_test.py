"""The self-test of a backend: drafted decoding must give the exact tokens of plain decoding."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from thor_dflash.core.errors import ModelFault
from thor_dflash.core.model_dims import PATCH
from thor_dflash.core.progress import Progress
from thor_dflash.runtime.session import Request, Session
from thor_dflash.runtime.session.turn_cache import Conversation
from thor_dflash.runtime.vision.picture import Picture
from thor_dflash.serving.planner import startup_checks
from thor_dflash.serving.planner.latency_model import LatencyModel

QUESTION = "Self-test: put the cup on the table, then bring the plate to the kitchen."
TOKENS = 48
"""Tokens decoded four times: at least three blocks, about a second on a Thor."""
ANSWER = 8
"""Tokens of the answer under a schema."""
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


def prompt_of(session: Session) -> tuple[int, ...]:
    """Return the self-test's prompt.

    Raises:
        ConfigError: the context is too short for it.
    """
    assert session.tokenizer is not None
    text = session.tokenizer.render([{"role": "user", "content": QUESTION}], True)
    prompt = tuple(session.tokenizer.encode(text))
    startup_checks.check_self_test(session.model, len(prompt), ANSWER)
    return prompt


def tower_ms(session: Session) -> dict[int, float]:
    """Run each graph of the vision tower, if there is one, on a grey image, twice. Return the times
    of the second runs, ms, by the patches of the graphs.

    Raises:
        ModelFault: a number is not finite.
    """
    found: dict[int, float] = {}
    for patches in session.manifest.image_patches if session.encoder else ():
        grey = Picture(np.full((2 * PATCH, patches // 2 * PATCH, 3), 128, np.uint8))
        session.model.encode(grey)
        began = time.perf_counter()
        rows = session.model.encode(grey)
        found[patches] = 1e3 * (time.perf_counter() - began)
        if not np.isfinite(rows.astype(np.float32)).all():
            raise ModelFault(
                "the self-test must encode an image to finite numbers (got others): the package or "
                "the machine is damaged"
            )
    return found


def run(
    session: Session,
    prompt: tuple[int, ...],
    model: Callable[[], LatencyModel],
    idle_s: float,
    progress: Progress,
) -> tuple[LatencyModel, str]:
    """Decode the prompt plainly, from lookup drafts, twice with the drafter, and under a schema.
    Return the latency model with the cycles of the drafter, and the SHA-256 of the tokens.

    Args:
        model: Makes a latency model without cycles.
        idle_s: Added to the time of each step.

    Raises:
        ModelFault: the tokens differ.
    """
    stop = frozenset(session.manifest.stop_tokens)
    count = min(TOKENS, session.model.limit - len(prompt))
    drafted = Request(prompt=prompt, max_tokens=count, drafter=session.drafter)
    named = Conversation(session="self-test")  # the plain answer is kept, to be looked up
    first = replace(drafted, drafter="none", conversation=named)
    with progress.task("self-test", 4 * count, "tokens") as task:
        decode = partial(_decode, session, idle_s, task.advance)
        plain = decode(first, rates := model())
        for request in (replace(first, drafter="auto"), drafted, drafted):
            if decode(request, rates := model()) != plain:
                raise ModelFault(
                    "the self-test must decode the same tokens with and without the drafter "
                    "(got others): the package or the machine is damaged"
                )
        session.answers.drop(named.key)
        if stop:
            # The first grammar masks of a process take a hundred times as long as later ones.
            grammar = session.grammar(SCHEMA)
            answer = replace(drafted, grammar=grammar, stop=stop, max_tokens=ANSWER)
            _decode(session, idle_s, lambda tokens: None, answer, rates)
    return rates, hashlib.sha256(repr(plain).encode()).hexdigest()


def _decode(
    session: Session,
    idle_s: float,
    advance: Callable[[int], None],
    request: Request,
    rates: LatencyModel,
) -> tuple[int, ...]:
    tokens: list[int] = []
    last = time.perf_counter()
    for chunk in session.generate(request):
        now = time.perf_counter()
        ms = 1e3 * (now - last + idle_s)
        tokens += chunk.tokens
        advance(len(chunk.tokens))
        if chunk.prompt_done:
            rates.step(ms, chunk.prompt_rows)
        else:
            rates.cycle(ms, len(chunk.tokens), thinking=False)
        last = now
    return tuple(tokens)
