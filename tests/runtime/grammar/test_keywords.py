"""What a grammar allows is valid, by a validator that we did not write, in the dialect 2020-12."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from support.constrained_model import session
from support.schema_walks import DIGIT, KEYWORD_CASES, schema, values

from thor_dflash.core.errors import PlanError, RequestError
from thor_dflash.runtime.grammar.schema import ANNOTATIONS, DIALECT, KEYWORDS, read
from thor_dflash.serving.planner.schema_validator import SchemaValidator, read_schema


def test_every_keyword_has_a_case() -> None:
    assert {key for keys in KEYWORD_CASES for key in keys.split()} | ANNOTATIONS == KEYWORDS


@pytest.mark.parametrize("keys", KEYWORD_CASES)
def test_what_the_grammar_allows_is_valid(keys: str) -> None:
    for case in KEYWORD_CASES[keys]:
        assert set(keys.split()) & case.keys(), case
        found = values(Random(0), session().grammar(case), 8)
        assert found, case
        valid = SchemaValidator(read(case)).valid
        assert [value for value in found if not valid(value)] == [], case


@pytest.mark.slow
def test_what_the_grammar_of_any_schema_allows_is_valid() -> None:
    refused = 0
    for seed in range(1000):
        random = Random(seed)
        made = schema(random)
        try:
            grammar = session().grammar(made)
        except RequestError:
            refused += 1
            continue
        checker = SchemaValidator(read(made))
        for value in values(random, grammar, 6):
            assert checker.valid(value), (seed, made, value)
    assert refused < 600


OLD = [f"http://json-schema.org/draft-0{n}/schema#" for n in (4, 6, 7)]
OLD += ["https://json-schema.org/draft/2019-09/schema", "https://example.org/own", 7]


@pytest.mark.parametrize("dialect", OLD)
def test_a_schema_of_another_dialect_is_refused(dialect: Any) -> None:
    """An older draft has no prefixItems and no const, and would ignore them."""
    made = {"type": "array", "prefixItems": [DIGIT] * 3, "minItems": 3, "maxItems": 3}
    for case in ({"$schema": dialect, **made}, {**made, "items": {"$schema": dialect}}):
        with pytest.raises(PlanError) as caught:
            read_schema(case)
        assert (caught.value.code, caught.value.field) in {
            ("schema_unsupported", "json_schema"),
            ("schema_invalid", "json_schema"),
        }
        assert DIALECT in caught.value.message


@pytest.mark.parametrize("dialect", [DIALECT, f"{DIALECT}#"])
def test_the_dialect_of_today_may_be_named(dialect: str) -> None:
    made = {"$schema": dialect, "type": "array", "prefixItems": [DIGIT], "maxItems": 1}
    checker = SchemaValidator(read(made))
    for value in values(Random(0), session().grammar(made), 4):
        assert checker.valid(value)
    assert not checker.valid([True])
