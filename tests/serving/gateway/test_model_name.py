"""The name by which clients ask for a model: that of `build`, or else of the target's directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.planner_nano import package
from support.samples import MANIFEST

from thor_dflash.cli import main
from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.progress import Silent
from thor_dflash.package import manifest
from thor_dflash.runtime.session import open_session
from thor_dflash.serving.planner.session_backend import SessionBackend

TARGET = Path(__file__).parents[3] / "models/planner-nano/target"


@pytest.mark.parametrize(("asked", "name"), [("", "target"), ("planner-nano", "planner-nano")])
def test_a_server_tells_the_name_that_its_package_was_given(
    tmp_path: Path, asked: str, name: str
) -> None:
    made = package(tmp_path / "package", name=asked)
    session = open_session(made, EngineConfig(threads=1), Silent())
    assert SessionBackend(session, ServeConfig()).about.model == name


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
