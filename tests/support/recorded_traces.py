"""Small recorded traces of the form of MLPerf's Edge Agentic trace, and a template for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages if m.role != 'system' %}
{{- '<|im_start|>' }}{{ 'user' if m.role == 'tool' else m.role }}
{% if m.role == 'tool' %}<tool_response>
{{ m.content }}
</tool_response>
{%- elif m.role == 'user' %}{{ m.content }}
{%- else %}<think>
{{ m.reasoning_content }}
</think>

{% for call in m.tool_calls or [] %}<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>
{{ value }}
</parameter>
{% endfor %}</function>
</tool_call>
{%- endfor %}
{%- endif %}<|im_end|>
{% endfor %}<|im_start|>assistant
<think>
{% if not enable_thinking %}

</think>

{% endif %}"""
"""As Qwen3.6's does in what matters: an answer's thinking stays, and a prompt without thinking ends
with an empty one."""
BASH = {"type": "function", "function": {
    "name": "bash",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}},
                   "required": ["command"]}}}  # fmt: skip
WORDS = "put the red cup on tray wait for arm two then take bowl from table and go".split()


def rows(conversations: int, turns: int, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations in which every answer calls `bash` once."""
    random = Random(seed)

    def words(most: int) -> str:
        return " ".join(random.choices(WORDS, k=random.randint(3, most)))

    found: list[dict[str, Any]] = []
    for i in range(conversations):
        name = f"c{i}"
        found.append({"conversation_id": name, "turn": 1, "role": "user", "content": words(20),
                      "system": " ".join(WORDS), "tools": [BASH]})  # fmt: skip
        for turn in range(turns):
            call_id = f"{name}.{turn}"
            command = json.dumps({"command": f"ls {words(5)}"})
            call = {"id": call_id, "type": "function",
                    "function": {"name": "bash", "arguments": command}}  # fmt: skip
            found.append({"conversation_id": name, "turn": 2 * turn + 2, "role": "assistant",
                          "reasoning_content": words(6), "tool_calls": [call]})  # fmt: skip
            results = [{"tool_call_id": call_id, "content": words(30)}]
            found.append({"conversation_id": name, "turn": 2 * turn + 3, "role": "tool",
                          "tool_results": results, "delay_seconds": 1.0})  # fmt: skip
        found.pop()  # the last answer has no result
    return found


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write a trace; return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
