"""Safetensors files: damaged files and sets of shards are refused by name; opening them reads
headers only.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import write_safetensors

from thor_dflash.builders.checkpoint.shards import INDEX, Shards
from thor_dflash.core.errors import CheckpointError

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([1, -2], ml_dtypes.bfloat16),
    "c": np.array([[0.5, 448]], ml_dtypes.float8_e4m3fn),
    "odd": np.array([1, 2, 3], np.uint8),
    "behind odd": np.array(7.5, np.float32),
    "empty": np.zeros((0, 4), np.int8),
}


def write_header(file: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(dtype: str = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write_pair(directory: Path) -> dict[str, str]:
    """Writes two shards and their index; returns its weight_map."""
    write_safetensors(directory / "one.safetensors", {"a": TENSORS["a"]})
    write_safetensors(directory / "two.safetensors", {"b": TENSORS["b"], "c": TENSORS["c"]})
    places = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    write_index(directory, places)
    return places


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refused(directory: Path, part: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Shards.open(directory)
    assert part in str(caught.value)


def test_every_type_and_shape_comes_back(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "any name.safetensors", TENSORS)
    shards = Shards.open(tmp_path)
    assert set(shards) == set(TENSORS)
    for name, tensor in TENSORS.items():
        got = shards.array(name)
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert got.tobytes() == tensor.tobytes()
        assert not got.flags.writeable


def test_an_index_finds_each_tensor(tmp_path: Path) -> None:
    write_pair(tmp_path)
    (tmp_path / "mtp.safetensors").write_bytes(b"not in the index: not read")
    shards = Shards.open(tmp_path)
    assert set(shards) == {"a", "b", "c"}
    for name in shards:
        np.testing.assert_array_equal(shards.array(name), TENSORS[name])
    assert shards.entry("b").file.name == "two.safetensors"


@pytest.mark.parametrize(
    "header",
    [b"{'a'}", b"[" * 200_000, {"a": entry("F4", [8])}, {"a": entry(shape=[5])},
     {"a": entry("F32")}, {"a": entry(offsets=[4, 0])},
     {"a": entry(shape=[5], offsets=[0, 5])},
     {"a": entry(), "b": entry(shape=[2], offsets=[2, 4])}, {"a": entry(shape=[2], offsets=[2, 4])},
     {"a": entry(shape=[3], offsets=[0, 3])}],
    ids=["JSON", "deep", "type", "size", "size of type", "order", "outside", "overlap", "hole",
         "rest"],
)  # fmt: skip
def test_a_damaged_header_is_refused(header: object, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_header(file, header, b"\1\2\3\4")
    refused(tmp_path, str(file))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 400), byte=st.integers(0, 255))
def test_a_changed_byte_never_ends_in_another_error(at: int, byte: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_safetensors(file, TENSORS)
    data = bytearray(file.read_bytes())
    data[at % len(data)] = byte
    file.write_bytes(data[: len(data) - at % 3])
    try:
        shards = Shards.open(tmp_path)
    except CheckpointError:
        return
    for name in shards:
        shards.array(name).sum()


Places = dict[str, str]


def place(name: str, file: object) -> Callable[[Path, Places], object]:
    return lambda directory, places: write_index(directory, {**places, name: file})


def unnamed(directory: Path, places: Places) -> None:
    write_index(directory, {name: file for name, file in places.items() if name != "c"})


def again(directory: Path, places: Places) -> None:
    write_safetensors(directory / "one.safetensors", {"a": TENSORS["a"], "b": TENSORS["b"]})


def also_single(directory: Path, places: Places) -> None:
    write_safetensors(directory / "model.safetensors", {"a": TENSORS["a"]})


def remove(name: str) -> Callable[[Path, Places], object]:
    return lambda directory, places: (directory / name).unlink()


BESIDE = "must be the name of a .safetensors file beside the index"
SETS: dict[str, tuple[Callable[[Path, Places], object], str]] = {
    "missing shard": (remove("two.safetensors"), "two.safetensors"),
    "twice": (again, "b must be in one shard"),
    "not in shard": (place("x", "one.safetensors"), "x must be in one.safetensors"),
    "elsewhere": (place("a", "two.safetensors"), "a must be in two.safetensors"),
    "outside": (place("a", "../one.safetensors"), BESIDE),
    "absolute": (place("a", "/one.safetensors"), BESIDE),
    "no file": (place("a", 3), "weight_map.a must be a string"),
    "not indexed": (unnamed, "c must be in no shard"),
    "both": (also_single, "(got both)"),
    "no index": (remove(INDEX), "must hold one model.safetensors"),
}


@pytest.mark.parametrize("case", SETS)
def test_a_broken_set_of_shards_is_refused(case: str, tmp_path: Path) -> None:
    change, part = SETS[case]
    change(tmp_path, write_pair(tmp_path))
    refused(tmp_path, part)


def resident() -> int:
    """Returns how much memory this process occupies, bytes, parts of mapped files included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's process table")
def test_opening_gigabytes_costs_megabytes(tmp_path: Path) -> None:
    size = 3 << 30
    file = tmp_path / "model.safetensors"
    write_header(file, {"a": entry("BF16", (size // 2048, 1024), (0, size))})
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size + size)  # sparse: takes no space on the disk
    before = resident()
    tracemalloc.start()
    shards = Shards.open(tmp_path)
    row = np.asarray(shards.array("a")[12345], np.float32)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert row.shape == (1024,)
    assert peak < 4 << 20
    assert resident() - before < 64 << 20
    file.unlink()
