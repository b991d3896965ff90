"""Files that are there and cannot be used: each is named instead of being taken for absent, waited
for, or shown with a traceback.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import GEOMETRIES, read_safetensors, write_safetensors, write_target

from thor_dflash.cli import main
from thor_dflash.core.errors import CheckpointError, PackageError
from thor_dflash.package.tokenizer_files import FILES, TEMPLATE, present, tokenizer_files
from thor_dflash.runtime.text.chat_template import Template

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


@pytest.mark.parametrize(
    "source",
    ["{% break %}", "{% for a in b %}" * 22 + "{% endfor %}" * 22, "{{ " + "1" * 5000 + " }}"],
)
def test_a_template_that_is_no_python_is_no_template(source: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(PackageError, match="chat template must be valid jinja"):
        Template.load(tmp_path)


def test_the_names_of_skipped_tensors_do_not_rule_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_target(tmp_path / "t", GEOMETRIES["27b"], 0)
    file = tmp_path / "t" / "model.safetensors"
    odd = {"mtp.a\x1b[31m\nb": np.zeros(1, np.float32)}
    write_safetensors(file, {**read_safetensors(file), **odd})
    assert main.main(["build", "--target", str(tmp_path / "t"), "--out", str(tmp_path / "o")]) == 0
    out = capsys.readouterr().out
    assert "mtp.a" in out
    assert "\x1b" not in out
    assert "\nb" not in out
