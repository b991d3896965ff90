"""Rounding errors of whole models on the CUDA engine are no larger than those of the definition.

The true results are those of the same checkpoints computed in float32. The definition with bfloat16
between operators, on ONNX Runtime, differs from them by a few percent; the kernels, on the
emulator, may differ by as much. Comparing the two with each other would allow errors three times as
large."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from emulator import compiler
from stand_ins.emulated_driver import emulate
from support.checkpoints import DrafterGeometry, TargetGeometry, write_drafter, write_target
from support.engine_pair import DEVICE, DRAFTER, TARGET, opened
from support.rounding_error import hold_as_near

from thor_dflash.builders import build as builder
from thor_dflash.config.build import BuildConfig
from thor_dflash.core.progress import Silent
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.decoding.model_runner import ModelRunner

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compiler.COMPILER is None, reason="needs g++"),
]

HYBRID = TargetGeometry(
    vocab=1000, hidden=192, intermediate=208, layers=4, interval=2, heads=4, kv_heads=2,
    head_dim=256, rotary=64, key_heads=2, value_heads=4, key_dim=128, value_dim=128,
    mix=TARGET.mix,
)  # fmt: skip
MODELS = {
    "paired": (TARGET, DRAFTER),
    "hybrid": (HYBRID, DrafterGeometry(taps=(0, 1, 3), head_dim=32, mask_token=5)),
}
PROMPT, BLOCKS = 40, 3


@pytest.mark.parametrize("model", MODELS)
def test_kernels_are_as_near_to_float32_as_their_definition(tmp_path: Path, model: str) -> None:
    target, drafter = MODELS[model]
    write_target(tmp_path / "target", target, 11, "mixed")
    write_drafter(tmp_path / "drafter", target, drafter, 12, "modelopt")
    tokens = np.random.default_rng(13).integers(0, target.vocab, PROMPT + 16 * BLOCKS).tolist()
    with pytest.MonkeyPatch.context() as patch:
        emulate(patch, DEVICE)
        ours = results(tmp_path, tokens, "cuda", "bf16")
    defined = results(tmp_path, tokens, "ort", "bf16")
    true = results(tmp_path, tokens, "ort", "f32")
    for name, want in true.items():
        hold_as_near(name, ours[name], defined[name], want)


def results(root: Path, tokens: Sequence[int], engine: str, rows: str) -> dict[str, Array]:
    """float32 logits and taps of the blocks that follow the prompt. `rows`: type of activations."""
    out = root / f"{engine}-{rows}"
    config = BuildConfig(
        engine=engine, activations=rows, kv="fp8", chunk=32, chunks=(), capacity=128
    )  # type: ignore[arg-type]
    builder.build(root / "target", root / "drafter", out, config, Silent())
    with closing(opened(out)) as session:
        return read(session.model, tokens)


def read(model: ModelRunner, tokens: Sequence[int]) -> dict[str, Array]:
    """The same; the prompt is read by prefill, the rest in blocks that are committed whole."""
    model.state.reset()
    for at in range(0, PROMPT, model.chunk):
        model.prefill(tokens[at : min(at + model.chunk, PROMPT)], observe=False)
    rows: dict[str, list[Array]] = {"logits": [], "taps": []}
    for at in range(PROMPT, len(tokens), model.block):
        model.write_tokens(tokens[at : at + model.block])
        model.verify()
        for name, blocks in rows.items():
            blocks.append(model.read(name).astype(np.float32))
        model.state.commit(model.block)
    return {name: np.concatenate(blocks) for name, blocks in rows.items()}
