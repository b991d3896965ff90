"""Activations layer by layer: the model is transformers', and a killed run gives the same bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.checkpoints import (
    GEOMETRIES,
    change_tensors,
    dequantised,
    read_safetensors,
    write_target,
)

from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.calib.calibrate.activations import ActivationSums
from thor_dflash.calib.calibrate.calibrate import calibrate
from thor_dflash.calib.calibrate.layer_session import CHUNK, LayerSession
from thor_dflash.calib.documents import beginnings
from thor_dflash.calib.quantize import staged_checkpoint
from thor_dflash.calib.quantize.statistics import Statistics, fingerprint, read_statistics
from thor_dflash.config.calibrate import CalibrateConfig
from thor_dflash.core.errors import CheckpointError, ConfigError
from thor_dflash.core.progress import ProgressTask, Silent

Floats = NDArray[np.float32]
GOLDENS = Path(__file__).parents[2] / "goldens" / "transformers"
CONFIG = CalibrateConfig(threads=1)
CACHED = 3
"""The attention layer of a model with four layers."""
SMALL = replace(GEOMETRIES["gqa2"], layers=2, interval=2, flat_rope=False)
"""Layer 1 is attention."""


def parts(rows: Floats) -> Iterator[Floats]:
    return (rows[at : at + CHUNK] for at in range(0, len(rows), CHUNK))


def norm(rows: Floats, weight: Floats) -> Floats:
    x = rows.astype(np.float64)
    root = np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6)
    return (x / root * (1 + weight)).astype(np.float32)


def test_rows_after_each_layer_are_those_of_transformers(tmp_path: Path) -> None:
    """More rows than a chunk has, and weights in three formats."""
    with np.load(GOLDENS / "27b.mixed.npz") as file:
        golden = dict(file)
    source = write_target(tmp_path / "t", GEOMETRIES["27b"], int(golden["seed"]), "mixed")
    weights = dequantised(source)
    assert len(golden["tokens"]) > CHUNK
    rows = weights["model.embed_tokens.weight"][golden["tokens"]]
    width = rows.shape[1]
    for i in range(4):
        sums, before = ActivationSums(), rows
        session = LayerSession(source, i, len(rows), 1)
        rows = np.concatenate(list(session.run(parts(rows), sums)))
        if i in golden["tap_layers"]:
            at = int(np.flatnonzero(golden["tap_layers"] == i)[0]) * width
            want = golden["taps"][:, at : at + width]
            error = np.abs(rows[golden["rows"]] - want).max() / np.abs(want).max()
            assert error < 1e-4, i
        stem = f"model.layers.{i}."
        received = norm(before, weights[f"{stem}input_layernorm.weight"])
        inputs = sums.inputs()
        part = "self_attn.qkv" if i == CACHED else "linear_attn.in_proj"
        found = inputs[f"layers.{i}.{part}"]
        np.testing.assert_allclose(found.energy, (received**2).mean(axis=0), rtol=1e-4)
        assert found.amax == pytest.approx(np.abs(received).max(), rel=1e-5)
        assert {name.rpartition(".")[2] for name in inputs} == {
            *({"qkv", "o_proj"} if i == CACHED else {"in_proj", "out_proj"}), "gate_up", "down_proj"
        }  # fmt: skip
        cache = sums.cache(2)
        assert (cache is not None) == (i == CACHED)
        if cache is not None:
            v = (received @ weights[f"{stem}self_attn.v_proj.weight"].T).reshape(len(rows), 2, -1)
            np.testing.assert_allclose(cache.v_amax, np.abs(v).max(axis=(0, 2)), rtol=1e-4)
            assert cache.v_rms == pytest.approx(np.sqrt((v**2).mean()), rel=1e-4)
            k = (received @ weights[f"{stem}self_attn.k_proj.weight"].T).reshape(v.shape)
            k /= np.sqrt((k**2).mean(axis=2, keepdims=True) + 1e-6)
            k *= 1 + weights[f"{stem}self_attn.k_norm.weight"]
            longest = np.sqrt((k**2).sum(axis=2)).max(axis=0)  # a rotation keeps lengths
            unturned = np.abs(k[:, :, 16:]).max(axis=(0, 2))
            assert (cache.k_amax <= longest * 1.0001).all()
            assert (cache.k_amax >= unturned * 0.9999).all()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("source") / "bf16", SMALL, 3)


DOCUMENTS = [tuple(range(20)), (5,), tuple(range(200, 230))]


@pytest.fixture(scope="module")
def statistics(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("statistics") / "s.safetensors"
    calibrate(source, DOCUMENTS, out, CONFIG, Silent())
    return out


def test_the_file_has_every_input_and_how_it_was_made(source: Path, statistics: Path) -> None:
    found = read_statistics(statistics)
    target = read_target(source)
    found.check(target, {"lm_head": 80, "layers.0.mlp.down_proj": 96, "layers.1.mlp.gate_up": 80})
    assert found.metadata["tokens"] == "51"
    assert found.metadata["model"] == fingerprint(target)
    assert len(found.inputs) == 2 * 4 + 1
    assert list(found.cache) == [1]
    assert list(statistics.parent.iterdir()) == [statistics]


def test_a_layer_reads_the_rows_of_the_layer_before(source: Path, statistics: Path) -> None:
    table = dequantised(source)["model.embed_tokens.weight"]
    documents = [table[list(tokens)] for tokens in DOCUMENTS]
    found = read_statistics(statistics)
    for i in range(2):
        sums, session = ActivationSums(), LayerSession(source, i, 30, 1)
        documents = [np.concatenate(list(session.run(parts(d), sums))) for d in documents]
        for name, one in sums.inputs().items():
            np.testing.assert_allclose(found.inputs[name].energy, one.energy, rtol=1e-5)
            assert found.inputs[name].amax == pytest.approx(one.amax, rel=1e-5)


@pytest.mark.slow
def test_a_document_does_not_change_the_statistics_of_another(
    source: Path, statistics: Path, tmp_path: Path
) -> None:
    alone = []
    for i, tokens in enumerate(DOCUMENTS):
        calibrate(source, [tokens], tmp_path / f"{i}.safetensors", CONFIG, Silent())
        alone.append(read_statistics(tmp_path / f"{i}.safetensors"))
    for name, together in read_statistics(statistics).inputs.items():
        share = [one.inputs[name].energy * len(d) for one, d in zip(alone, DOCUMENTS, strict=True)]
        np.testing.assert_allclose(together.energy, sum(share) / 51, rtol=2e-5)
        assert together.amax == pytest.approx(max(one.inputs[name].amax for one in alone), rel=1e-5)


class Killed(BaseException):
    """Ends a run as a kill does."""


class KillAfter(Silent):
    """Ends the run once so many rows have been reported."""

    def __init__(self, rows: int) -> None:
        self.left = rows

    def task(self, label: str, total: int | None = None, unit: str = "") -> ProgressTask:
        def show(done: int, state: str) -> None:
            if unit == "rows" and done >= self.left and state == "running":
                raise Killed

        return ProgressTask(show)


@pytest.mark.parametrize(
    ("rows", "lost"),
    [
        (60, False),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(51 * 2, False, marks=pytest.mark.slow),
        pytest.param(51 * 2, True, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_continues_to_the_same_bytes(
    source: Path, statistics: Path, tmp_path: Path, rows: int, lost: bool
) -> None:
    out = tmp_path / "s.safetensors"
    with pytest.raises(Killed):
        calibrate(source, DOCUMENTS, out, CONFIG, KillAfter(rows))
    partial = tmp_path / ".s.safetensors.partial"
    journal = partial / staged_checkpoint.JOURNAL
    assert len(journal.read_text().splitlines()) == 2 + (rows - 1) // 51
    with journal.open("ab") as file:
        file.write(b'{"unit": "torn')
    if lost:  # as after a power cut
        for path in partial.glob("rows.*"):
            path.write_bytes(b"\xff" * path.stat().st_size)
    calibrate(source, DOCUMENTS, out, CONFIG, Silent())
    assert out.read_bytes() == statistics.read_bytes()
    assert not partial.exists()


@pytest.mark.slow
def test_activations_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    made = write_target(tmp_path / "t", SMALL, 4)

    def change(tensors: dict[str, Any]) -> None:
        name = "model.layers.0.mlp.down_proj.weight"
        tensors[name] = np.full_like(tensors[name], 3e38)

    change_tensors(made, change)
    with pytest.raises(CheckpointError, match=r"activations at .* must be finite"):
        calibrate(made, DOCUMENTS, tmp_path / "s.safetensors", CONFIG, Silent())
    assert {p.name for p in tmp_path.iterdir()} == {"t"}


def test_documents_are_cut_to_the_tokens_wanted() -> None:
    config = CalibrateConfig(tokens=30, context=16)
    assert [len(d) for d in beginnings(DOCUMENTS, config, 4096)] == [16, 1, 13]
    assert [len(d) for d in beginnings(DOCUMENTS, config, 12)] == [12, 1, 12]
    assert [len(d) for d in beginnings(DOCUMENTS, CalibrateConfig(tokens=1), 4096)] == [1]


# ---- hostile files
def spoilt(path: Path, statistics: Path, tensors: Any = None, metadata: Any = None) -> Path:
    """The statistics with tensors and metadata changed; None removes one."""
    held = {n: np.array(x) for n, x in read_safetensors(statistics).items()}
    table = {**read_statistics(statistics).metadata, **(metadata or {})}
    held |= tensors or {}
    header: dict[str, Any] = {"__metadata__": {k: v for k, v in table.items() if v is not None}}
    at, data = 0, b""
    names = {"float32": "F32", "float16": "F16"}
    for name, x in held.items():
        if x is not None:
            end = at + x.nbytes
            kind = {"dtype": names[x.dtype.name], "shape": list(x.shape)}
            header[name] = {**kind, "data_offsets": [at, end]}
            at, data = end, data + x.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


H, AMAX = "h.layers.0.mlp.gate_up", "amax.layers.0.mlp.gate_up"
F32 = np.float32


@pytest.mark.parametrize(
    ("tensors", "metadata", "error"),
    [
        ({}, {"format": "another"}, "must be of format thor-dflash"),
        ({}, {"tokens": "0"}, "tokens must be a positive integer"),
        ({}, {"tokens": "-5"}, "tokens must be a positive integer"),
        ({}, {"tokens": None}, "tokens must be a positive integer"),
        ({H: np.full(80, -1, F32)}, {}, f"{H} must hold finite numbers of at least 0"),
        ({H: np.full(80, np.nan, F32)}, {}, f"{H} must hold finite numbers of at least 0"),
        ({AMAX: np.array(np.inf, F32)}, {}, f"{AMAX} must hold finite numbers"),
        ({H: np.ones((80, 1), F32)}, {}, f"{H} must be F32"),
        ({H: np.ones(80, np.float16)}, {}, f"{H} must be F32"),
        ({AMAX: None}, {}, rf"{AMAX} must be F32 \[\]"),
        ({"kv.1.k": None}, {}, r"kv\.1\.k must be F32"),
        ({"kv.x.k": np.ones(2, F32)}, {}, r"kv\.x must name a layer"),
    ],
)
def test_a_hostile_file_is_refused_by_name(
    statistics: Path, tmp_path: Path, tensors: Any, metadata: Any, error: str
) -> None:
    path = spoilt(tmp_path / "s.safetensors", statistics, tensors, metadata)
    with pytest.raises(CheckpointError, match=error) as caught:
        read_statistics(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_none_is_refused(statistics: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    with pytest.raises(CheckpointError, match="must be a file"):
        read_statistics(path)
    for data in (b"", b"not safetensors", statistics.read_bytes()[:-1]):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="must be a safetensors file"):
            read_statistics(path)


def checked(path: Path, source: Path, columns: dict[str, int]) -> Statistics:
    found = read_statistics(path)
    found.check(read_target(source), columns)
    return found


def test_the_statistics_of_another_model_are_refused(
    source: Path, statistics: Path, tmp_path: Path
) -> None:
    copy = write_target(tmp_path / "fp8", SMALL, 3, "fp8")
    checked(statistics, copy, {"lm_head": 80})
    other = write_target(tmp_path / "other", SMALL, 4)
    with pytest.raises(CheckpointError, match="must be made of"):
        checked(statistics, other, {})
    less = spoilt(tmp_path / "s.safetensors", statistics, {H: np.ones(48, F32)})
    with pytest.raises(CheckpointError, match=rf"{H} must be F32 \[80\]"):
        checked(less, source, {H.removeprefix("h."): 80})
    with pytest.raises(CheckpointError, match=r"h\.fc must be F32"):
        checked(statistics, source, {"fc": 80})
    for cache in ({"kv.1.v": np.ones(3, F32)}, {f"kv.1.{n}": None for n in ("k", "v", "v_rms")}):
        path = spoilt(tmp_path / "s.safetensors", statistics, cache)
        with pytest.raises(CheckpointError, match=r"kv\.1\.v must be F32 \[2\]"):
            checked(path, source, {})


def test_a_second_run_beside_the_first_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.safetensors"
    with (
        staged_checkpoint.StagedCheckpoint(out, [], "key"),
        pytest.raises(ConfigError, match="one run at a time"),
    ):
        calibrate(source, DOCUMENTS, out, CONFIG, Silent())
