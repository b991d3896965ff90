"""NVFP4 and FP8 against vectors of modelopt 0.47.0, and the search against all candidates."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from emulator.compiler import COMPILER
from numpy.typing import NDArray
from support.checkpoints import nvfp4_quantise
from support.emulated_encoder import EmulatedEncoder

from thor_dflash.calib.quantize import cuda_encoder, fp8, nvfp4

BF16 = np.dtype(ml_dtypes.bfloat16)
VECTOR = """
404000be003e803ec0be003f20bf403f603f80bfa03fc0bfe03f00c0204028c000000000000000000000000000000000
0000000000000000000000000000000086b669b645b621b6fbb5b3b557b58fb48f345735b335fb352136453669368636
008028b72837f63cf6bc763db8bdcd3de13df6bd053e0fbe1a3e24be2e3e38be40402040e03fa03f603f203fc03e003e
20c0e0bfa0bf60bf20bfc0be00be40c0013af53de1bdb6be3abecbbec53c093f4abe7ebe493e123e2d3dbfbe40bc8e3e
0abf3bbe43bf04bf3dbfc1bd02bfde3d803d99bd81bf5dbe9fbc3a3d1dbf44bec8bea6bed93ea5be55bcb53e6fbe37bd
353dd13cfbbef93c0b3f1ebfb03e443d
"""
"""BF16 [2, 64]. Blocks: mixed, zero, tiny, with -0.0; exact ties, then ordinary numbers."""
RTN = """7e38015d7e6a716c
87102a3ac4d4e6f60000000000000000bcab9a891021324380204a5de6e6f7f7
67462402eeccaaf830eaec71dc34e158adde9e1d91bf18aeded6589c011ef715
"""
MSE = """7d0101627d6a726a
97112a3bc4d5e6f70000000000000000bcab9a89102132438010394cd4d5e5e6
77563412efcdabf930eaec71dc34e158adde9e1d91af18adeee6689d111ff716
"""
"""Scales, then the codes of the two rows."""
NEAR = """
853ff5be05bff2beaaba38bf4c3fd0bed7be6b3faabf94bfaebf523f243ffe3e
90bfa0be2cbf44bec83ffdbe1ebfa5bf413f243f53bfd4bdb83c98be7abfedbe
"""
"""BF16 [2, 16]: blocks of a tensor with the largest value 5, for which two scales are equally good
but for rounding: the order in which the sixteen errors are added decides."""


def vector() -> NDArray[np.float32]:
    data = np.frombuffer(bytes.fromhex(VECTOR), ml_dtypes.bfloat16)
    return data.reshape(2, 64).astype(np.float32)


@pytest.mark.parametrize(("method", "want"), [("rtn", RTN), ("mse", MSE)])
def test_every_byte_is_modelopts(method: str, want: str) -> None:
    w = vector()
    blocks, amax = nvfp4.as_blocks(w), np.float32(np.abs(w).max())
    scale2 = nvfp4.tensor_scale(float(amax))
    assert scale2.tobytes().hex() == "2549923a"
    searched = method == "mse"
    scales = (
        nvfp4.searched_scales(blocks, amax) if searched else nvfp4.rounded_scales(blocks, scale2)
    )
    made = nvfp4.encode(blocks, scales, scale2)
    assert made.scales.tobytes() + made.codes.tobytes() == bytes.fromhex(want)
    assert made.flushed == 1  # the tiny block


def test_fp8_rounds_the_quotient_to_the_type_of_the_weights_first() -> None:
    w = vector()
    scale = fp8.tensor_scale(float(np.abs(w).max()))
    assert scale.tobytes().hex() == "b76ddb3b"
    codes = fp8.encode(w, scale, BF16)
    assert codes[1, 16:32].tobytes().hex() == "1959d8e5dee7466adfe15f5b4de6be62"
    assert (codes != fp8.encode(w, scale, np.dtype(np.float32))).sum() == 1


def test_fp8_codes_are_those_of_a_cast() -> None:
    rng = np.random.default_rng(3)
    numbers = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (numbers[1:] + numbers[:-1]) / 2
    beside = [np.nextafter(ties, np.float32(to)) for to in (0, 449)]
    drawn = rng.standard_normal(4096) * 10.0 ** rng.uniform(-6, 2, 4096)
    x = np.concatenate([numbers, ties, *beside, drawn.clip(-448, 448)]).astype(np.float32)
    x = np.concatenate([x, -x])
    assert fp8.codes(x).tobytes() == x.astype(ml_dtypes.float8_e4m3fn).tobytes()
    for dtype in (BF16, np.dtype(np.float16)):
        want = x.astype(dtype).astype(ml_dtypes.float8_e4m3fn)
        assert fp8.encode(x[None], np.float32(1), dtype).tobytes() == want.tobytes(), dtype


def distributions() -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(5)
    shape = (64, 512)
    mixed = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 3, (64, 1))
    mixed[3], mixed[4, :32] = 0, 0
    made = {
        "normal": rng.standard_normal(shape),
        "heavy tails": rng.standard_t(3, shape),
        "uniform": rng.uniform(-1, 1, shape),
        "rows ten decades apart": mixed,
    }
    return {name: w.astype(BF16).astype(np.float32) for name, w in made.items()}


@pytest.mark.parametrize("name", distributions())
def test_rounding_equals_another_implementation(name: str) -> None:
    w = distributions()[name]
    codes, scales, scale2 = nvfp4_quantise(w)
    blocks = nvfp4.as_blocks(w)
    made = nvfp4.encode(blocks, nvfp4.rounded_scales(blocks, scale2), scale2)
    assert nvfp4.tensor_scale(float(np.abs(w).max())) == scale2
    assert made.scales.tobytes() == scales.tobytes()
    assert made.codes.tobytes() == codes.tobytes()


def best_of_all(w: NDArray[np.float32], weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The byte of the smallest error among all 126, written as the definition is."""
    size, amax = np.abs(w).reshape(len(w), -1, 16), np.float32(np.abs(w).max())
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    best = np.zeros(size.shape[:2], np.uint8)
    least = np.full(best.shape, np.inf, np.float32)
    for byte in range(1, 127):
        value = np.array([byte], np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)[0]
        scale = value / np.float32(448) * amax / np.float32(6)
        y = size / scale
        code = np.searchsorted(np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]), y)
        code += np.isin(y, [0.75, 1.75, 3.5])
        error = (size - grid[code] * scale) ** 2 * weights.reshape(-1, 16)
        for half in (8, 4, 2, 1):
            error = error[..., :half] + error[..., half:]
        best[error[..., 0] < least] = byte
        least = np.minimum(least, error[..., 0])
    return best


