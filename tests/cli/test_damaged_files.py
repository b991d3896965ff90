"""Files that are there and cannot be used: each is named instead of being taken for absent, waited
for, or shown with a traceback.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import GEOMETRIES, write_target

from thor_dflash.calib.check import golden
from thor_dflash.cli import main
from thor_dflash.core.errors import CheckpointError, RequestError
from thor_dflash.package.tokenizer_files import FILES, TEMPLATE, present, tokenizer_files
from thor_dflash.runtime.text.chat_template import Template


def test_a_golden_file_with_a_member_that_is_no_array_is_refused(tmp_path: Path) -> None:
    """numpy gives the bytes of such a member."""
    path = tmp_path / "g.npz"
    np.savez(path, block=16, rounds=True, tokens=np.arange(3), logits=np.zeros((3, 8)))
    golden.read(path)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("taps.npy", b"")
    with pytest.raises(RequestError, match=r"g\.npz must be a golden file"):
        golden.read(path)


OBSTACLES: dict[str, Callable[[Path], object]] = {
    "a link to nothing": lambda place: place.symlink_to("gone"),
    "something else": os.mkfifo,
}


@pytest.mark.parametrize("kind", OBSTACLES)
def test_what_is_there_and_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "x"
    assert not present(place)
    OBSTACLES[kind](place)
    with pytest.raises(CheckpointError, match=rf"x must be a file \(got {kind}\)"):
        present(place)


OTHERS = ("config.json", "model.safetensors", "model.safetensors.index.json")


@pytest.mark.parametrize("name", [*FILES, *OTHERS])
def test_a_checkpoint_with_a_link_to_nothing_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a copied snapshot of the Hugging Face cache has them: not the same as no such file."""
    write_target(tmp_path / "t", GEOMETRIES["27b"], 0)
    (tmp_path / "t" / name).unlink(missing_ok=True)
    (tmp_path / "t" / name).symlink_to("../blobs/gone")
    line = ["build", "--target", str(tmp_path / "t"), "--out", str(tmp_path / "o")]
    assert main.main(line) == 2
    assert f"{name} must be a file (got a link to nothing)" in capsys.readouterr().err
    if name in FILES:
        with pytest.raises(CheckpointError):
            tokenizer_files(tmp_path / "t")
    if name == TEMPLATE:
        with pytest.raises(CheckpointError):
            Template.load(tmp_path / "t")
