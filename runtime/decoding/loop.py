"""The only decode loop: propose, verify, accept, commit, observe.

Plain decoding is this loop with a proposer that makes no drafts; budgets, grammars and limits are
policies that narrow a block. Every emitted token, including the first, is chosen by the verify
step: the prompt is prefilled up to but excluding its last token, which begins the first block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from thor_dflash.core.errors import ModelFault, TransactionError
from thor_dflash.plugins.accept.record import Record
from thor_dflash.runtime.decoding.block import (
    Block,
    BlockPhase,
    DecodeFinish,
    DecodeProgress,
    DraftInspection,
    Policy,
    Sampling,
)
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.proposers import Proposal, Proposer
from thor_dflash.runtime.decoding.telemetry import RequestMeter
from thor_dflash.runtime.engines.protocol import Call
from thor_dflash.runtime.text.thinking import Marks
from thor_dflash.runtime.vision.encoder_cache import EncoderCache
from thor_dflash.runtime.vision.prompt_images import PromptImages


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens committed together. The last chunk of an answer says why it ended.

    While the prompt is being read, chunks without tokens report progress.
    """

    tokens: tuple[int, ...]
    finish: DecodeFinish = ""
    prompt_done: int = 0
    """Prompt tokens in the state."""
    prompt_rows: int = 0
    """Rows of the prefill step that read the last of those tokens."""
    encoded: int = 0
    """Patches of the vision tower's graph that has run on an image of the prompt; 0: none has."""


