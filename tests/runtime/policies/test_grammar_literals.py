"""A schema's own words in an answer, whatever the tokenizer would make of them."""

from __future__ import annotations

import json

import pytest
from constrained import asked, constrained, session, text

from thor_dflash.runtime.propose import Nobody


@pytest.mark.parametrize(
    "literal",
    ["cafe\u0301", "\uf900", "\u1112\u1161\u11ab", "<|im_end|>", "x<|endoftext|>", "a<think>b",
     "</think>"],
)  # fmt: skip
@pytest.mark.parametrize("force", [True, False])
def test_a_literal_is_spelt_as_it_stands(literal: str, force: bool) -> None:
    """What the tokenizer would write otherwise, or as a token that is no text."""
    said = {"object": {"type": "object", "properties": {literal: {"const": literal}}}}
    said["object"] |= {"required": [literal], "additionalProperties": False}
    schema = {"type": "object", "properties": said, "required": ["object"]}
    schema["additionalProperties"] = False
    out = constrained(asked(False), Nobody(), session().grammar(schema), force=force)
    assert session().report().finish == "stop"
    assert json.loads(text().decode(out)) == {"object": {literal: literal}}
