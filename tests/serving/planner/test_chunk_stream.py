"""What a stream says of an answer: the same as its result."""

from __future__ import annotations

from thor_dflash.runtime.text.thinking import TextPiece
from thor_dflash.serving.planner.chunk_stream import ChunkWriter


def test_a_mark_of_thinking_inside_an_answer_is_text() -> None:
    """As in the result, whose text is all that follows the thinking."""
    written = [TextPiece("<think>", True), TextPiece("\nhm", True), TextPiece("</think>", True)]
    written += [TextPiece("\n\n{", False), TextPiece("</think>", False), TextPiece("}", False)]
    chunks = ChunkWriter("text").cycle(written, 6)
    found = {kind: "".join(c.text or "" for c in chunks if c.kind == kind)
             for kind in ("thinking", "text")}  # fmt: skip
    assert found == {"thinking": "hm", "text": "{</think>}"}


def test_blank_lines_are_those_of_the_result() -> None:
    """They go at both ends of the thinking and before the answer behind it, and nowhere else."""

    def streamed(*pieces: tuple[str, bool]) -> tuple[str, str]:
        writer = ChunkWriter("text")
        chunks = [
            c for text, thinking in pieces for c in writer.cycle([TextPiece(text, thinking)], 1)
        ]
        kinds = ("thinking", "text")
        found = ["".join(c.text or "" for c in chunks if c.kind == kind) for kind in kinds]
        return found[0], found[1]

    ended = ("</think>", True)
    assert streamed(("\n", True), ("a\n", True), ("\nb\n\n", True), ended, ("\n\nc\n", False)) == (
        "a\n\nb",
        "c\n",
    )
    assert streamed(("a\n", True)) == ("a", "")
    assert streamed(ended, ("\nc", False)) == ("", "c")
    assert streamed(("\n\nc", False)) == ("", "\n\nc")
