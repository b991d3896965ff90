"""The values of a matrix follow from its codes and scales; the quantiser that the tests use gives
what the published packages give.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import nvfp4_quantise
from support.matrix_values import values_of

from thor_dflash.builders.checkpoint import quantized_matrix
from thor_dflash.builders.checkpoint.quantized_matrix import Matrix, WeightFormat, finite
from thor_dflash.core.errors import CheckpointError

GOLDEN = Path(__file__).parents[2] / "goldens" / "nvfp4" / "nvfp4.npz"
FP8 = ml_dtypes.float8_e4m3fn


def test_scales_multiply_their_block_and_their_row() -> None:
    codes = np.full((2, 16), 0x21, np.uint8)  # 0.5 in the low nibble, 1 in the high
    block_scale = np.array([[0.5, 2], [2**-9, 448]], FP8)  # the smallest and the largest scale
    m = Matrix("m", codes, block_scale, np.array([3, 0.25], np.float32))
    expected = np.repeat([[1.5, 6], [2**-11, 112]], 16, axis=1)
    expected[:, ::2] /= 2
    np.testing.assert_array_equal(values_of(m), expected)
    assert m.kind is WeightFormat.NVFP4


TIES = [
    # a value halfway between two codes, the code of the next smaller float, its own, of the larger
    (0.25, 0, 0, 1),
    (0.75, 1, 2, 2),
    (1.25, 2, 2, 3),
    (1.75, 3, 4, 4),
    (2.5, 4, 4, 5),
    (3.5, 5, 6, 6),
    (5.0, 6, 6, 7),
]


@pytest.mark.parametrize(("value", "below", "code", "above"), TIES)
def test_ties_go_to_the_even_code(value: float, below: int, code: int, above: int) -> None:
    near = [float(np.nextafter(np.float32(value), np.float32(end))) for end in (0, 9)]
    # 2688 in the tensor makes its scale 1, 6 in a block makes that block's scale 1.
    w = np.zeros((1, 32), np.float32)
    w[0, 0], w[0, 16:21] = 2688, [6, value, -value, *near]
    codes, scale, scale2 = nvfp4_quantise(w)
    assert (float(scale2), float(scale[0, 1])) == (1, 1)
    expected = [7 | code << 4, 8 + code | below << 4, above]
    assert codes[0, 8:11].tolist() == expected


def test_a_zero_block_has_scale_one_and_a_tiny_block_a_subnormal_scale() -> None:
    w = np.zeros((1, 48), np.float32)
    w[0, 0], w[0, 32] = 2688, 6 * 2**-9 / 100  # the second would need a scale below E4M3's least
    codes, scale, scale2 = nvfp4_quantise(w)
    assert scale2 == 1
    assert scale[0].astype(np.float32).tolist() == [448, 1, 2**-9]
    assert codes[0].tolist() == [7] + [0] * 23
    assert values_of(Matrix("m", codes, scale))[0, 0] == 2688


def test_quantiser_and_reader_agree_with_the_published_packages() -> None:
    with np.load(GOLDEN) as golden:
        codes, block_scale, scale2 = nvfp4_quantise(golden["weight"])
        np.testing.assert_array_equal(codes, golden["codes"])
        np.testing.assert_array_equal(block_scale.view(np.uint8), golden["block_scale"])
        assert scale2 == golden["scale2"]
        row_scale = np.full(len(codes), scale2, np.float32)
        np.testing.assert_array_equal(
            values_of(Matrix("m", codes, block_scale, row_scale)), golden["modelopt"]
        )
        ones = np.ones(block_scale.shape, FP8)
        np.testing.assert_array_equal(
            values_of(Matrix("m", codes, ones)), golden["compressed_tensors_values"]
        )


@pytest.mark.parametrize("dtype", [FP8, ml_dtypes.bfloat16, np.float16, np.float32])
def test_what_is_no_number_is_found_wherever_it_is(
    dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_matrix, "_PIECE", 4)
    values = np.full((3, 5), ml_dtypes.finfo(dtype).max, dtype)
    assert finite(values, "w") is values
    for bad in (np.nan, np.inf, -np.inf):
        broken = values.copy()
        broken[2, 1] = bad
        with pytest.raises(CheckpointError, match=r"w must hold finite numbers .* at \[2, 1\]"):
            finite(broken, "w")
