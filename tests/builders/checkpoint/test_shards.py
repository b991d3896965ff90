"""Safetensors files: every way in which a file or a set of shards can be broken has its message;
opening them reads headers only.
"""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import GEOMETRIES, read_safetensors, write_safetensors, write_target

from thor_dflash.builders.checkpoint.shards import INDEX, Shards
from thor_dflash.builders.checkpoint.target import read_target
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


def entry(
    dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write_pair(directory: Path) -> dict[str, str]:
    """Writes two shards; returns the weight_map of their index."""
    write_safetensors(directory / "one.safetensors", {"a": TENSORS["a"]})
    write_safetensors(directory / "two.safetensors", {"b": TENSORS["b"], "c": TENSORS["c"]})
    return {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_every_type_and_shape_comes_back(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", TENSORS)
    shards = Shards.open(tmp_path)
    assert set(shards) == set(TENSORS)
    for name, tensor in TENSORS.items():
        got = shards.array(name)
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert got.tobytes() == tensor.tobytes()
        assert not got.flags.writeable


def test_the_only_file_may_have_any_name(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "weights.safetensors", TENSORS)
    assert set(Shards.open(tmp_path)) == set(TENSORS)


def test_a_prediction_head_may_lie_beside_the_model(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": TENSORS["a"]})
    write_safetensors(tmp_path / "mtp.safetensors", {"b": TENSORS["b"]})
    assert set(Shards.open(tmp_path)) == {"a", "b"}
    write_safetensors(tmp_path / "mtp.safetensors", {"a": TENSORS["a"]})
    with pytest.raises(CheckpointError, match=r"a must be in one shard"):
        Shards.open(tmp_path)


def test_an_index_finds_each_tensor(tmp_path: Path) -> None:
    write_index(tmp_path, write_pair(tmp_path))
    shards = Shards.open(tmp_path)
    for name in ("a", "b", "c"):
        np.testing.assert_array_equal(shards.array(name), TENSORS[name])
    assert shards.entry("b").file.name == "two.safetensors"


def test_an_index_may_name_model_safetensors(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": TENSORS["a"]})
    write_index(tmp_path, {"a": "model.safetensors"})
    assert set(Shards.open(tmp_path)) == {"a"}


def test_a_file_outside_the_index_is_not_read(tmp_path: Path) -> None:
    write_index(tmp_path, write_pair(tmp_path))
    (tmp_path / "mtp.safetensors").write_bytes(b"not even a header")
    assert set(Shards.open(tmp_path)) == {"a", "b", "c"}


def test_the_writer_of_these_tests_writes_what_the_library_reads(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_safetensors(file, TENSORS)
    with safetensors.safe_open(file, "np") as library:
        assert set(library.keys()) == set(TENSORS)
        np.testing.assert_array_equal(library.get_tensor("a"), TENSORS["a"])
    assert {n: t.tobytes() for n, t in read_safetensors(file).items()} == {
        n: t.tobytes() for n, t in TENSORS.items()
    }


U4 = b"\1\2\3\4"
HEADERS: dict[str, tuple[object, bytes, str]] = {
    "not JSON": (b"{'a'}", b"", r"the header must be JSON \(got "),
    "not UTF-8": (b'{"\xff":1}', b"", r"the header must be JSON"),
    "deep": (b"[" * 200_000, b"", r"the header must be JSON"),
    "a list": ([1], b"", r"the header must be a JSON object \(got list\)"),
    "twice": (b'{"a": {}, "a": {}}', b"", r"must be JSON \(got .*the key 'a' twice"),
    "no object": ({"a": 3}, b"", r"a must be an object \(got 3\)"),
    "no dtype": ({"a": {"shape": [4]}}, U4, r"a\.dtype must be a string \(got nothing\)"),
    "dtype": ({"a": entry("F4")}, U4, r"a\.dtype must be one of F64, .* \(got 'F4'\)"),
    "64 bits": ({"a": entry(shape=[1 << 63, 0], offsets=[0, 0])}, b"", r"a\.shape .*of 64 bits"),
    "half a pair": (b'{"a\\ud800": {}}', b"", r"the header must be JSON \(got 'half a surrogate"),
    "shape": ({"a": entry(shape=[-4])}, U4, r"a\.shape must be a list of integers .*\[-4\]"),
    "bool": ({"a": entry(shape=[True, 4])}, U4, r"a\.shape must be a list of integers"),
    "size": ({"a": entry(shape=[5])}, U4, r"a\.data_offsets must be 5 bytes apart.*\[0, 4\]"),
    "type size": ({"a": entry("F32")}, U4, r"a\.data_offsets must be 16 bytes apart"),
    "order": ({"a": entry(offsets=[4, 0])}, U4, r"a\.data_offsets must be a begin and an end"),
    "one offset": ({"a": entry(offsets=[4])}, U4, r"a\.data_offsets must be a begin and an end"),
    "outside": ({"a": entry(offsets=[0, 4])}, U4[:3], r"a must end within .* truncated"),
    "overlap": ({"a": entry(), "b": entry(shape=[2], offsets=[2, 4])}, U4, r"b must start at byte"),
    "hole": ({"a": entry(offsets=[2, 6])}, U4 + U4, r"a must start at byte"),
    "rest": ({"a": entry()}, U4 + b"5", r"must be \d+ bytes long \(got \d+\)"),
}


def test_an_empty_tensor_may_be_listed_after_one_that_begins_at_the_same_byte(
    tmp_path: Path,
) -> None:
    empty = entry(shape=[0], offsets=[0, 0])
    write_header(tmp_path / "model.safetensors", {"a": entry(), "empty": empty}, U4)
    assert Shards.open(tmp_path).array("empty").shape == (0,)


@pytest.mark.parametrize("case", HEADERS)
def test_a_broken_header_is_named(case: str, tmp_path: Path) -> None:
    header, data, message = HEADERS[case]
    file = tmp_path / "model.safetensors"
    write_header(file, header, data)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(file))}.*{message}"):
        Shards.open(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"must be a safetensors file \(got 0 bytes\)"),
        (b"1234567", r"must be a safetensors file \(got 7 bytes\)"),
        (b"\0" * 8, r"the header must be 2 to 0 bytes long \(got 0\)"),
        (b"\xff" * 20, r"the header must be 2 to 12 bytes long \(got 18446744073709551615\)"),
        (b"PK\3\4 a zip file of torch", r"the header must be 2 to 16 bytes long"),
    ],
)
def test_a_file_that_is_no_safetensors_is_named(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        Shards.open(tmp_path)


def test_a_header_above_the_limit_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((100_000_001).to_bytes(8, "little"))
    with file.open("r+b") as stream:
        stream.truncate(200_000_000)
    with pytest.raises(CheckpointError, match=r"2 to 100000000 bytes long \(got 100000001\)"):
        Shards.open(tmp_path)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.5, 0.999])
def test_a_truncated_file_is_refused_wherever_it_ends(part: float, tmp_path: Path) -> None:
    directory = write_target(tmp_path, GEOMETRIES["0.8b"], 0)
    file = directory / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(part * len(data))])
    with pytest.raises(CheckpointError, match=r"truncated|must be a safetensors file"):
        read_target(directory)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 400), byte=st.integers(0, 255))
