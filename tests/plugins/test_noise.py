"""The noise of sampling: numpy, ONNX and CUDA have the same bits, and the bits are Philox's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from emulator.compiler import COMPILER
from emulator.runner import probe
from onnx import helper

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins import numpy_noise, onnx_noise
from thor_dflash.plugins.onnx_builder import IR_VERSION, ONNX_TYPE, OPSET, FunctionBuilder
from thor_dflash.runtime.engines.onnxruntime_import import ort

KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
"""Counter, key, words: the known answers published with Random123."""
EDGES = (0, 1, 2, 3, 2**31, 2**32 - 1, 2**32 - 2, 1257966795, 1257966796, 1257966797, 1 << 24)
SEEDS = (0, 1, 2**32 - 1, 2**63 + 12345, 2**64 - 1)

needs_emulator = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")


def run_nodes(make: Callable[..., str], dtype: DType, **inputs: Array) -> Array:
    """Runs the nodes that `make(builder, *input names)` adds, by ONNX Runtime."""
    b = FunctionBuilder("x")
    out = make(b, *inputs)
    graph = helper.make_graph(
        [*b.nodes, helper.make_node("Identity", [out], ["out"])],
        "noise",
        [
            helper.make_tensor_value_info(n, ONNX_TYPE[DType.of(v)], v.shape)
            for n, v in inputs.items()
        ],
        [helper.make_tensor_value_info("out", ONNX_TYPE[dtype], None)],
    )
    opset = [helper.make_opsetid("", OPSET)]
    proto: onnx.ModelProto = helper.make_model(graph, ir_version=IR_VERSION, opset_imports=opset)
    session = ort.InferenceSession(proto.SerializeToString())
    [value] = session.run(None, inputs)
    return value


def some_words() -> Array:
    drawn = np.random.default_rng(1).integers(0, 2**32, 8192 - len(EDGES), dtype=np.uint32)
    return np.concatenate([np.array(EDGES, np.uint32), drawn])


def some_z() -> Array:
    drawn = -np.random.default_rng(2).exponential(12, 8192 - 6).astype(np.float32)
    edges = np.array([0, -0.0, -87, -87.00001, -np.inf, -1e30], np.float32)
    return np.concatenate([edges, drawn])


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], want: tuple[int, ...]
) -> None:
    got = numpy_noise.philox(tuple(np.array([c]) for c in counter), key)
    assert tuple(int(w[0]) for w in got) == want


@needs_emulator
def test_philox_of_the_kernels_gives_the_published_words() -> None:
    counters = np.array([c for c, _, _ in KNOWN], np.uint32)
    keys = np.array([k for _, k, _ in KNOWN], np.uint32)
    out = np.zeros_like(counters)
    probe("noise_probes.cu", "philox_words", counters, keys, out, threads=3)
    assert out.tolist() == [list(want) for _, _, want in KNOWN]


@pytest.mark.parametrize("seed", SEEDS)
def test_words_of_ids_are_the_same_in_onnx_and_numpy(seed: int) -> None:
    ids = np.random.default_rng(3).integers(0, 2**18, (3, 64))
    positions = np.array([[0], [1], [2**31 - 1]])
    low_high = np.array([seed], np.uint64).view(np.int32)
    want = numpy_noise.words(seed, positions, ids)
    assert len(np.unique(want)) == want.size
    got = run_nodes(
        onnx_noise.words, DType.I64, seed=low_high, positions=positions, ids=ids.astype(np.int64)
    )
    assert got.dtype == np.int64
    assert np.array_equal(got, want)


@needs_emulator
def test_words_of_ids_are_the_same_in_the_kernels() -> None:
    ids = np.random.default_rng(3).integers(0, 2**18, 96).astype(np.int32)
    positions = np.random.default_rng(4).integers(0, 2**20, 96).astype(np.int32)
    seed = np.array([SEEDS[3]], np.uint64).view(np.uint32)
    out = np.zeros(96, np.uint32)
    probe("noise_probes.cu", "words_of_ids", seed, positions, ids, out, threads=96)
    assert np.array_equal(out, numpy_noise.words(SEEDS[3], positions, ids))


def test_functions_have_the_same_bits_in_onnx_and_numpy() -> None:
    word, z = some_words(), some_z()
    for make, want in (
        (onnx_noise.exponential, numpy_noise.exponential(word)),
        (onnx_noise.gumbel, numpy_noise.gumbel(word)),
    ):
        got = run_nodes(make, DType.F32, word=word.astype(np.int64))
        assert np.array_equal(got.view(np.uint32), want.view(np.uint32))
    got = run_nodes(onnx_noise.exp, DType.F32, z=z)
    assert np.array_equal(got.view(np.uint32), numpy_noise.exp(z).view(np.uint32))


@needs_emulator
def test_functions_have_the_same_bits_in_the_kernels() -> None:
    word, z = some_words()[:2048], some_z()[:2048]
    out = np.zeros((2048, 4), np.float32)
    probe("noise_probes.cu", "functions", word, z, out, blocks=8, threads=256)
    e = numpy_noise.exponential(word)
    want = np.stack([e, numpy_noise.gumbel(word), numpy_noise.exp(z), numpy_noise.log(e)], axis=1)
    assert np.array_equal(out.view(np.uint32), want.view(np.uint32))


def test_functions_are_those_of_mathematics() -> None:
    word, z = some_words(), some_z()
    u = (word.astype(np.float64) + 0.5) * 2.0**-32
    want = -np.log1p(-u)
    assert np.abs(numpy_noise.exponential(word) / want - 1).max() < 4e-7
    assert np.abs(numpy_noise.gumbel(word) + np.log(want)).max() < 3e-6
    inside = z >= -87
    exact = np.exp(z[inside].astype(np.float64))
    assert np.abs(numpy_noise.exp(z[inside]) / exact - 1).max() < 4e-7
    assert not numpy_noise.exp(z[~inside]).any()


def test_every_word_gives_finite_noise() -> None:
    found = numpy_noise.gumbel(np.array(EDGES, np.uint32))
    assert np.isfinite(found).all()
    assert found[0] > 22
    assert found[5] < -3
