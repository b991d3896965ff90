"""A small model of random weights that sees images, with planner-nano's tokenizer."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from support.checkpoints import (
    GEOMETRIES,
    DrafterGeometry,
    read_config,
    write_config,
    write_drafter,
    write_target,
)
from support.constrained_model import TOKENIZER, VOCAB

from thor_dflash.builders.build import build
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.core.tensors import Array
from thor_dflash.package import tokenizer_files as files
from thor_dflash.runtime.session import Session, open_session

IDS = {
    "vision_start_token_id": 1209,
    "image_token_id": 1212,
    "vision_end_token_id": 1210,
    "video_token_id": 1213,
}
"""As in the tokenizer."""
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content -%}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif -%}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
<|im_start|>assistant
<think>
{% if not enable_thinking %}
</think>

{% endif %}"""

_HELD: list[TemporaryDirectory[str]] = []


@cache
def seeing_package() -> Path:
    """Returns a package, removed when the process ends."""
    held = TemporaryDirectory()
    _HELD.append(held)
    root, geometry = Path(held.name), replace(GEOMETRIES["seeing"], vocab=VOCAB)
    target = write_target(root / "target", geometry, 5)
    write_drafter(root / "drafter", geometry, DrafterGeometry(), 4)
    for name in files.FILES:
        if (TOKENIZER / name).is_file():
            shutil.copy(TOKENIZER / name, target / name)
    (target / files.TEMPLATE).write_text(TEMPLATE)
    write_config(target, {**read_config(target), **IDS})
    config = BuildConfig(chunk=32, capacity=768)
    build(target, root / "drafter", root / "package", config, Silent())
    return root / "package"


@cache
def seeing_session() -> Session:
    """Returns a session over `seeing_package()`, the same one for every test."""
    return open_session(seeing_package(), EngineConfig(threads=1), Silent())


def frame(seed: int, width: int = 96, height: int = 64) -> Array:
    """Returns random pixels, uint8 [height, width, 3]."""
    shape = height, width, 3
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
