"""Prompts encoded turn by turn: a turn that was encoded before costs a lookup.

A conversation's prompt repeats all its earlier turns. Every turn begins with `<|im_start|>`, an
added token, at which every tokenizer of this kind splits the text first; so the ids of a prompt are
those of its turns, one after the other.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from thor_dflash.core.errors import RequestError
from thor_dflash.runtime.text.packed_ids import packed, remember
from thor_dflash.runtime.text.tokenizer import Tokenizer
from thor_dflash.runtime.vision.encoder_cache import EncoderCache
from thor_dflash.runtime.vision.picture import Picture
from thor_dflash.runtime.vision.prompt_images import PromptImages

Boundary = Literal["system", "user", "prompt"]
"""The end of the system turn, of the last user's turn, or of the prompt."""
START = "<|im_start|>"
KEPT = 32 << 20
"""Characters of turns that are kept, the least recently used of which go first."""
_RESULTS = f"{START}user\n<tool_response>"


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt's ids and where later prompts of its conversation may continue from."""

    ids: tuple[int, ...]
    text: str
    boundaries: tuple[tuple[int, Boundary], ...] = ()
    """Tokens up to each boundary."""
    images: PromptImages | None = None
    """The images in it, if there are any."""

    def with_images(self, encoder: EncoderCache, pictures: Sequence[Picture]) -> EncodedPrompt:
        """The prompt with the tokens of these pictures in the place of their marks.

        Raises:
            RequestError: as EncoderCache.insert.
        """
        images = encoder.insert(self.ids, pictures)
        if images is None:
            return self
        mark, shown = encoder.vision.image_token, iter(pictures)
        longer = [(at, next(shown).grid.tokens - 1) for at, t in enumerate(self.ids) if t == mark]
        boundaries: tuple[tuple[int, Boundary], ...] = tuple(
            (end + sum(more for at, more in longer if at < end), kind)
            for end, kind in self.boundaries
        )
        return EncodedPrompt(images.prompt, self.text, boundaries, images)


def written_answer(prompt: str, whole: str) -> str:
    """The text of an answer, its end included, from a rendered chat that ends with it (`whole`) and
    the same chat up to it (`prompt`). Both go on with the beginning of the next answer.

    Raises:
        RequestError: the template writes an answer in another place than where it lets the model
            begin one, or in another way.
    """
    begin = prompt[prompt.rindex(START) :] if START in prompt else ""
    written = whole.removesuffix(begin).removesuffix("\n")
    if not begin or not written.startswith(prompt) or written == prompt:
        raise RequestError(
            "the chat template must write an answer where the prompt ends (got another text)"
        )
    return written[len(prompt) :]


class PromptEncoder:
    """Encodes rendered chats. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._by_turn = tokenizer.has_added(START)
        self._kept: OrderedDict[str, tuple[tuple[int, ...], bytes]] = OrderedDict()
        """By their text, the ids of turns, also packed."""
        self._size = 0
        self._lock = threading.Lock()

    def encode(self, text: str) -> EncodedPrompt:
        """Encode a chat as the template renders it, up to where the answer begins.

        Raises:
            RequestError: as Tokenizer.encode.
        """
        turns = _turns(text) if self._by_turn else [text]
        found: list[int] = []
        parts: list[bytes] = []
        ends: list[int] = []
        for turn in turns:
            part, packed_part = self._ids(turn)
            found += part
            parts.append(packed_part)
            ends.append(len(found))
        remember(ids := tuple(found), b"".join(parts))
        return EncodedPrompt(ids, text, _boundaries(turns, ends))

    def _ids(self, turn: str) -> tuple[tuple[int, ...], bytes]:
        with self._lock:
            if (found := self._kept.get(turn)) is not None:
                self._kept.move_to_end(turn)
                return found
        ids = self._tokenizer.encode(turn)
        found = tuple(ids), packed(ids)
        with self._lock:
            self._size += len(turn) if turn not in self._kept else 0
            self._kept[turn] = found
            while self._size > KEPT:
                self._size -= len(self._kept.popitem(last=False)[0])
        return found


def _turns(text: str) -> list[str]:
    begin, *turns = text.split(START)
    return [*([begin] if begin else []), *(START + turn for turn in turns)]


def _boundaries(turns: list[str], ends: list[int]) -> tuple[tuple[int, Boundary], ...]:
    if len(turns) < 2:  # the whole prompt, without the last turn: that of the answer
        return ((ends[-1], "prompt"),) if ends else ()
    found: list[tuple[int, Boundary]] = [(ends[-2], "prompt")]
    if turns[0].startswith(f"{START}system"):
        found.append((ends[0], "system"))
    for turn, end in zip(turns[-2::-1], ends[-2::-1], strict=True):
        if turn.startswith(f"{START}user\n") and not turn.startswith(_RESULTS):
            found.append((end, "user"))
            break
    return tuple(found)
