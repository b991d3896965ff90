"""Chat templates as transformers renders them: sandboxed, with the same filters and tags, and in a
process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from thor_dflash.core.errors import PackageError, RequestError
from thor_dflash.core.message_text import show
from thor_dflash.core.strict_records import as_list, as_table
from thor_dflash.package import tokenizer_files as files
from thor_dflash.runtime.text.messages import ChatTurn
from thor_dflash.runtime.text.template_process import NOTHING, PROCESS


class Template:
    """The chat template of a package or a checkpoint, if it has one."""

    def __init__(self, source: str | None, names: dict[str, str], where: Path) -> None:
        self._source = source
        self._names = names
        self.variables: frozenset[str] = frozenset()
        """The names of what it reads, such as messages, tools and enable_thinking."""
        if source is None:
            return
        kind, text = PROCESS.render(source, names, None)  # only compiles it
        if kind != "text":
            # Jinja turns a template into Python, whose compiler has limits and rules of its own.
            raise PackageError(f"{where}: chat template must be valid jinja (got: {text})")
        self.variables = frozenset(json.loads(text))

    @property
    def given(self) -> bool:
        """Whether there is one."""
        return self._source is not None

    @classmethod
    def load(cls, directory: Path) -> Template:
        """Read chat_template.jinja, or else the template in tokenizer_config.json.

        Raises:
            PackageError: it is no valid template.
            CheckpointError: tokenizer_config.json is not valid.
        """
        config = files.read_json(directory / files.TOKENIZER_CONFIG)
        names = {
            name: word
            for name, value in config.items()
            if name.endswith("_token") and (word := files.content(value)) is not None
        }
        path = directory / files.TEMPLATE
        if files.present(path):
            try:
                source = path.read_text(encoding="utf-8")
            except ValueError as e:
                raise PackageError(f"{path} must be UTF-8 (got: {e})") from e
            return cls(source, names, path)
        return cls(_default(config.get("chat_template"), directory), names, directory)

    def render(
        self,
        messages: list[ChatTurn],
        *,
        tools: Sequence[object] = (),
        options: Mapping[str, object] = NOTHING,
    ) -> str:
        """The prompt, up to where the answer begins.

        Args:
            messages: As `chat` returns them.
            tools: OpenAI's objects, as the client sent them.
            options: Variables of the template, such as enable_thinking.

        Raises:
            RequestError: there is no template, it does not read `tools` or `tool_calls`, or it
                fails with these messages or within the limits of time, length and memory.
        """
        if self._source is None:
            raise RequestError("a chat must have a package with a chat template (got one without)")
        rule = "left out: the chat template does not use them"
        if tools and "tools" not in self.variables:
            raise RequestError(f"tools must be {rule}")
        for i, message in enumerate(messages):
            if message.get("tool_calls") and "tool_calls" not in self._source:
                raise RequestError(f"messages[{i}].tool_calls must be {rule}")
        kind, text = PROCESS.render(self._source, self._names, messages, tools, options)
        if kind != "text":
            raise RequestError(f"messages must suit the chat template (got: {text})")
        return text


def _default(given: object, directory: Path) -> str | None:
    """The template under `chat_template`: a text, or one of a list of named ones."""
    if given is None or isinstance(given, str):
        return given
    rows = [as_table(row) or {} for row in as_list(given) or ()]
    source = next((row.get("template") for row in rows if row.get("name") == "default"), None)
    if not isinstance(source, str):
        raise PackageError(
            f"{directory / files.TOKENIZER_CONFIG}: chat_template must be a template, or a list "
            f"with one of the name default (got {show(given)})"
        )
    return source
