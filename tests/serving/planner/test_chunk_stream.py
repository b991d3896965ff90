"""What a stream says of an answer: the same as its result."""

from __future__ import annotations

from thor_dflash.runtime.text.tokenizer import Piece
from thor_dflash.serving.planner.chunk_stream import Speech


def test_a_mark_of_thinking_inside_an_answer_is_text() -> None:
    """As in the result, whose text is all that follows the thinking."""
    said = [Piece("<think>", True), Piece("\nhm", True), Piece("</think>", True)]
    said += [Piece("\n\n{", False), Piece("</think>", False), Piece("}", False)]
    chunks = Speech("text").cycle(said, 6)
    found = {kind: "".join(c.text or "" for c in chunks if c.kind == kind)
             for kind in ("thinking", "text")}  # fmt: skip
    assert found == {"thinking": "hm", "text": "{</think>}"}
