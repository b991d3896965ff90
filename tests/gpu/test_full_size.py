"""Laws that hold bit for bit, at the sizes of Qwen3.6-27B. Its weights are random and made on the
device: 20 GB of its memory, no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from thor_dflash.builders.synthetic import write_synthetic
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.measure.random_weights import RandomWeights

pytestmark = pytest.mark.gpu
CAPACITY, CHUNK, ROWS = 4096, 512, 16
TIMES = 600
"""Number of verify steps, of 257 products each. A race that spoiled one load in 10^9 changed the
bits of about one step in a hundred."""
RNG = np.random.default_rng(0)
PROMPT = [int(t) for t in RNG.integers(1, 200_000, 700)]
BLOCK = [int(t) for t in RNG.integers(1, 200_000, ROWS)]
OTHER = [int(t) for t in RNG.integers(1, 200_000, ROWS)]


@contextmanager
def opened(folder: Path, config: EngineConfig) -> Iterator[ModelRunner]:
    built = BuildConfig(engine="cuda", chunk=CHUNK, chunks=(CHUNK,))
    made = write_synthetic("qwen3.6-27b", folder, built)
    fill = RandomWeights(folder, config.cubins_directory)
    engine = CudaEngine(folder, config, Silent(), fill)
    try:
        yield ModelRunner(engine, made, CAPACITY, made.block)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    with opened(tmp_path_factory.mktemp("full"), EngineConfig()) as made:
        yield made


def read_prompt(m: ModelRunner) -> None:
    m.state.reset()
    for at in range(0, len(PROMPT), CHUNK):
        m.prefill(PROMPT[at : at + CHUNK], observe=True)


def logits(m: ModelRunner, tokens: Sequence[int]) -> Array:
    """float32 [16, V]: logits of a block that follows what is committed. Commits nothing."""
    m.write_tokens(tokens)
    m.verify()
    return m.read("logits")


def same(got: Array, want: Array) -> None:
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_the_same_block_gives_the_same_bits_every_time(model: ModelRunner) -> None:
    read_prompt(model)
    first = logits(model, BLOCK)
    assert np.isfinite(first).all()
    assert first.std() > 0.01
    for _ in range(TIMES):
        same(logits(model, BLOCK), first)
    read_prompt(model)
    same(logits(model, BLOCK), first)


@pytest.mark.parametrize("rows", [1, 5, 15])
def test_a_row_does_not_depend_on_the_rows_after_it(model: ModelRunner, rows: int) -> None:
    read_prompt(model)
    first = logits(model, BLOCK)
    changed = logits(model, [*BLOCK[:rows], *OTHER[rows:]])
    same(changed[:rows], first[:rows])
    assert (changed[rows:] != first[rows:]).any()


@pytest.mark.parametrize("count", [1, 7, 16])
def test_folding_rows_at_once_or_one_by_one_gives_the_same_bits(
    model: ModelRunner, count: int
) -> None:
    read_prompt(model)
    logits(model, BLOCK)
    model.state.commit(count)
    at_once = logits(model, OTHER)
    read_prompt(model)
    for token in BLOCK[:count]:
        logits(model, [token, *OTHER[1:]])
        model.state.commit(1)
    same(logits(model, OTHER), at_once)


@pytest.mark.parametrize("config", [EngineConfig(overlap=False), EngineConfig(graphs=False)],
                         ids=["one after the other", "launched one by one"])  # fmt: skip
def test_how_kernels_are_launched_changes_no_bit(
    model: ModelRunner, tmp_path: Path, config: EngineConfig
) -> None:
    read_prompt(model)
    first = logits(model, BLOCK)
    with opened(tmp_path, config) as other:
        read_prompt(other)
        same(logits(other, BLOCK), first)