def test_a_changed_byte_never_ends_in_another_error(at: int, byte: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_safetensors(file, TENSORS)
    data = bytearray(file.read_bytes())
    data[at % len(data)] = byte
    file.write_bytes(data)
    try:
        shards = Shards.open(tmp_path)
    except CheckpointError:
        return
    for name in shards:
        shards.array(name).sum()


def remove(name: str) -> Callable[[Path, dict[str, str]], None]:
    return lambda directory, places: (directory / name).unlink()


def again(directory: Path, places: dict[str, str]) -> None:
    write_safetensors(directory / "one.safetensors", {"a": TENSORS["a"], "b": TENSORS["b"]})


def half(directory: Path, places: dict[str, str]) -> None:
    data = (directory / "two.safetensors").read_bytes()
    (directory / "two.safetensors").write_bytes(data[:-1])


def place(name: str, file: object) -> Callable[[Path, dict[str, str]], None]:
    return lambda directory, places: write_index(directory, {**places, name: file})


def unnamed(directory: Path, places: dict[str, str]) -> None:
    write_index(directory, {name: file for name, file in places.items() if name != "c"})


def also_single(directory: Path, places: dict[str, str]) -> None:
    write_safetensors(directory / "model.safetensors", {"a": TENSORS["a"]})


def unnamed_two(directory: Path, places: dict[str, str]) -> None:
    more = dict.fromkeys(("a", "x", "y"), TENSORS["a"])
    write_safetensors(directory / "one.safetensors", more)


def five_alone(directory: Path, places: dict[str, str]) -> None:
    (directory / INDEX).unlink()
    for name in ("1", "2", "3"):
        write_safetensors(directory / f"{name}.safetensors", {name: TENSORS["a"]})


def bad_index(text: str) -> Callable[[Path, dict[str, str]], None]:
    def write(directory: Path, places: dict[str, str]) -> None:
        (directory / INDEX).write_text(text)

    return write


BESIDE = r"must be the name of a \.safetensors file beside the index"
SETS: dict[str, tuple[Callable[[Path, dict[str, str]], None], str]] = {
    "missing shard": (remove("two.safetensors"), r"two\.safetensors must be there, .* names it"),
    "half a shard": (half, r"two\.safetensors: c must end within .* truncated"),
    "twice": (again, r"two\.safetensors: b must be in one shard \(got one.* and two"),
    "not in shard": (place("x", "one.safetensors"), r"x must be in one\.safetensors \(got nothing"),
    "elsewhere": (place("a", "two.safetensors"), r"a must be in two\.safetensors \(got nothing"),
    "wrong shard": (place("b", "one.safetensors"), r"b must be in one\.safet.* \(got 'two\.saf"),
    "outside": (place("a", "../one.safetensors"), BESIDE),
    "absolute": (place("a", "/one.safetensors"), BESIDE),
    "other file": (place("a", "one.bin"), BESIDE),
    "no file": (place("a", 3), r"weight_map\.a must be a string \(got 3\)"),
    "not indexed": (unnamed, r"must name every tensor of its shards \(got c in two\.safetensors"),
    "not indexed, two": (unnamed_two, r"\(got x and 1 more in one\.safetensors, not in the"),
    "both": (also_single, r"must hold either model\.safetensors or .*index\.json \(got both\)"),
    "no map": (bad_index("{}"), r"weight_map must be an object \(got nothing\)"),
    "empty map": (bad_index('{"weight_map": {}}'), r"weight_map must name tensors \(got none\)"),
    "index": (bad_index("{"), r"index\.json must be JSON"),
    "no index": (remove(INDEX), r"must hold one model\.safetensors, .* \(got one.*, two"),
    "no index, five": (five_alone, r"\(got 1\.safe.*, 2\.safe.*, 3\.safetensors and 2 more\)"),
}


@pytest.mark.parametrize("case", SETS)
def test_a_broken_set_of_shards_is_named(case: str, tmp_path: Path) -> None:
    change, message = SETS[case]
    places = write_pair(tmp_path)
    write_index(tmp_path, places)
    change(tmp_path, places)
    with pytest.raises(CheckpointError, match=message) as caught:
        Shards.open(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"must hold one model\.saf.* \(got no \.safetens"):
        Shards.open(tmp_path)
    with pytest.raises(CheckpointError, match=r"must be a checkpoint directory \(got nothing the"):
        Shards.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"must be a checkpoint directory \(got a file\)"):
        Shards.open(tmp_path / "pytorch_model.bin")


def test_a_name_that_is_not_stored_is_named(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", TENSORS)
    with pytest.raises(CheckpointError, match=r"nowhere must be in the checkpoint \(got nothing\)"):
        Shards.open(tmp_path).array("nowhere")


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