@pytest.mark.parametrize("name", distributions())
@pytest.mark.parametrize("weighted", [False, True])
def test_the_search_finds_the_best_of_all_scales(name: str, weighted: bool) -> None:
    w = distributions()[name][:24]
    energy = np.ones(w.shape[1], np.float32)
    if weighted:
        energy = np.random.default_rng(6).lognormal(0, 2, w.shape[1]).astype(np.float32)
    weights = nvfp4.channel_weights(energy)
    amax = np.float32(np.abs(w).max())
    blocks = nvfp4.as_blocks(w)
    found = nvfp4.searched_scales(blocks, amax, weights if weighted else None)
    best = best_of_all(w, weights[:, 0].T.reshape(-1))
    # With weights as uneven as these, the best scale may be far below: the search has an end there.
    start = nvfp4.rounded_scales(blocks, nvfp4.tensor_scale(float(amax))).astype(int)
    within = (best >= start - 8) | (not weighted)
    np.testing.assert_array_equal(found[within], best[within])
    assert within.mean() > 0.9


def test_a_channel_that_no_prompt_used_keeps_a_weight() -> None:
    energy = np.array([0] * 16 + [2] * 16, np.float32)
    weights = nvfp4.channel_weights(energy)
    assert weights[:, 0, 0].tolist() == [nvfp4.LEAST_WEIGHT] * 16
    assert weights[:, 0, 1].tolist() == [2.0] * 16
    assert (nvfp4.channel_weights(energy * 0) == 1).all()


def hard_cases() -> dict[str, NDArray[np.float32]]:
    """Rows whose bytes are easy to get wrong, beside the distributions."""
    flat = np.full((2, 64), 1.5, np.float32)
    tiny = np.full((2, 64), 2.0**-133, np.float32)  # a subnormal number: so are its scales
    tiny[1, 5] = 2.0**-120
    far = vector()
    far[0, 3] = 3e38
    halves = np.tile(np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6]), (4, 8))
    halves[2] *= -1
    halves[3] = -0.0
    near = np.zeros((3, 16), np.float32)
    near[0, 0] = 5
    near[1:] = np.frombuffer(bytes.fromhex(NEAR), ml_dtypes.bfloat16).reshape(2, 16)
    cases = {"vector": vector(), "flat": flat, "tiny": tiny, "far": far, "ties": halves}
    cases["order of the sum"] = near
    return cases | {name: w[:6] for name, w in distributions().items()}


@pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("method", ["rtn", "mse", "act"])
def test_the_kernel_writes_the_same_bytes(method: str, wide: bool) -> None:
    for name, w in hard_cases().items():
        rows = w.astype(np.float32 if wide else BF16)
        exact, weights = rows.astype(np.float32), None
        amax = float(np.abs(exact).max())
        if method == "act":
            energy = np.random.default_rng(7).lognormal(0, 2, w.shape[1]).astype(np.float32)
            weights = nvfp4.channel_weights(energy)
        found = EmulatedEncoder().encode(rows, cuda_encoder.Scaling.of(method, amax, weights))
        second, blocks = nvfp4.tensor_scale(amax), nvfp4.as_blocks(exact)
        with np.errstate(all="ignore"):
            scales = nvfp4.rounded_scales(blocks, second)
            if method != "rtn":
                scales = nvfp4.searched_scales(blocks, np.float32(amax), weights)
            want = nvfp4.encode(blocks, scales, second)
        assert found.scales.tobytes() == want.scales.tobytes(), name
        assert found.codes.tobytes() == want.codes.tobytes(), name
        assert found.flushed == want.flushed, name
