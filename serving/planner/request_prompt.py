"""The prompts of requests: rendered by the package's chat template, and encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from thor_dflash.config.decode import TEMPLATE_EFFORTS
from thor_dflash.core.errors import PlanError, RequestError
from thor_dflash.runtime.policies.effort import effort_tokens
from thor_dflash.runtime.session import Session
from thor_dflash.runtime.text.prompt_segments import EncodedPrompt, PromptEncoder, written_answer
from thor_dflash.runtime.text.template_process import NOTHING
from thor_dflash.runtime.text.tokenizer import Tokenizer
from thor_dflash.serving.protocol import errors, validation
from thor_dflash.serving.protocol import messages as wire
from thor_dflash.serving.protocol.errors import bad_request


class PromptWriter:
    """Writes the prompts of one session."""

    def __init__(self, session: Session, tokenizer: Tokenizer) -> None:
        self._session = session
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer)

    def prompt(
        self,
        messages: list[object],
        *,
        thinking: bool,
        field: str = "prompt",
        tools: Sequence[object] = (),
        options: Mapping[str, object] = NOTHING,
        pictures: int = 0,
    ) -> EncodedPrompt:
        """Render and encode a chat, in which `pictures` images are placeholders of one token each.

        Raises:
            PlanError: the template refuses it, or it is too long; names `field` or the part.
        """
        try:
            text = self._tokenizer.render(messages, thinking, tools, options, pictures)
        except RequestError as e:
            named = str(e).partition(" must ")[0]
            fine = named.startswith(("tools", "chat_template_kwargs", "messages"))
            raise PlanError(
                "bad_request", errors.refusal(e), field=named if fine else "messages"
            ) from e
        return self.encode(text, field)

    def encode(self, text: str, field: str = "prompt") -> EncodedPrompt:
        """Encode a text of a request. Raises: PlanError, which names `field`."""
        limit = self._session.model.limit
        # Encoding takes a second and 200 MB for each megabyte: refuse over-long text first.
        if len(text) > limit and (least := self._tokenizer.least(text)) > limit:
            rule = f"{field} must be <= {limit} tokens (got {least} or more)"
            raise PlanError("prompt_too_long", rule, field=field)
        try:
            return self._encoder.encode(text)
        except RequestError as e:
            raise PlanError("bad_request", errors.refusal(e), field=field) from e

    def effort(self, ask: wire.PlanRequest) -> tuple[int | None, dict[str, Any]]:
        """The thinking tokens of the request's effort, if it limits them, and the variables of the
        chat template.

        Raises:
            PlanError: the package does not know efforts.
        """
        variables = dict(ask.chat_template_kwargs or {})
        if ask.reasoning_effort in (None, "none"):
            return None, variables
        name = ask.reasoning_effort.replace("xhigh", "x-high")
        if "reasoning_effort" in self._tokenizer.options:
            return None, {"reasoning_effort": TEMPLATE_EFFORTS[name], **variables}
        try:
            return effort_tokens(name, self._session.manifest.card), variables
        except RequestError as e:
            rule = "none or left out: the package has no model card with the tokens of an effort"
            raise bad_request(
                f"reasoning_effort must be {rule} (got {ask.reasoning_effort})", "reasoning_effort"
            ) from e

    def forced_answer(
        self, ask: wire.PlanRequest, encoded: EncodedPrompt, *, thinking: bool
    ) -> tuple[int, ...]:
        """The given answer of a request as the template writes it behind the prompt `encoded`."""
        turns = validation.messages_of(ask.prompt, ask.messages)
        answer: dict[str, Any] = validation.turn_of(cast("wire.Message", ask.forced_answer))
        if not thinking:
            answer.pop("reasoning_content", None)  # the prompt has closed the thinking
        _, variables = self.effort(ask)
        shown = len(validation.image_names(ask))
        try:
            whole = self._tokenizer.render(
                [*turns, answer], thinking, ask.tools or (), variables, shown
            )
            written = written_answer(encoded.text, whole)
        except RequestError as e:
            text = errors.refusal(e).replace(f"messages[{len(turns)}]", "forced_answer")
            raise bad_request(text, "forced_answer") from e
        return self.encode(written, "forced_answer").ids
