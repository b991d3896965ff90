"""Makes the goldens: drafts of random DFlash2 checkpoints, by the authors' own package.

README.md beside this file says with which versions and how to run it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from dflash.model import DFlash2DraftModel
from numpy.typing import NDArray
from support.checkpoints import GEOMETRIES, dequantised, write_drafter, write_target
from support.dflash_goldens import CASES, DRAFTER_SEED, TARGET_SEED, Case, features, fingerprint
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

Floats = NDArray[np.float32]
CODEBOOKS = ("predecessor_codebook", "successor_codebook")


def load(directory: Path) -> DFlash2DraftModel:
    """The authors' model with a written checkpoint's weights, which must be exactly its own."""
    config = json.loads((directory / "config.json").read_text())
    model = DFlash2DraftModel(Qwen3Config(**config)).float().eval()
    state = {
        f"{name}.weight" if name.endswith(CODEBOOKS) else name: torch.from_numpy(np.array(w))
        for name, w in dequantised(directory).items()
    }
    found = model.load_state_dict(state, strict=False)
    assert not found.unexpected_keys, found
    assert not found.missing_keys, found
    return model


def drafts(model: DFlash2DraftModel, own: dict[str, Floats], taps: Floats, last: int) -> list[int]:
    """One block's drafts after context rows with these taps. No cache: all rows at once."""
    embedding = torch.from_numpy(own["model.embed_tokens.weight"])
    head = torch.from_numpy(own["lm_head.weight"])
    rows = int(model.block_size)
    ids = torch.tensor([last, *[int(model.mask_token_id)] * (rows - 1)])
    with torch.no_grad():
        hidden = model(
            target_hidden=torch.from_numpy(taps)[None],
            noise_embedding=embedding[ids][None],
            position_ids=torch.arange(len(taps) + rows)[None],
        )[:, 1:]
        made, _, _ = model.propose(hidden, ids[:1], lambda x: x @ head.T, 0.0)
    return [int(t) for t in made[0]]


def make(case: Case, root: Path) -> dict[str, NDArray[np.int32]]:
    """Drafts [cycles, R - 1] of a case."""
    target = GEOMETRIES[case.target]
    write_target(root / "target", target, TARGET_SEED)
    write_drafter(root / "drafter", target, case.drafter, DRAFTER_SEED)
    model, own = load(root / "drafter"), dequantised(root / "target")
    taps = features(case)
    made = [drafts(model, own, taps[:rows], last) for rows, last in case.cycles()]
    return {"drafts": np.array(made, np.int32), "fingerprint": fingerprint(root, taps)}


def main() -> None:
    """Write one file per case beside this script."""
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as root:
            made = make(case, Path(root))
        np.savez_compressed(Path(__file__).parent / f"{name}.npz", **made)
        print(name, made["drafts"].shape, flush=True)


if __name__ == "__main__":
    main()
