"""Training rows with pictures: prompts and positions are those of the runtime, and each token of an
image takes the row of its own picture.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from thor_dflash.calib.nano.corpus import document
from thor_dflash.calib.nano.pictured_corpus import (
    GRID,
    PicturedDocument,
    content_of,
    draw_pictured,
    draw_rows,
    join_rows,
    pack_pictured,
    prompt_ids,
    turns,
)
from thor_dflash.calib.nano.tokenizer import CHAT_TEMPLATE, SEEING_TEMPLATE
from thor_dflash.calib.planbench.drawing import FIRST_COLOUR, SIDE
from thor_dflash.calib.planbench.pictured import heldout_pictured, sample_pictured
from thor_dflash.runtime.vision.picture import Picture
from thor_dflash.runtime.vision.prompt_images import ImageNumbers, place_images

NANO = Path(__file__).parents[3] / "models" / "planner-nano"
TOKENIZER_FILE = NANO / "target" / "tokenizer.json"
TOKENIZER = Tokenizer.from_file(str(TOKENIZER_FILE))
PAD = TOKENIZER.token_to_id("<|image_pad|>")


def render(template: str, messages: list[dict[str, object]], **names: object) -> str:
    world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    world.globals["raise_exception"] = lambda text: pytest.fail(str(text))
    return world.from_string(template).render(
        messages=messages, add_generation_prompt=True, **names
    )


@pytest.mark.parametrize("thinking", [True, False])
def test_prompts_are_those_of_the_template(thinking: bool) -> None:
    pictured = heldout_pictured(1)[0]
    system, (role, text) = pictured.task.messages
    first: dict[str, object] = {"role": system[0], "content": system[1]}
    parts = [{"type": "text", "text": text}, {"type": "image"}]
    for content, image in ((parts, True), (parts[:1], False), (text, False)):
        chat = [first, {"role": role, "content": content}]
        ids = TOKENIZER.encode(render(SEEING_TEMPLATE, chat, enable_thinking=thinking)).ids
        want = [i for i in ids for _ in range(GRID.tokens if i == PAD else 1)]
        assert prompt_ids(TOKENIZER, pictured, thinking, image=image) == want
        if content is text:
            assert render(CHAT_TEMPLATE, chat, enable_thinking=thinking) == TOKENIZER.decode(
                ids, skip_special_tokens=False
            )


def test_positions_are_those_of_the_runtime() -> None:
    pictured = heldout_pictured(1)[0]
    ids = prompt_ids(TOKENIZER, pictured, thinking=True)
    picture, numbers = Picture(pictured.drawn.rgb), ImageNumbers()
    assert (picture.grid.rows, picture.grid.columns) == (GRID.rows, GRID.columns)
    rows = iter(numbers.ids(picture))
    prompt = [next(rows) if i == PAD else i for i in ids]
    want = place_images(prompt, [picture], numbers).positions
    np.testing.assert_array_equal(turns(np.array(ids, np.int16), PAD), want)


def test_a_token_of_an_image_takes_its_own_picture() -> None:
    seen = draw_pictured((TOKENIZER_FILE, "", 0, 6))
    docs = [*seen, *(document(TOKENIZER, "pair", str(i)) for i in range(4))]
    packed = pack_pictured(docs, 0, PAD)
    found: set[int] = set()
    for row, ids in enumerate(packed.rows.ids):
        starts = [*np.flatnonzero(packed.rows.pos[row] == 0), len(ids)]
        for start, end in pairwise(starts):
            doc = next((d for d in docs if np.array_equal(ids[start : start + len(d.ids)], d.ids)
                        and len(d.ids) <= end - start), None)  # fmt: skip
            taken = packed.slot[row, start:end]
            if not isinstance(doc, PicturedDocument):
                assert (taken == -1).all()
                continue
            first = int(taken.max()) - GRID.tokens + 1
            assert taken[ids[start:end] == PAD].tolist() == [first + i for i in range(GRID.tokens)]
            picture = packed.shown[row, first // GRID.tokens]
            assert np.array_equal(packed.pixels[picture], doc.pixels)
            found.add(int(picture))
            size = len(doc.ids)
            assert np.array_equal(packed.turn[row, start : start + size], turns(doc.ids, PAD))
    assert len(found) == len(packed.pixels) == len(seen)


def test_parts_that_are_joined_keep_their_pictures() -> None:
    jobs = ((0, 12, True), (0, 3, False), (12, 20, True), (0, 3, False))
    parts = [draw_rows((TOKENIZER_FILE, "", *job)) for job in jobs]
    joined, row = join_rows(parts), 0
    for part in parts:
        for i, slots in enumerate(part.slot):
            assert np.array_equal(joined.rows.ids[row], part.rows.ids[i])
            for j in range((slots.max() + 1) // GRID.tokens):
                picture = joined.pixels[joined.shown[row, j]]
                assert np.array_equal(picture, part.pixels[part.shown[i, j]])
            row += 1
    assert row == len(joined.slot)
    assert joined.shown.max() < len(joined.pixels) == 20


def test_the_content_of_a_token_is_that_of_its_pixels() -> None:
    drawn = sample_pictured("household", 5, "train").drawn
    side = SIDE // GRID.merged[0]
    for token, shows in enumerate(content_of(drawn)):
        y, x = divmod(token, GRID.merged[1])
        pixels = drawn.pixels[y * side : (y + 1) * side, x * side : (x + 1) * side]
        assert (len(np.unique(pixels)) > 1) == (shows[0] > 0)
        colours = {c + 1 - FIRST_COLOUR for c in np.unique(pixels) if c >= FIRST_COLOUR}
        assert colours == {int(c) for c in shows[3::2] if c}
