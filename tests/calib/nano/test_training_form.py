"""What the trainer computes with pictures is what transformers computes. Needs torch and
transformers, which make test does not install: run it after a change of the training form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from thor_dflash.calib.nano.pictured_corpus import GRID, prompt_ids, turns
from thor_dflash.calib.planbench.pictured import heldout_pictured
from thor_dflash.runtime.vision.picture import Picture

torch: Any = pytest.importorskip("torch")
pytest.importorskip("transformers")
NANO = Path(__file__).parents[3] / "models" / "planner-nano"
TOKENIZER = Tokenizer.from_file(str(NANO / "target" / "tokenizer.json"))
TOWER_SAME, SAME = 1e-5, 1e-4
"""Largest difference, relative to the largest value."""


def distance(got: Any, want: Any) -> float:
    return float((got - want).abs().max() / want.abs().max())


def models(directory: Path) -> tuple[Any, Any]:
    """A target with a random tower, after export, as the trainer's model and as transformers'."""
    from thor_dflash.calib.nano import checkpoint, reference
    from thor_dflash.calib.nano.dims import NanoTargetDims, NanoTowerDims
    from thor_dflash.calib.nano.tokenizer import SPECIAL
    from thor_dflash.calib.nano.vision import SeeingTarget

    torch.manual_seed(0)
    dims, tower = NanoTargetDims(), NanoTowerDims()
    model: Any = SeeingTarget(dims, tower)
    checkpoint.load_exported(model.language_model, "model.", NANO / "target")
    for parameter in model.visual.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter) * (parameter.ndim == 1))
    checkpoint.export_weights(model, "model.", directory)
    special = {text: TOKENIZER.token_to_id(text) for text in SPECIAL}
    checkpoint.write_seeing_config(directory, dims, tower, special)
    checkpoint.load_exported(model, "model.", directory)
    model.language_model.cache_as_fp8(False)
    return model, reference.load(directory)


@pytest.mark.slow
def test_it_is_transformers(tmp_path: Path) -> None:
    from thor_dflash.calib.nano.target import packed_rows
    from thor_dflash.calib.nano.vision import PictureTable

    model, other = models(tmp_path)
    task, pad = heldout_pictured(2)[1], TOKENIZER.token_to_id("<|image_pad|>")
    prompt = prompt_ids(TOKENIZER, task, thinking=True)
    ids = np.zeros(-(-len(prompt) // 64) * 64, np.int16)
    ids[: len(prompt)] = prompt
    slot = np.where(ids == pad, np.cumsum(ids == pad) - 1, -1)
    patches = PictureTable(torch.from_numpy(task.drawn.pixels[None])).patches(torch.tensor([[0]]))
    theirs = torch.from_numpy(Picture(task.drawn.rgb).patches())
    frames = patches.unflatten(-1, (3, 1, -1)).expand(-1, -1, -1, 3, 2, -1).flatten(-3)
    assert distance(frames[0, 0], theirs) < 1e-6
    grid = torch.tensor([[1, GRID.rows, GRID.columns]])
    with torch.no_grad():
        want = other.model.visual(theirs, grid_thw=grid).pooler_output
        assert distance(model.visual(patches[0])[0], torch.as_tensor(want)) < TOWER_SAME
        row = torch.tensor([prompt])
        images = {"pixel_values": theirs, "image_grid_thw": grid}
        want = other(input_ids=row, mm_token_type_ids=(row == pad).int(), **images).logits[0]
        x = model.embed(torch.from_numpy(ids).long()[None], torch.from_numpy(slot)[None], patches)
        turn = torch.from_numpy(turns(ids, pad)).long()[None]
        packing = packed_rows(torch.arange(len(ids))[None], turn)
        hidden, _ = model.language_model(x, packing, False)
        got = model.language_model.logits(hidden)[0, : len(prompt)]
        assert distance(got, want) < SAME
        wrong = packed_rows(torch.arange(len(ids))[None])
        hidden, _ = model.language_model(x, wrong, False)
        assert distance(model.language_model.logits(hidden)[0, : len(prompt)], want) > 10 * SAME
