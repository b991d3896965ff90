"""The files of planner-nano, the model in the repository: sizes, tensors, tokenizer, chat template
and held-out tasks.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

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


def tensors(part: str) -> dict[str, tuple[str, list[int]]]:
    """Returns type and shape of every stored tensor, from the header of the safetensors file."""
    with (NANO / part / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    return {k: (v["dtype"], v["shape"]) for k, v in header.items() if k != "__metadata__"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(NANO / "target" / "tokenizer.json"))


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    lines = (NANO / "heldout.jsonl").read_text().splitlines()
    return [task_from_line(line) for line in lines]


def test_both_checkpoints_fit_in_ten_megabytes() -> None:
    files = [p for part in ("target", "drafter") for p in (NANO / part).iterdir()]
    assert sum(p.stat().st_size for p in files) <= 10_000_000


def expected(stem: str, rows: int, cols: int) -> dict[str, tuple[str, list[int]]]:
    """Returns the tensors that an NVFP4 linear is stored as, in ModelOpt's form."""
    assert cols % 64 == 0
    return {
        f"{stem}.weight": ("U8", [rows, cols // 2]),
        f"{stem}.weight_scale": ("F8_E4M3", [rows, cols // 16]),
        f"{stem}.weight_scale_2": ("F32", []),
    }


def mlp(stem: str, c: dict[str, Any]) -> dict[str, tuple[str, list[int]]]:
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    return {
        **expected(f"{stem}.mlp.gate_proj", inner, hidden),
        **expected(f"{stem}.mlp.up_proj", inner, hidden),
        **expected(f"{stem}.mlp.down_proj", hidden, inner),
        f"{stem}.input_layernorm.weight": ("BF16", [hidden]),
        f"{stem}.post_attention_layernorm.weight": ("BF16", [hidden]),
    }


def attention(stem: str, c: dict[str, Any], gated: int) -> dict[str, tuple[str, list[int]]]:
    hidden, dim = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    return {
        **expected(f"{stem}.q_proj", gated * q, hidden),
        **expected(f"{stem}.k_proj", kv, hidden),
        **expected(f"{stem}.v_proj", kv, hidden),
        **expected(f"{stem}.o_proj", hidden, q),
        f"{stem}.q_norm.weight": ("BF16", [dim]),
        f"{stem}.k_norm.weight": ("BF16", [dim]),
    }


def gdn(stem: str, c: dict[str, Any]) -> dict[str, tuple[str, list[int]]]:
    hidden, heads = c["hidden_size"], c["linear_num_value_heads"]
    values = heads * c["linear_value_head_dim"]
    channels = values + 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"]
    return {
        **expected(f"{stem}.in_proj_qkv", channels, hidden),
        **expected(f"{stem}.in_proj_z", values, hidden),
        **expected(f"{stem}.out_proj", hidden, values),
        f"{stem}.in_proj_a.weight": ("BF16", [heads, hidden]),
        f"{stem}.in_proj_b.weight": ("BF16", [heads, hidden]),
        f"{stem}.conv1d.weight": ("BF16", [channels, 1, c["linear_conv_kernel_dim"]]),
        f"{stem}.A_log": ("BF16", [heads]),
        f"{stem}.dt_bias": ("BF16", [heads]),
        f"{stem}.norm.weight": ("BF16", [c["linear_value_head_dim"]]),
    }


def test_target_tensors_are_those_of_the_config() -> None:
    c = config("target")
    wanted: dict[str, tuple[str, list[int]]] = {
        "model.embed_tokens.weight": ("BF16", [c["vocab_size"], c["hidden_size"]]),
        "model.norm.weight": ("BF16", [c["hidden_size"]]),
    }
    for index, kind in enumerate(c["layer_types"]):
        stem = f"model.layers.{index}"
        full = kind == "full_attention"
        mixer = attention(f"{stem}.self_attn", c, 2) if full else gdn(f"{stem}.linear_attn", c)
        wanted |= mlp(stem, c) | mixer
    assert tensors("target") == wanted
    assert c["layer_types"] == (["linear_attention"] * 3 + ["full_attention"]) * 2


def test_drafter_tensors_are_those_of_the_config() -> None:
    c = config("drafter")
    hidden, ids = c["hidden_size"], c["dflash_config"]["target_layer_ids"]
    wanted = {
        **expected("fc", hidden, len(ids) * hidden),
        "hidden_norm.weight": ("BF16", [hidden]),
        "norm.weight": ("BF16", [hidden]),
    }
    for index in range(c["num_hidden_layers"]):
        stem = f"layers.{index}"
        wanted |= mlp(stem, c) | attention(f"{stem}.self_attn", c, 1)
    assert tensors("drafter") == wanted
    layers, taps = c["num_target_layers"], len(ids)
    assert ids == [round(1 + i * (layers - 4) / (taps - 1)) for i in range(taps)]
    assert c["hidden_size"] == config("target")["hidden_size"]
    assert c["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]


def test_special_tokens(tokenizer: Tokenizer) -> None:
    c, d = config("target"), config("drafter")
    assert d["dflash_config"]["mask_token_id"] == tokenizer.token_to_id("<|audio_start|>")
    stops = json.loads((NANO / "target" / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]
    assert tokenizer.get_vocab_size() < c["vocab_size"]
    added = tokenizer.get_added_tokens_decoder()
    assert not any(t.special for t in added.values() if t.content in ("<think>", "</think>"))


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


@pytest.mark.parametrize(
    ("messages", "names", "message"),
    [
        ([USER], {"tools": [{}]}, "tools must be empty"),
        ([], {}, "must not be empty"),
        ([{"role": "system", "content": "x"}], {}, "must hold a user message"),
        ([USER, {"role": "system", "content": "x"}], {}, "must be first"),
        ([USER, {"role": "developer", "content": "x"}], {}, "got developer"),
    ],
)
def test_template_refuses(
    messages: list[dict[str, str]], names: dict[str, object], message: str
) -> None:
    with pytest.raises(jinja2.TemplateError, match=message):
        render(messages, **names)


def test_the_held_out_file_is_what_the_generator_gives(tasks: list[Task]) -> None:
    assert [task_to_line(t) for t in tasks] == [task_to_line(t) for t in heldout(120)]
    assert all(sum(t.family == f for t in tasks) == 20 for f in FAMILIES)
    assert all(judge(task, task.plan).valid for task in tasks)
