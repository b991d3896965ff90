"""The literals of a schema appear in an answer exactly as they are, whatever the tokenizer would
make of them; those for which that is impossible are refused.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from support.constrained_model import asked, constrained, session, text

from thor_dflash.core.errors import RequestError
from thor_dflash.runtime.decoding.proposers import NoDrafter


@pytest.mark.parametrize(
    "literal",
    ["cafe\u0301", "\uf900", "\u1112\u1161\u11ab", "<|im_end|>", "x<|endoftext|>", "a<think>b",
     "</think>"],
)  # fmt: skip
@pytest.mark.parametrize("force", [True, False])
def test_a_literal_is_spelt_as_it_stands(literal: str, force: bool) -> None:
    """The tokenizer would normalise these to other chars, or encode them as an added token."""
    written = {"object": {"type": "object", "properties": {literal: {"const": literal}}}}
    written["object"] |= {"required": [literal], "additionalProperties": False}
    schema = {"type": "object", "properties": written, "required": ["object"]}
    schema["additionalProperties"] = False
    out = constrained(asked(False), NoDrafter(), session().grammar(schema), force=force)
    assert session().report().finish == "stop"
    assert json.loads(text().decode(out)) == {"object": {literal: literal}}


def legal(schema: dict[str, Any], written: str) -> bool:
    """Whether the schema allows the whole answer `written`, with one token for each byte."""
    matcher = session().grammar(schema).matcher.deep_copy()
    known = {text().bytes_of(i): i for i in range(session().manifest.vocab_limit)}
    ids = [known[bytes([byte])] for byte in written.encode()]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_a_declared_key_has_one_spelling() -> None:
    """Spelt another way, it would count as an undeclared key, whose value obeys another schema."""
    written = {"a": {"type": "integer"}, "\n": {"type": "null"}}
    schema = {"type": "object", "properties": written, "additionalProperties": {"type": "string"}}
    assert legal(schema, '{"a":1,"\\n":null,"b":"x"}')
    for key in ("\\u0061", "\\u000a", "\\u000A", "\\ud800"):
        assert not legal(schema, f'{{"{key}":"x"}}'), key


@pytest.mark.parametrize("number", [2**53, -(2**53), 1e18, 1e-320, math.inf, 108802381155.48213])
@pytest.mark.parametrize("key", ["const", "enum"])
def test_a_number_that_the_compiler_would_change_is_refused(number: float, key: str) -> None:
    value = {"a": [True, 1, number]}
    where = "const" if key == "const" else r"enum\[1\]"
    with pytest.raises(RequestError, match=rf"schema.items.{where}.a\[2\] must be -9007"):
        session().grammar({"items": {key: value if key == "const" else ["x", value]}})
