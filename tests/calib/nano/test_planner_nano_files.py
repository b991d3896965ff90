"""The files of planner-nano, the model in the repository: sizes, tensors, tokenizer, chat template
and held-out tasks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from thor_dflash.builders.checkpoint.drafter import check_pair, drafter_layout, read_drafter
from thor_dflash.builders.checkpoint.quantized_matrix import WeightFormat
from thor_dflash.builders.checkpoint.target import read_target, target_layout
from thor_dflash.calib.nano.dims import tap_layers
from thor_dflash.calib.planbench import (
    FAMILIES,
    Task,
    heldout,
    judge,
    sample,
    task_from_line,
    task_to_line,
)

NANO = Path(__file__).parents[3] / "models" / "planner-nano"


def config(part: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((NANO / part / "config.json").read_text())
    return loaded


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(NANO / "target" / "tokenizer.json"))


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    lines = (NANO / "heldout.jsonl").read_text().splitlines()
    return [task_from_line(line) for line in lines]


@pytest.mark.parametrize("name", ["drafter", "drafter2"])
def test_checkpoints_are_read_and_their_linears_are_nvfp4(name: str) -> None:
    """Reading checks that the tensors are those of the config, in names, shapes and types."""
    target, drafter = read_target(NANO / "target"), read_drafter(NANO / name)
    assert (drafter.dims.selector is not None) == (name == "drafter2")
    check_pair(target.dims, drafter.dims)
    for source, layout in ((target, target_layout(target.dims)),
                           (drafter, drafter_layout(drafter.dims))):  # fmt: skip
        plain = {linear for linear in layout.matrices
                 if source.matrix(linear).kind is not WeightFormat.NVFP4}  # fmt: skip
        kept = ("in_proj_a", "in_proj_b", "kernel_projection", "hidden_projection")
        assert all(linear.endswith(kept) for linear in plain)
    assert target.dims.layers == ("gdn", "gdn", "gdn", "attention") * 2
    layers, taps = len(target.dims.layers), len(drafter.dims.taps)
    assert drafter.dims.taps == tuple(tap_layers(layers, taps))
    slides = [layer.window > 0 for layer in drafter.dims.layers]
    assert slides == [True, True, name == "drafter2"]


def test_corpus_text_survives_the_tokenizer(tokenizer: Tokenizer, tasks: list[Task]) -> None:
    for task in tasks:
        for text in (task.messages[1][1], task.thinking, task.plan):
            ids = tokenizer.encode(text).ids
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
            assert max(ids) < tokenizer.get_vocab_size()
    odd = "Größe 北京 🤖 mug_42\n\n don't"
    assert tokenizer.decode(tokenizer.encode(odd).ids) == odd
    assert tokenizer.encode("42").tokens == ["4", "2"]
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids


def test_no_task_is_longer_than_the_model_was_made_for(tokenizer: Tokenizer) -> None:
    """768 tokens of prompt and answer, of which 32 are left for the chat template's marks."""
    for family in FAMILIES:
        for seed in range(60):
            task = sample(family, seed, "train")
            parts = [*(content for _, content in task.messages), task.thinking, task.plan]
            assert sum(len(tokenizer.encode(part).ids) for part in parts) <= 768 - 32


def render(messages: list[dict[str, str]], **names: object) -> str:
    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    world.globals["raise_exception"] = fail
    template = world.from_string((NANO / "target" / "chat_template.jinja").read_text())
    return template.render(messages=messages, add_generation_prompt=True, **names)


USER = {"role": "user", "content": " move it "}


def test_template_renders_the_family_shape() -> None:
    system = {"role": "system", "content": "be brief"}
    again = "<|im_start|>user\nmove it<|im_end|>\n"
    start = "<|im_start|>system\nbe brief<|im_end|>\n" + again
    answer = "<|im_start|>assistant\n"
    assert render([system, USER]) == start + answer + "<think>\n"
    off = render([system, USER], enable_thinking=False)
    assert off == start + answer + "<think>\n\n</think>\n\n"
    old = {"role": "assistant", "content": "<think>\nhm\n</think>\n\ndone"}
    history = render([system, USER, old, USER])
    assert history == start + answer + "done<|im_end|>\n" + again + answer + "<think>\n"
    kept = render([system, USER, old])
    assert (
        kept == start + answer + "<think>\nhm\n</think>\n\ndone<|im_end|>\n" + answer + "<think>\n"
    )


def test_the_held_out_file_is_what_the_generator_gives(tasks: list[Task]) -> None:
    assert [task_to_line(t) for t in tasks] == [task_to_line(t) for t in heldout(120)]
    assert all(sum(t.family == f for t in tasks) == 20 for f in FAMILIES)
    assert all(judge(task, task.plan).valid for task in tasks)
