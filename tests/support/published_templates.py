"""The chat templates that Qwen publishes. They are not part of this repository: tests that need one
are skipped unless `../shared/data`, beside the checkout, has it (CONTRIBUTING.md).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest

from thor_dflash.runtime.text.chat_template import Template

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared/data"
NAMES = ("qwen36", "qwen38")
published = pytest.mark.skipif(
    not all((DATA / f"{name}_chat_template.jinja").exists() for name in NAMES),
    reason="needs Qwen's templates in ../shared/data (CONTRIBUTING.md)",
)


def source_of(name: str) -> str:
    """The text of a published template."""
    return (DATA / f"{name}_chat_template.jinja").read_text(encoding="utf-8")


def published_template(name: str) -> Template:
    """A published template as the product runs it."""
    return Template(source_of(name), {}, DATA)


@cache
def _compiled(source: str) -> jinja2.Template:
    env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    env.globals["raise_exception"] = lambda text: pytest.fail(text)
    return env.from_string(source)


def by_jinja(source: str, messages: list[Any], tools: list[Any], **options: Any) -> str:
    """What jinja itself makes of a template."""
    return _compiled(source).render(
        messages=messages, tools=tools, add_generation_prompt=True, **options
    )
