"""The grammars that answers are decoded under."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from thor_dflash.core.errors import CompilerBusy, PlanError, RequestError
from thor_dflash.runtime.grammar.compiler import COMPILE_S, Grammar
from thor_dflash.runtime.grammar.tools import ToolUse
from thor_dflash.runtime.session import Session
from thor_dflash.runtime.text.tokenizer import Tokenizer
from thor_dflash.serving.planner.answer_rule import AnswerRule
from thor_dflash.serving.protocol import errors

T = TypeVar("T")


class AnswerGrammars:
    """Compiles what requests demand of their answers; the session keeps what it has compiled."""

    def __init__(self, session: Session, tokenizer: Tokenizer) -> None:
        self._session = session
        self._brace = tokenizer.encode("{")

    def of_answer(self, use: ToolUse | None, rule: AnswerRule) -> Grammar | None:
        """The grammar of an answer: of its calls, of its text, or of either; None: anything may be
        answered.

        Raises:
            PlanError: the grammar is not supported, or too many are being compiled.
        """
        schema, calls = rule.schema, use is not None and use.choice != "none"
        if use is None or not calls or not (use.constrained or schema is not None):
            return self.of_text(rule)
        if use.choice != "required":
            self.of_text(rule)  # refuses what cannot be an answer, under its own field
        return self._compiled("tools", lambda: self._session.call_grammar(use, schema))

    def of_text(self, rule: AnswerRule) -> Grammar | None:
        """The grammar of an answer without calls. Raises: see of_answer."""
        if rule.lark:
            return self._compiled(rule.field, lambda: self._session.lark_grammar(rule.lark))
        if (schema := rule.schema) is None:
            return None

        def work() -> tuple[Grammar, bool]:
            grammar = self._session.grammar(schema)
            return grammar, grammar.takes(self._brace)

        grammar, object_allowed = self._compiled(rule.field, work)
        if not object_allowed:
            raise errors.no_object(schema.table)
        return grammar

    def _compiled(self, field: str, work: Callable[[], T]) -> T:
        """Compile; an error names the field of the request."""
        try:
            return work()
        except CompilerBusy as e:
            wait_ms = 1e3 * COMPILE_S
            raise PlanError("busy", errors.refusal(e), field=field, retry_after_ms=wait_ms) from e
        except RequestError as e:
            raise PlanError("schema_unsupported", errors.refusal(e), field=field) from e
