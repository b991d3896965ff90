"""W4A16 drafters, as compressed-tensors packs them, are read; a target of that kind is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.checkpoints import (
    DTYPES,
    Array,
    DrafterGeometry,
    TargetGeometry,
    change_tensors,
    dequantised,
    write_drafter,
    write_target,
)
from support.matrix_values import values_of

from thor_dflash.builders.checkpoint.drafter import drafter_layout, read_drafter
from thor_dflash.builders.checkpoint.int4_weights import unpack
from thor_dflash.builders.checkpoint.quantized_matrix import WeightFormat
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.core.errors import CheckpointError

TARGET, DRAFTER = TargetGeometry(), DrafterGeometry(second=True, block=8)
GROUP = 32
KEPT = ("kernel_projection", "hidden_projection")
FC = "fc.weight_"


def packed(codes: NDArray[np.int64]) -> NDArray[np.int32]:
    """Codes of -8 to 7, [N, K], as words."""
    words = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
    for i in range(8):
        words |= (codes[:, i::8] + 8).astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)


def encode(tensors: dict[str, Array], name: str) -> None:
    w = tensors.pop(f"{name}.weight").astype(np.float32)
    groups = w.reshape(len(w), -1, GROUP)
    scale = (np.abs(groups).max(axis=2) / 7.5).astype(DTYPES["BF16"])
    codes = np.rint(groups / scale.astype(np.float32)[:, :, None]).clip(-8, 7).astype(np.int64)
    tensors[f"{name}.weight_packed"] = packed(codes.reshape(w.shape))
    tensors[f"{name}.weight_scale"] = scale
    tensors[f"{name}.weight_shape"] = np.array(w.shape, np.int64)


@pytest.fixture
def drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A drafter of which all is W4A16 that the published one has so."""
    monkeypatch.setitem(DTYPES, "I64", np.dtype(np.int64))
    monkeypatch.setattr("support.checkpoints.DTYPE_NAMES", {d: n for n, d in DTYPES.items()})
    made = write_drafter(tmp_path / "drafter", TARGET, DRAFTER, 1)

    def encode_all(tensors: dict[str, Array]) -> None:
        matrices = [n for n, t in tensors.items() if n.endswith(".weight") and t.ndim == 2]
        for name in (n.removesuffix(".weight") for n in matrices):
            if not name.endswith(KEPT):
                encode(tensors, name)

    change_tensors(made, encode_all)
    return made


def test_codes_are_those_of_compressed_tensors() -> None:
    words = np.array([[0x76543210, -0x01234568]], np.int32)  # as its pack_to_int32 packs them
    assert unpack(words, 16).tolist() == [[*range(-8, 0), *range(8)]]
    assert unpack(words, 11).shape == (1, 11)


def test_weights_come_back_as_fp8(drafter: Path, tmp_path: Path) -> None:
    exact = dequantised(write_drafter(tmp_path / "exact", TARGET, DRAFTER, 1))
    checkpoint = read_drafter(drafter)
    for name in drafter_layout(checkpoint.dims).matrices:
        matrix, want = checkpoint.matrix(name), exact[f"{name}.weight"]
        off = float(np.linalg.norm(values_of(matrix) - want) / np.linalg.norm(want))
        kept = name.endswith(KEPT)
        assert matrix.kind is (WeightFormat.BF16 if kept else WeightFormat.FP8)
        assert off <= (0 if kept else 0.11), name


def _without(name: str) -> Callable[[dict[str, Array]], object]:
    return lambda t: t.pop(name)


BAD: dict[str, Callable[[dict[str, Array]], object]] = {
    "packed must be": lambda t: t.update({f"{FC}packed": t[f"{FC}packed"][:, :-1].copy()}),
    "scale must be": lambda t: t.update({f"{FC}scale": t[f"{FC}scale"][:, :-1].copy()}),
    "scale must be in": _without(f"{FC}scale"),
    "shape must be": lambda t: t.update({f"{FC}shape": np.array([64, 1])}),
    "zero_point must be absent": lambda t: t.update({f"{FC}zero_point": np.zeros((64, 1), "i4")}),
}


@pytest.mark.parametrize("rule", BAD)
def test_a_part_that_does_not_fit_is_refused_by_name(rule: str, drafter: Path) -> None:
    change_tensors(drafter, BAD[rule])
    with pytest.raises(CheckpointError, match=f"{FC}{rule}"):
        read_drafter(drafter)


def test_a_scale_that_is_not_positive_is_refused(drafter: Path) -> None:
    def spoil(tensors: dict[str, Array]) -> None:
        tensors[f"{FC}scale"] = -tensors[f"{FC}scale"]

    change_tensors(drafter, spoil)
    with pytest.raises(CheckpointError, match=f"{FC}scale must be a positive finite number"):
        read_drafter(drafter).matrix("fc")


@pytest.mark.usefixtures("drafter")
def test_a_target_of_that_kind_is_refused(tmp_path: Path) -> None:
    made = write_target(tmp_path / "target", TARGET, 1)
    change_tensors(made, lambda t: encode(t, "lm_head"))
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight_packed must be uint8 .* \(got int32"
    ):
        read_target(made)


def test_fp8_in_blocks_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """As in the official FP8 exports: one scale for 128 rows and 128 columns."""
    made = write_target(tmp_path, TARGET, 1, "fp8")
    name = "model.layers.3.mlp.down_proj.weight_scale"
    change_tensors(made, lambda t: t.update({f"{name}_inv": t.pop(name)}))
    with pytest.raises(CheckpointError, match=r"down_proj.weight must have one scale.*hf_ptq.py"):
        read_target(made)
