"""Templates that read reasoning_effort and preserve_thinking, as Qwen3.8's: by one of our own, and
by the published one where that is at hand.
"""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.published_templates import by_jinja, published, published_template, source_of

from thor_dflash.core.errors import RequestError
from thor_dflash.runtime.text.chat_template import Template
from thor_dflash.runtime.text.messages import chat

OWN = r"""
{%- macro turn(role, text) %}
{{- '<|im_start|>' + role + '\n' + text + '<|im_end|>\n' }}
{%- endmacro %}
{%- set parts = [] %}
{%- if enable_thinking is undefined or enable_thinking is true %}
{%- set effort = reasoning_effort | default('xhigh') %}
{%- if effort not in ('xhigh', 'medium', 'low') %}
{{- raise_exception('no such effort') }}
{%- endif %}
{%- if effort != 'medium' %}{%- set parts = parts + ['Effort: ' + effort] %}{%- endif %}
{%- endif %}
{%- if tools %}{%- set parts = parts + ['# Tools ' + tools | tojson] %}{%- endif %}
{%- if messages[0].role == 'system' and messages[0].content | trim %}
{%- set parts = parts + [messages[0].content | trim] %}
{%- endif %}
{%- if parts %}{{- turn('system', parts | join('\n\n')) }}{%- endif %}
{%- set state = namespace(last=0) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set state.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- turn('user', m.content | trim) }}
{%- elif m.role == 'assistant' %}
{%- set text = m.content | trim %}
{%- if preserve_thinking is undefined or preserve_thinking is true or loop.index0 > state.last %}
{%- set thought = (m.reasoning_content | default('', true)) | trim %}
{%- set text = '<think>\n' + thought + '\n</think>\n\n' + text %}
{%- endif %}
{{- turn('assistant', text) }}
{%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\n<think>\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '\n</think>\n\n' }}{%- endif %}
"""
"""Not Qwen's text: its own words, with the same decisions about what this repository passes."""
EFFORTS = {"xhigh": "Effort: xhigh", "medium": "", "low": "Effort: low"}
SYSTEMS = (None, "Be brief.", " \n")
TOOLS: list[Any] = [{"type": "function", "function": {"name": "stop"}}]
PAST: list[Any] = [
    {"role": "user", "content": "Go. "},
    {
        "role": "assistant",
        "content": "<think>in the text</think>Yes.",
        "reasoning_content": " Hm. ",
    },
    {"role": "user", "content": "On."},
    {"role": "assistant", "content": "More."},
]


def history(system: str | None) -> list[Any]:
    return [{"role": "system", "content": system}, *PAST] if system is not None else PAST


def every_option() -> list[dict[str, Any]]:
    """Efforts, thinking and kept thoughts, each also left out."""
    efforts = [{}, *({"reasoning_effort": name} for name in EFFORTS)]
    thinking = [{}, {"enable_thinking": True}, {"enable_thinking": False}]
    kept = [{}, {"preserve_thinking": True}, {"preserve_thinking": False}]
    return [{**a, **b, **c} for a, b, c in product(efforts, thinking, kept)]


def expected(
    messages: list[Any], instructions: dict[str, str], tools: str, options: dict[str, Any]
) -> str:
    """The prompt, from the six differences of Qwen3.8's template to 3.6's."""
    thinks = options.get("enable_thinking", True)
    parts = [instructions[options.get("reasoning_effort", "xhigh")] if thinks else "", tools]
    if messages[0]["role"] == "system":
        parts.append(messages[0]["content"].strip())
    head = "\n\n".join(filter(None, parts))
    text = f"<|im_start|>system\n{head}<|im_end|>\n" if head else ""
    last = max(i for i, turn in enumerate(messages) if turn["role"] == "user")
    for i, turn in enumerate(messages):
        content = turn["content"].strip()
        if turn["role"] == "assistant" and (options.get("preserve_thinking", True) or i > last):
            thought = turn.get("reasoning_content", "").strip()
            content = f"<think>\n{thought}\n</think>\n\n{content}"
        if turn["role"] != "system":
            text += f"<|im_start|>{turn['role']}\n{content}<|im_end|>\n"
    return text + "<|im_start|>assistant\n<think>\n" + ("" if thinks else "\n</think>\n\n")


def test_every_option_reaches_a_template() -> None:
    template = Template(OWN, {}, Path())
    assert {"reasoning_effort", "preserve_thinking", "enable_thinking"} <= template.variables
    for options, system, tools in product(every_option(), SYSTEMS, ([], TOOLS)):
        messages = history(system)
        words = f"# Tools {json.dumps(tools)}" if tools else ""
        found = template.render(chat(messages), tools=tools, options=options)
        assert found == expected(messages, EFFORTS, words, options), (options, system)


@pytest.mark.parametrize("own", [True, pytest.param(False, marks=published)])
def test_an_effort_that_is_not_known_is_refused_where_it_thinks(own: bool) -> None:
    template = Template(OWN, {}, Path()) if own else published_template("qwen38")
    with pytest.raises(RequestError, match="messages must suit"):
        template.render(chat(PAST), options={"reasoning_effort": "high"})
    off = {"reasoning_effort": "high", "enable_thinking": False}
    assert template.render(chat(PAST), options=off).endswith("</think>\n\n")


@published
def test_the_published_template_renders_as_jinja_does_and_decides_so() -> None:
    source, template = source_of("qwen38"), published_template("qwen38")
    pattern = r"'(Reasoning effort is set to (\w+)\.[^']*)'"
    instructions = {"medium": "", **{name: text for text, name in re.findall(pattern, source)}}
    assert instructions.keys() == EFFORTS.keys()
    for options, system, tools in product(every_option(), SYSTEMS, ([], TOOLS)):
        messages = history(system)
        found = template.render(chat(messages), tools=tools, options=options)
        assert found == by_jinja(source, messages, tools, **options)
        if not tools:
            assert found == expected(messages, instructions, "", options), (options, system)
