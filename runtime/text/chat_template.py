"""Chat templates as transformers renders them: sandboxed, with the same filters and tags."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from thor_dflash.core.errors import PackageError, RequestError
from thor_dflash.core.message_text import show
from thor_dflash.core.strict_records import as_list, as_table
from thor_dflash.package import tokenizer_files as files


class Template:
    """The chat template of a package or a checkpoint, if it has one."""

    def __init__(self, source: str | None, names: dict[str, str], where: Path) -> None:
        self._names = names
        self._where = where
        try:
            self._template = None if source is None else _environment().from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError, ValueError) as e:
            # Jinja turns a template into Python, whose compiler has limits and rules of its own.
            raise PackageError(f"{where}: chat template must be valid jinja (got: {e})") from e

    @property
    def given(self) -> bool:
        """Whether there is one."""
        return self._template is not None

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

    def render(self, messages: list[dict[str, str]], thinking: bool) -> str:
        """The prompt, up to where the answer begins.

        Raises:
            RequestError: there is no template, or it refuses these messages.
            PackageError: it fails.
        """
        if self._template is None:
            raise RequestError("a chat must have a package with a chat template (got one without)")
        try:
            return self._template.render(
                self._names,
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                enable_thinking=thinking,
            )
        except jinja2.TemplateError as e:
            raise RequestError(f"messages must suit the chat template (got: {e})") from e
        except Exception as e:  # a template is a program and can raise anything
            kind = type(e).__name__
            raise PackageError(f"{self._where}: chat template must run (got {kind}: {e})") from e


class _Generation(Extension):
    """The tag around a model's own output, which only training uses."""

    tags = {"generation"}  # noqa: RUF012  # declared so by jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope, as in transformers: what is set inside is not seen after it.
        return nodes.Scope(body, lineno=line)


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


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    env.filters["tojson"] = _tojson
    # update, not assignment: jinja types the values of its own globals only.
    env.globals.update(_globals())
    return env


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML, and a prompt is not HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _globals() -> dict[str, Any]:
    return {"raise_exception": _refuse, "strftime_now": _now}


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
