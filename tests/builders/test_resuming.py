"""A build that is run again after it was killed: what it writes again, and how it tells of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.checkpoints import TargetGeometry, write_target

from thor_dflash.builders.build import _key, make_plan
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.builders.resume_key import build_key, code
from thor_dflash.config.build import BuildConfig

ROOT = Path(__file__).parents[2]


def test_a_build_of_a_checkpoint_in_another_directory_is_not_resumed(tmp_path: Path) -> None:
    """Even if all its files have the size and the time of the first checkpoint's."""
    write_target(tmp_path / "a", TargetGeometry(), 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # keeps times
    a, b = (_key(make_plan(read_target(tmp_path / x), None, BuildConfig()), None) for x in "ab")
    assert a != b


def test_a_build_by_other_code_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout that is updated meanwhile has the same version; it may pack otherwise."""
    for name in ("builders", "plugins"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        module = SimpleNamespace(__path__=[str(tmp_path / name)])
        monkeypatch.setattr(f"thor_dflash.builders.resume_key.{name}", module)
    monkeypatch.setattr("thor_dflash.builders.resume_key.code", code.__wrapped__)  # not cached
    seen: set[str] = set()
    edited = (
        "builders/output/weight_files.py",
        "plugins/linear/pack.py",
        "plugins/linear/reference.py",
        "plugins/gdn/onnx_body.py",
        "plugins/cuda/device.cuh",
    )
    for name in ("", *edited):
        if name:
            with (tmp_path / name).open("a") as file:
                file.write("// edited\n")
        seen.add(build_key(BuildConfig(), [], None, None))
    assert len(seen) == 1 + len(edited)