class PromptStart(Protocol):
    """Where a request begins: an empty state, or the state after the first tokens of its prompt."""

    def begin(self) -> None:
        """Put the state there: `length` tokens, at most all but the prompt's last."""
        ...

    def prefilled(self) -> None:
        """Called after every prefill step."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRequest:
    """One request, ready to run."""

    prompt: tuple[int, ...]
    max_tokens: int
    """Of thinking and answer together."""
    max_answer: int
    """Without the thinking; at most max_tokens."""
    stop: tuple[int, ...]
    proposer: Proposer
    policies: tuple[Policy, ...]
    sampling: Sampling | None = None
    """None: greedy."""
    marks: Marks | None = None
    """Ids of the thinking marks, if the vocabulary has them."""
    start: PromptStart | None = None
    """None: an empty state."""
    images: PromptImages | None = None
    """None: the prompt has none."""
    encoder: EncoderCache | None = None
    """Needed for images."""


def decode(
    model: ModelRunner, request: DecodeRequest, progress: DecodeProgress, meter: RequestMeter
) -> Iterator[TokenChunk]:
    """Answer one request, starting from an empty state or from the state of its prefix.

    Close the iterator to cancel; nothing needs to be undone.

    Raises:
        ModelFault: the model had no usable choice; chunks already yielded remain valid.
        TransactionError: another sequence began meanwhile.
    """
    chunks = _chunks(model, request, progress, meter)
    while True:
        with model.alone:
            chunk = next(chunks, None)
        if chunk is None:
            return
        yield chunk


def _chunks(
    model: ModelRunner, request: DecodeRequest, progress: DecodeProgress, meter: RequestMeter
) -> Iterator[TokenChunk]:
    if request.start:
        request.start.begin()
    else:
        model.state.reset()
    begun, meter.cached = model.state.begun, model.state.length
    assert meter.cached < len(request.prompt), meter.cached
    model.write_sampling(request.sampling)
    model.write_images(request.images)
    for chunk in _prefill(model, request):
        yield chunk
        check_owner(model, begun)
    meter.prompt_done()
    while True:
        block = _shape(model, request, progress)
        block, record, proposal = _step(model, request, progress, block)
        count = min([record.count, *(p.judge(progress, block, record) for p in request.policies)])
        if count == 0:
            yield TokenChunk((), "grammar_dead_end")
            return
        _check_record(model, record, count)
        model.state.commit(count)
        request.proposer.committed(model, block, count)
        tokens = record.tokens[:count]
        emitted, finish = visible_tokens(
            len(progress.tokens), tokens, request.stop, request.max_tokens
        )
        closed = progress.commit(tokens)
        meter.cycle(block, record, count, proposal)
        if closed:
            meter.closed(block, record, called=progress.called)
        meter.answered(progress.answer_tokens)
        finish = finish or ("length" if progress.answer_tokens >= request.max_answer else "")
        for policy in request.policies:
            policy.observe(progress, count)
        yield TokenChunk(emitted, finish)
        if finish:
            return
        check_owner(model, begun)


def check_owner(model: ModelRunner, begun: int) -> None:
    """Raise TransactionError if another sequence has begun since the one numbered `begun`."""
    if model.state.begun != begun:
        raise TransactionError(
            "a request must have the state to itself until it ends (got another that began)"
        )


def _prefill(model: ModelRunner, request: DecodeRequest) -> Iterator[TokenChunk]:
    prompt = request.prompt[:-1]
    first = request.proposer.begin(model, len(prompt))
    for start in range(model.state.length, len(prompt), model.chunk):
        part = prompt[start : start + model.chunk]
        yield from _encode(model, request, part)
        model.prefill(part, observe=start + len(part) > first)
        if request.start:
            request.start.prefilled()
        rows = model.step_rows(len(part))
        yield TokenChunk((), prompt_done=model.state.length, prompt_rows=rows)


def _encode(
    model: ModelRunner, request: DecodeRequest, part: Sequence[int]
) -> Iterator[TokenChunk]:
    """Run the vision tower on the images that a prefill step needs, one at a time."""
    images, encoder = request.images, request.encoder
    if images is None or encoder is None:
        return
    for number in images.missing(part):
        if patches := encoder.read(images, number, model.encode):
            yield TokenChunk((), encoded=patches)


def _shape(model: ModelRunner, request: DecodeRequest, progress: DecodeProgress) -> Block:
    phase: BlockPhase = "thinking" if progress.thinking else "answer"
    drawn = request.sampling
    block = Block(
        cap=model.block,
        phase=phase,
        sampled=drawn is not None,
        rejection=drawn is not None and drawn.rejection,
    )
    for policy in request.policies:
        block = policy.shape(progress, block)
    assert 1 <= block.cap <= model.block, block
    return block


def _step(
    model: ModelRunner, request: DecodeRequest, progress: DecodeProgress, block: Block
) -> tuple[Block, Record, Proposal]:
    """Run one step; return the block as verified, its record, and what was proposed."""
    proposal = request.proposer.propose(model, progress, block)
    before = proposal.calls
    if block.look is not None:
        block, before = _look(model, block, block.look, before), ()
    block = block.holding(proposal.drafted, model.block, proposal.drawn, proposal.source)
    after = request.proposer.observe(model, block)
    return block, model.step(block, before, after, request.stop), proposal


def _look(model: ModelRunner, block: Block, look: DraftInspection, before: Sequence[Call]) -> Block:
    """Run the drafter, let a policy see the drafts, and return the block as it narrowed it."""
    tokens = model.draft(block, before)
    seen = look(tokens, block)
    pairs = zip(tokens[1:], (*seen.forced, *[-1] * len(tokens)), strict=False)
    model.write_tokens([tokens[0], *(draft if must < 0 else must for draft, must in pairs)])
    return seen.because(block, "grammar")


def _check_record(model: ModelRunner, record: Record, count: int) -> None:
    """Raise ModelFault for a fault or a bad id in the rows to commit; later rows do not matter."""
    at = model.state.length
    if 0 <= record.fault < count:
        raise ModelFault(
            f"the logits after position {at + record.fault} must be finite and leave "
            f"a token to choose (got none)"
        )
    vocab = model.manifest.vocab_limit
    if wrong := [t for t in record.tokens[:count] if not 0 <= t < vocab]:
        raise ModelFault(f"tokens after position {at} must be ids below {vocab} (got {wrong[0]})")


def visible_tokens(
    completion: int, tokens: Sequence[int], stop: Sequence[int], max_tokens: int
) -> tuple[tuple[int, ...], DecodeFinish]:
    """Return which committed tokens are shown, and why the request is over ("" if it is not).

    Every token counts toward the completion. A stop token ends the request and is not shown; any
    other token is shown, and the max_tokens-th ends the request. A stop token that is also the
    max_tokens-th counts as a stop.
    """
    shown: list[int] = []
    for token in tokens:
        completion += 1
        if token in stop:
            return tuple(shown), "stop"
        shown.append(token)
        if completion >= max_tokens:
            return tuple(shown), "length"
    return tuple(shown), ""
