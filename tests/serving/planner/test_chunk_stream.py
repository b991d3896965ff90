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
