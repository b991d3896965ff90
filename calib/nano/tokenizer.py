"""The tokenizer of planner-nano: byte-level BPE with Qwen's pre-tokenisation, special tokens and
chat template.
"""

# tokenizers publishes incomplete types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from thor_dflash.calib.nano.dims import BPE_ENTRIES
from thor_dflash.calib.planbench import FAMILIES, Task, sample
from thor_dflash.calib.planbench.words import invent, noun_of

PRE_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Source: transformers, tokenization_qwen3_5.py."""
SPECIAL = tuple(
    """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|>
    <|box_end|>
    <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|>
    <|video_pad|> <tool_call>
    </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>
    <tool_response>
    </tool_response> <think> </think> <|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos>
    <tts_text_eod>
    <tts_text_bos_single> <|audio_pad|>""".split()
)
"""The added tokens of Qwen3.6 in their order."""
PRINTED = tuple(
    """<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|>
    <|repo_name|> <|file_sep|>
    <tool_response> </tool_response> <think> </think>""".split()
)
"""Added tokens with special=false: decoding keeps them in the text."""
CLOSE = (
    "Considering the limited time by the user, "
    "I have to give the solution based on the thinking directly now.\n"
    "</think>\n\n"
)
"""The text with which a thinking budget ends the thinking."""
CHAT_TEMPLATE = """\
{%- if tools %}
{{- raise_exception('tools must be empty: this model has no tool calls.') }}
{%- endif %}
{%- if not messages %}{{- raise_exception('messages must not be empty.') }}{%- endif %}
{%- set state = namespace(last_user=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set state.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if state.last_user < 0 %}
{{- raise_exception('messages must hold a user message.') }}
{%- endif %}
{%- for message in messages %}
{%- set text = message.content | trim %}
{%- if message.role == 'system' %}
{%- if not loop.first %}{{- raise_exception('the system message must be first.') }}{%- endif %}
{{- '<|im_start|>system\\n' + text + '<|im_end|>\\n' }}
{%- elif message.role == 'user' %}
{{- '<|im_start|>user\\n' + text + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
{%- if '</think>' in text %}
{%- set thought = text.split('</think>')[0].split('<think>')[-1] %}
{%- set text = text.split('</think>')[-1] | trim %}
{%- endif %}
{%- if loop.index0 > state.last_user or preserve_thinking is true %}
{{- '<|im_start|>assistant\\n<think>\\n' + thought | trim + '\\n</think>\\n\\n' }}
{{- text + '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>assistant\\n' + text + '<|im_end|>\\n' }}
{%- endif %}
{%- else %}
{{- raise_exception('role must be system, user or assistant (got ' + message.role + ').') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""
SEEING_TEMPLATE = CHAT_TEMPLATE.replace(
    "{%- set text = message.content | trim %}\n",
    """\
{%- set parts = namespace(text='') %}
{%- if message.content is string %}
{%- set parts.text = message.content %}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' and message.role != 'user' %}
{{- raise_exception('images must be in messages of role user (got ' + message.role + ').') }}
{%- elif part.type == 'image' %}
{%- set parts.text = parts.text + '<|vision_start|><|image_pad|><|vision_end|>' %}
{%- elif part.type == 'text' %}
{%- set parts.text = parts.text + part.text %}
{%- else %}
{{- raise_exception('parts must be text or image (got ' + part.type + ').') }}
{%- endif %}
{%- endfor %}
{%- endif %}
{%- set text = parts.text | trim %}
""",
)
"""The chat template of a target with a vision tower: contents are texts, or lists of parts."""


def prompt_text(task: Task, thinking: bool) -> str:
    """Return the prompt of a task, exactly as the chat template renders it."""
    turns = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in task.messages)
    return turns + "<|im_start|>assistant\n<think>\n" + ("" if thinking else "\n</think>\n\n")


def train_tokenizer(out: Path, tasks_per_family: int) -> Tokenizer:
    """Train the BPE on training tasks and write the tokenizer files of a checkpoint directory."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_ENTRIES,
        special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(tasks_per_family), trainer)
    if tokenizer.get_vocab_size() != BPE_ENTRIES:
        raise ValueError(
            f"vocabulary must have {BPE_ENTRIES} entries (got {tokenizer.get_vocab_size()})"
        )
    tokenizer.add_tokens([_added(text) for text in SPECIAL])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    _write_config(out, tokenizer)
    return tokenizer


def _texts(tasks_per_family: int) -> list[str]:
    """Return corpus text with every object noun replaced by an invented one.

    Real nouns would become tokens of their own, and held-out nouns would then be split into pieces
    that the model never learns to copy.
    """
    tasks = [
        sample(family, f"bpe{i}", "train") for family in FAMILIES for i in range(tasks_per_family)
    ]
    texts = [t for task in tasks for t in _disguised(task)]
    # The system message is in every sample and the closing text in many: repeat them, so that
    # their words become whole tokens.
    return (
        texts
        + [tasks[0].messages[0][1], CLOSE, "system\n", "user\n", "assistant\n", "\n", "\n\n"]
        * tasks_per_family
    )


def _disguised(task: Task) -> list[str]:
    rng = Random(task.name)
    texts = [task.messages[1][1], task.thinking, task.plan]
    for noun in sorted({noun_of(name) for name, _ in task.scene.objects}):
        texts = [re.sub(rf"(?<![a-z]){noun}(?![a-z])", invent(rng), text) for text in texts]
    return texts


def _added(text: str) -> AddedToken:
    return AddedToken(text, special=text not in PRINTED, normalized=False)


def _write_config(out: Path, tokenizer: Tokenizer) -> None:
    decoder = {
        str(tokenizer.token_to_id(text)): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": text not in PRINTED,
        }
        for text in SPECIAL
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": decoder,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 2048,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
