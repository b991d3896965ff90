"""Makes the goldens: logits and taps of random checkpoints, by transformers' own Qwen3.5 model.

README.md beside this file says with which versions and how to run it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from support.checkpoints import GEOMETRIES, Dialect, TargetGeometry, dequantised, write_target
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

SEED = 11
LENGTH = 61
"""Tokens: three whole blocks of 16 and a part of one."""
LONG = 301
"""Tokens of LONG_CASES: more than two cache tiles of 128 rows."""
ROWS = (0, 1, 2, 3, 7, 8, 14, 15, 16, 17, 18, 24, 30, 31, 32, 33, 40, 46, 47, 48, 49, 55, 59, 60)
"""Rows that are kept: both sides of every block edge, the first, the last and some others."""
LATE_ROWS = (63, 64, 65, 126, 127, 128, 129, 143, 144, 254, 255, 256, 257, 271, 272, 287, 288, 300)

_ALL: tuple[Dialect, ...] = ("bf16", "modelopt", "compressed-tensors", "fp8", "mixed")
CASES: tuple[tuple[str, Dialect], ...] = (
    ("0.8b", "bf16"),
    ("0.8b", "f32"),
    ("0.8b", "f16"),
    *(("gqa2", dialect) for dialect in _ALL),
    ("4b", "bf16"),
    *(("27b", dialect) for dialect in _ALL),
    ("sharded", "bf16"),
    ("nested", "bf16"),
    ("heads27b", "bf16"),
    ("heads27b", "modelopt"),
)
LONG_CASES = (("27b", "mixed"), ("sharded", "bf16"))


def tap_layers(g: TargetGeometry) -> tuple[int, ...]:
    """0-based layers: GDN and attention ones, the last layer among them."""
    return (1, 3, g.layers - 1) if g.layers > 4 else (0, 2, 3)


def config_of(directory: Path) -> Qwen3_5TextConfig:
    """The text part of a written config.json, as transformers reads it."""
    config = json.loads((directory / "config.json").read_text())
    config = config.get("text_config", config)
    config["dtype"] = "float32"
    return Qwen3_5TextConfig(**config, attn_implementation="eager")


def load(directory: Path, weights: dict[str, NDArray[np.float32]]) -> Qwen3_5ForCausalLM:
    """transformers' model with these weights, which must be exactly those that it has."""
    config = config_of(directory)
    model = Qwen3_5ForCausalLM(config).float().eval()
    state = {name: torch.from_numpy(np.array(w)) for name, w in weights.items()}
    model.load_state_dict(state, strict=True)
    return model


def run(
    model: Qwen3_5ForCausalLM, tokens: NDArray[np.int64], taps: tuple[int, ...]
) -> dict[str, NDArray[np.float32]]:
    """Logits [T, V] and the output of each tapped layer, [T, taps * H]."""
    outputs: dict[int, torch.Tensor] = {}

    def keep(i: int, out: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        outputs[i] = out[0] if isinstance(out, tuple) else out

    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _, __, out, i=i: keep(i, out))
    with torch.no_grad():
        ids = torch.from_numpy(tokens)[None]
        answer = model(ids, use_cache=False, output_hidden_states=True)
    last = len(model.model.layers) - 1
    for i in outputs:
        # hidden_states[i + 1] is the output of layer i; the last one has been through the norm.
        same = torch.equal(answer.hidden_states[i + 1], outputs[i])
        assert same == (i != last), i
    tapped = torch.cat([outputs[i][0] for i in taps], dim=1)
    return {"logits": answer.logits[0].numpy(), "taps": tapped.numpy()}


def bf16_cost(
    model: Qwen3_5ForCausalLM, tokens: NDArray[np.int64], want: NDArray[np.float32]
) -> float:
    """How far bfloat16 takes the logits from those of float32: root mean square, as a share."""
    with torch.no_grad():
        answer = model.to(torch.bfloat16)(torch.from_numpy(tokens)[None], use_cache=False)
    error = answer.logits[0].float().numpy() - want
    return float(np.sqrt((error**2).mean() / (want**2).mean()))


def check(model: Qwen3_5ForCausalLM, g: TargetGeometry) -> None:
    """Checks that transformers understood the config: rotation, layer types, tied head."""
    inverse = model.model.rotary_emb.inv_freq.numpy()
    want = g.rope_theta ** -(np.arange(0, g.rotary, 2) / g.rotary)
    np.testing.assert_allclose(inverse, want, rtol=1e-6)
    assert tuple(model.config.layer_types) == g.kinds
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tied == g.tied


def main() -> None:
    """Writes one file per case beside this script."""
    here = Path(__file__).parent
    torch.manual_seed(0)
    for geometry, dialect in CASES:
        g = GEOMETRIES[geometry]
        long = (geometry, dialect) in LONG_CASES
        length, kept = (LONG, ROWS + LATE_ROWS) if long else (LENGTH, ROWS)
        tokens = np.random.default_rng(SEED).integers(0, g.vocab, length)
        with tempfile.TemporaryDirectory() as held:
            directory = write_target(Path(held) / "target", g, SEED, dialect)
            weights = dequantised(directory)
            model = load(directory, weights)
        check(model, g)
        made = run(model, tokens, tap_layers(g))
        cost = bf16_cost(model, tokens, made["logits"])
        np.savez_compressed(
            here / f"{geometry}.{dialect}.npz",
            tokens=tokens.astype(np.int32),
            rows=np.array(kept, np.int32),
            tap_layers=np.array(tap_layers(g), np.int32),
            seed=np.array(SEED, np.int32),
            fingerprint=sum(np.abs(weights[n].astype(np.float64)).sum() for n in sorted(weights)),
            bf16_cost=cost,
            **{name: rows[list(kept)] for name, rows in made.items()},
        )
        print(
            f"{geometry}.{dialect}: logits up to {np.abs(made['logits']).max():.2f}, "
            f"bfloat16 costs {cost:.3%}"
        )
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"numpy {np.__version__}, ml_dtypes {ml_dtypes.__version__}"
    )


if __name__ == "__main__":
    main()
