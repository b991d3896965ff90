"""Makes the goldens of images: patches, tower, positions and logits, by transformers.

README.md beside this file says with which versions and how to run it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from support.checkpoints import GEOMETRIES, IMAGE_TOKENS, read_safetensors, write_target
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

SEED = 17
SIZES = ((90, 70), (64, 96), (200, 40), (420, 160))
"""Width and height of the pictures: grown, unchanged, a strip, shrunk."""
AFTER = 16
"""Rows of text behind the images whose logits are kept, and the one before them."""


def pictures() -> list[np.ndarray]:
    """Smooth random colours, so that a resize matters."""
    rng = np.random.default_rng(SEED)
    found: list[np.ndarray] = []
    for width, height in SIZES:
        coarse = rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        noise = rng.integers(-40, 40, (height, width, 3)) * (width < 300)
        found.append(np.clip(np.asarray(smooth) + noise, 0, 255).astype(np.uint8))
    return found


def model_of(directory: Path, weights: dict[str, np.ndarray]) -> Qwen3_5ForConditionalGeneration:
    """transformers' model with these weights, which must be exactly those that it has."""
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["dtype"] = config["vision_config"]["dtype"] = "float32"
    made = Qwen3_5Config(**config, attn_implementation="eager")
    model = Qwen3_5ForConditionalGeneration(made).float().eval()
    state = {name: torch.from_numpy(np.array(w)) for name, w in weights.items()}
    model.load_state_dict(state, strict=True)
    return model


def main() -> None:
    """Writes one file beside this script."""
    torch.manual_seed(0)
    g = GEOMETRIES["seeing"]
    with tempfile.TemporaryDirectory() as held:
        directory = write_target(Path(held) / "target", g, SEED, "f32")
        stored: dict[str, np.ndarray] = {}
        for file in directory.glob("*.safetensors"):
            stored |= read_safetensors(file)
        weights = {n: w.astype(np.float32) for n, w in stored.items() if not n.startswith("mtp.")}
        model = model_of(directory, weights)
        processor = Qwen2VLImageProcessorPil.from_pretrained(directory)
    given = pictures()
    out = processor(images=[Image.fromarray(p) for p in given], return_tensors="pt")
    patches, grids = out["pixel_values"], out["image_grid_thw"]
    parts = torch.split(patches, [rows * columns for _, rows, columns in grids.tolist()])
    digests = [hashlib.sha256(part.numpy().tobytes()).hexdigest() for part in parts]
    rng = np.random.default_rng(SEED + 1)
    prompt: list[int] = list(rng.integers(0, 240, 5))
    for i, (_, rows, columns) in enumerate(grids.tolist()):
        start, pad, end = (IMAGE_TOKENS[n] for n in ("vision_start", "image", "vision_end"))
        prompt += [start, *[pad] * (rows * columns // 4), end]
        prompt += list(rng.integers(0, 240, i))
    prompt += list(rng.integers(0, 240, AFTER + 1))
    ids = torch.tensor([prompt])
    kinds = (ids == IMAGE_TOKENS["image"]).int()
    with torch.no_grad():
        rows = model.model.visual(patches, grid_thw=grids).pooler_output
        at, _ = model.model.get_rope_index(ids, kinds, grids)
        answer = model(
            input_ids=ids,
            pixel_values=patches,
            image_grid_thw=grids,
            mm_token_type_ids=kinds,
            use_cache=False,
        )
    np.savez_compressed(
        Path(__file__).parent / "seeing.f32.npz",
        seed=np.array(SEED, np.int32),
        fingerprint=sum(np.abs(w.astype(np.float64)).sum() for _, w in sorted(weights.items())),
        prompt=np.array(prompt, np.int32),
        grids=grids.numpy().astype(np.int32)[:, 1:],
        patches=np.array(digests),
        rows=rows.numpy(),
        positions=at[:, 0].T.numpy().astype(np.int32),
        logits=answer.logits[0, -AFTER - 1 :].numpy(),
        **{f"picture{i}": p for i, p in enumerate(given)},
    )
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {len(prompt)} ids")


if __name__ == "__main__":
    main()
