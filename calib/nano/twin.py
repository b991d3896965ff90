"""A BF16 twin of planner-nano without training: the same function with other weights.

    python -m thor_dflash.calib.nano.twin --out build/planner-nano-bf16/target

planner-nano's weights lie on NVFP4's grid, so quantising them again loses nothing and shows
nothing. Between two linears a channel may be scaled up and down again without any change of what
the model computes. Here every such channel is: by a factor with a log-normal distribution. The
weights of a block of 16 then have factors of their own, and are on no grid. The result differs from
planner-nano by the rounding of weights to BF16 alone, so that its drafter fits, too.

Channels: those of both norms of a layer (into every linear that reads them, in_proj_a and in_proj_b
too), of up into down, of v into o (the same for the query heads of a key/value head), of the GDN's
norm into out (the same for every head). Not the embedding: the head is tied to it.

It is a stand-in for a model trained without quantisation (`--no-quant` of calib.nano.train): its
layers were trained to bear NVFP4's rounding, if other values of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

from thor_dflash.builders.checkpoint.target import HEAD, TargetCheckpoint, read_target
from thor_dflash.calib.demo import MODEL
from thor_dflash.calib.quantize.linear_rows import LinearRows, ShardReader
from thor_dflash.core.tensors import Array
from thor_dflash.package.tokenizer_files import tokenizer_files

Floats = NDArray[np.float64]

SPREAD = 0.3
"""Standard deviation of the factors' logarithms: most are 0.55 to 1.8."""
CONFIG = "config.json"


class _Weights:
    """The weights in float64, by their names without prefix."""

    def __init__(self, source: TargetCheckpoint, seed: int) -> None:
        self.values: dict[str, Floats] = {}
        self.stored: dict[str, str] = {}
        """Name -> stored name."""
        self._rng = np.random.default_rng(seed)
        linears = {n: linear for n, linear in source.linears.items() if n != HEAD}
        parts = {part for linear in linears.values() for part in linear.parts}
        for name in source.shards:
            if name not in parts:
                plain = name.removeprefix(source.prefix)
                self.values[plain] = source.shards.array(name).astype(np.float64)
                self.stored[plain] = name
        with ShardReader(source.shards) as reader:
            for name in sorted(linears):
                rows = LinearRows.of(reader, linears[name])
                self.values[f"{name}.weight"] = rows.read(0, rows.shape[0]).astype(np.float64)
                self.stored[f"{name}.weight"] = f"{source.prefix}{name}.weight"

    def factors(self, count: int) -> Floats:
        """Draw factors."""
        return np.exp(self._rng.normal(0.0, SPREAD, count))

    def scale_norm(self, norm: str, offset: float, *readers: str) -> None:
        """Divide a norm's weight by factors, and multiply the columns of the linears that read it:
        by what the rounding of the norm's weight to BF16 leaves of them.
        """
        weight = offset + self.values[norm]
        changed = _bf16(weight / self.factors(len(weight)) - offset)
        exact = weight / (offset + changed)
        self.values[norm] = changed
        for reader in readers:
            matrix = self.values[f"{reader}.weight"]
            matrix *= np.tile(exact, matrix.shape[1] // len(exact))

    def scale_rows(self, writer: str, reader: str, heads: int = 1, shared: int = 1) -> None:
        """Divide the rows of one linear by factors, and multiply the columns of the next one; of
        `heads` heads each is read by `shared` heads of the next.
        """
        rows, columns = self.values[f"{writer}.weight"], self.values[f"{reader}.weight"]
        drawn = self.factors(len(rows))
        rows /= drawn[:, None]
        columns *= np.repeat(drawn.reshape(heads, -1), shared, axis=0).reshape(-1)


def twin(source: TargetCheckpoint, seed: int = 0) -> dict[str, Array]:
    """Return the tensors of the twin by their stored names, linears in BF16."""
    w = _Weights(source, seed)
    for i, kind in enumerate(source.dims.layers):
        layer = f"layers.{i}"
        mlp, attention, gdn = f"{layer}.mlp", f"{layer}.self_attn", f"{layer}.linear_attn"
        names = [f"{gdn}.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
        if kind == "attention":
            names = [f"{attention}.{part}_proj" for part in "qkv"]
        w.scale_norm(f"{layer}.input_layernorm.weight", 1.0, *names)
        both = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
        w.scale_norm(f"{layer}.post_attention_layernorm.weight", 1.0, *both)
        w.scale_rows(f"{mlp}.up_proj", f"{mlp}.down_proj")
        if kind == "attention":
            a = source.dims.attention
            w.scale_rows(
                f"{attention}.v_proj", f"{attention}.o_proj", a.kv_heads, a.heads // a.kv_heads
            )
        else:
            w.scale_norm(f"{gdn}.norm.weight", 0.0, f"{gdn}.out_proj")
    return {w.stored[name]: x.astype(ml_dtypes.bfloat16) for name, x in w.values.items()}


def _bf16(values: Floats) -> Floats:
    return values.astype(ml_dtypes.bfloat16).astype(np.float64)


def write(target: Path, out: Path, seed: int = 0) -> None:
    """Write the twin of a checkpoint as a checkpoint without quantisation."""
    tensors = twin(read_target(target), seed)
    config = json.loads((target / CONFIG).read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    out.mkdir(parents=True, exist_ok=True)
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in tokenizer_files(target):
        shutil.copy(target / name, out / name)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and write the twin."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=MODEL / "target")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    write(args.target, args.out)
    print(f"{args.out}: {(args.out / 'model.safetensors').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
