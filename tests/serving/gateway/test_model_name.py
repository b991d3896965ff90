"""The name by which clients ask for a model: that of `build`, or else of the target's directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support.samples import MANIFEST

from thor_dflash.cli import main
from thor_dflash.package import manifest

TARGET = Path(__file__).parents[3] / "models/planner-nano/target"


def test_a_name_comes_from_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "package"
    line = ["build", "--target", str(TARGET), "--out", str(out), "--set", "build.name=nano/1"]
    assert main.main(line) == 0
    assert manifest.read(out).model == "nano/1"


def test_a_package_without_a_name_is_described_as_before(tmp_path: Path) -> None:
    """Prefixes on disk belong to the manifest of a package, byte for byte."""
    assert "name" not in manifest.render(MANIFEST)
    assert MANIFEST.model == "nano"
    (tmp_path / manifest.NAME).write_text(manifest.render(replace(MANIFEST, name="x")))
    assert manifest.read(tmp_path).model == "x"
