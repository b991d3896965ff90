"""The chunks that a streamed plan sends while it is decoded."""

from __future__ import annotations

from collections.abc import Iterable

from thor_dflash.runtime.text.thinking import TextPiece
from thor_dflash.runtime.text.tool_calls import CallPiece
from thor_dflash.serving.planner.plan_format import JsonPlan, PlanFormat
from thor_dflash.serving.protocol import messages

MARKS = ("<think>", "</think>")


class ChunkWriter:
    """Turns pieces of an answer into the requested chunks; does no work if none are requested."""

    def __init__(self, stream: bool | messages.Stream, format: PlanFormat | None = None) -> None:
        self._text = stream in ("text", "all")
        self._progress = stream == "all"
        self._steps = (format or JsonPlan()).reader() if stream in ("steps", "all") else None
        self._begun = {True: False, False: False}
        self._thought = False
        self._held = ""
        """Blank lines of the thinking, which are its end if no more of it follows."""
        self._index = 0

    def prefill(self, tokens: int) -> list[messages.Chunk]:
        """Return the chunks after a prefill step; `tokens` of the prompt are in the state."""
        if not self._progress:
            return []
        return [messages.Chunk(kind="progress", phase="prefill", tokens=tokens)]

    def cycle(
        self, pieces: Iterable[TextPiece], tokens: int, calls: Iterable[CallPiece] = ()
    ) -> list[messages.Chunk]:
        """Return the chunks for the pieces of one cycle; `tokens` is the total committed so far."""
        if not (self._text or self._progress or self._steps):
            return []
        pieces = list(pieces)
        chunks = [chunk for piece in pieces for chunk in self._piece(piece)]
        chunks += [messages.Chunk(kind="call", call=_delta(call)) for call in calls]
        if self._progress and pieces:
            phase: messages.Phase = "thinking" if pieces[-1].thinking else "answer"
            chunks.append(messages.Chunk(kind="progress", phase=phase, tokens=tokens))
        return chunks

    def _piece(self, piece: TextPiece) -> list[messages.Chunk]:
        text = "" if piece.thinking and piece.text in MARKS else piece.text
        self._thought = self._thought or piece.thinking
        if self._thought and not self._begun[piece.thinking]:
            # As in the result: drop the blank lines that the chat template puts before the
            # thinking, after it, and before the answer.
            text = text.lstrip("\n")
        if piece.thinking:
            text = self._held + text
            kept = text.rstrip("\n")
            self._held, text = text[len(kept) :], kept
        if not text:
            return []
        self._begun[piece.thinking] = True
        chunks: list[messages.Chunk] = []
        if self._text:
            kind: messages.Kind = "thinking" if piece.thinking else "text"
            chunks.append(messages.Chunk(kind=kind, text=text))
        if self._steps is not None and not piece.thinking:
            for step in self._steps.feed(text):
                chunks.append(messages.Chunk(kind="step", step=step, index=self._index))
                self._index += 1
        return chunks


def _delta(piece: CallPiece) -> messages.CallDelta:
    return messages.CallDelta(
        index=piece.index, name=piece.name, arguments=piece.arguments, done=piece.done
    )
