"""What a server over a real session says when it refuses a plan."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.constrained_model import PLAN

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import PlanError
from thor_dflash.runtime.session import Session
from thor_dflash.serving.planner.schema_validator import SchemaValidator, read_schema
from thor_dflash.serving.planner.session_backend import SessionBackend
from thor_dflash.serving.protocol.messages import PlanRequest, Validate
from thor_dflash.serving.protocol.validation import MESSAGE


@pytest.fixture
def backend(session: Session) -> SessionBackend:
    return SessionBackend(session, ServeConfig())


def test_a_schema_behind_another_that_is_being_compiled_may_be_sent_again(
    backend: SessionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.validate(Validate(json_schema=PLAN))  # makes the compiler
    compiler = backend.session._grammars
    assert compiler is not None
    monkeypatch.setattr(compiler, "seconds", 0.05)
    with compiler._compiler, pytest.raises(PlanError, match="compiled on its own") as caught:
        backend.prepare(
            PlanRequest(prompt="x", json_schema={"type": "object", "title": "new"}), None
        )
    assert (caught.value.code, caught.value.field) == ("busy", "json_schema")
    assert caught.value.retryable
    assert caught.value.retry_after_ms


def test_a_refused_schema_repeats_no_name_of_any_length_or_content(backend: SessionBackend) -> None:
    for name in ("n" * 10**5, "n\x1b[31m"):
        for schema in ({name: 1}, {"properties": {name: {"not": {}}}}):
            with pytest.raises(PlanError, match="supported keywords only") as caught:
                backend.prepare(PlanRequest(prompt="x", json_schema=schema), None)
            assert len(caught.value.message) <= MESSAGE
            assert caught.value.message.isprintable()


def test_a_plan_too_long_names_each_part_as_it_was_given(backend: SessionBackend) -> None:
    with pytest.raises(PlanError) as caught:
        backend.prepare(PlanRequest(prompt="x", max_tokens=9999, thinking="off"), None)
    assert re.search(r"^prompt and max_tokens together .*\+ 9999 = \d+\)$", caught.value.message)
    with pytest.raises(PlanError) as caught:
        backend.prepare(PlanRequest(prompt="x", max_tokens=9999, thinking="on"), None)
    told = caught.value.message
    assert "the message that closes the thinking" in told
    numbers = [int(n) for n in re.findall(r"\d+", told.partition("(got ")[2])]
    assert len(numbers) == 4
    assert numbers[1] == 9999
    assert sum(numbers[:3]) == numbers[3]


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"type": "foo"}}}, " at properties.a.type: "),
        ({"properties": 3}, "3"),
        ({"properties": {"n" * 10**5: 3}}, "3"),
        ({"properties": {"n\x1b": 3}}, "3"),
    ],
)
def test_a_schema_that_is_none_is_refused_by_place(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(PlanError, match=rf"\(got{place}|\(got {place}\)") as caught:
        SchemaValidator(read_schema(schema))
    assert (caught.value.code, caught.value.field) == ("schema_invalid", "json_schema")
    assert len(caught.value.message) <= MESSAGE
    assert caught.value.message.isprintable()
