"""Golden files that are refused: damaged, of another model, or .npz files of something else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.loop_models import session

from thor_dflash.calib.check.compare import Reference, compare, make, some_tokens
from thor_dflash.calib.check.golden import arrays, device, fits, read, same, sources
from thor_dflash.core.errors import RequestError
from thor_dflash.core.progress import Silent
from thor_dflash.core.tensors import Array


@pytest.fixture(scope="module")
def made() -> Mapping[str, Array]:
    """The arrays of a small model's golden file, without values inside its graphs."""
    s = session()
    return arrays(make(s, None, some_tokens(s), Silent()))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("logits", np.zeros((5, 512), np.float32)),
        ("logits", np.zeros((48, 5), np.float32)),
        ("logits", np.zeros((48, 512))),
        ("taps", np.zeros((48, 5), np.float32)),
        ("block", np.zeros(3)),
        ("tokens", np.array(5)),
        ("tokens", np.array(["a"])),
    ],
)
def test_a_golden_with_an_array_of_another_shape_or_type_is_refused(
    made: Mapping[str, Array], tmp_path: Path, name: str, wrong: Array
) -> None:
    path = tmp_path / "g.npz"
    np.savez(path, allow_pickle=False, **{**made, name: wrong})
    with pytest.raises(RequestError, match=rf"{path}: {name} must be .*; make it again"):
        fits(read(path), session().model, str(path))


def test_a_golden_names_its_device_and_has_equal_bits_nowhere_else(
    made: Mapping[str, Array], tmp_path: Path
) -> None:
    s, path = session(), tmp_path / "g.npz"
    tokens, there = some_tokens(s), f"{device(s)}, tuned 1a2b3c4d5e6f"
    for name, notes in ((device(s), 0), (there, 1)):
        np.savez(path, allow_pickle=False, **{**made, "device": np.array(name)})
        held = Reference(read(path))
        report = compare(s, None, held, tokens, "none", None, Silent())
        assert report.right
        assert len([note for note in report.notes if there in note]) == notes
        if notes:
            with pytest.raises(RequestError, match="tuned 1a2b3c4d5e6f.*make it again"):
                compare(s, None, held, tokens, "none", 0.0, Silent())
        else:
            assert compare(s, None, held, tokens, "none", 0.0, Silent()).right


def test_what_was_made_of_another_drafter_is_refused() -> None:
    manifest = session().manifest
    made = sources(manifest)
    assert set(made) == {"target", "drafter"}
    same({"target": made["target"]}, manifest, "g.npz")
    same(made, replace(manifest, sources={"target": manifest.sources["target"]}), "g.npz")
    message = r"g.npz must be made of the drafter of the package \(got another config.json: 000"
    with pytest.raises(RequestError, match=message):
        same({**made, "drafter": "0" * 64}, manifest, "g.npz")


def test_a_file_whose_compressed_data_are_damaged_is_no_golden(
    made: Mapping[str, Array], tmp_path: Path
) -> None:
    path = tmp_path / "golden.npz"
    np.savez_compressed(path, allow_pickle=False, **made)
    data = bytearray(path.read_bytes())
    data[60:90] = b"\xff" * 30
    path.write_bytes(data)
    with pytest.raises(RequestError, match="must be a golden file .*; make it again"):
        read(path)
