"""A build that is run again after it was killed: what it writes again, and how it tells of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.checkpoints import TargetGeometry, write_target

from thor_dflash.builders.build import _key, build, make_plan
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.builders.output.atomic_package import AtomicPackage
from thor_dflash.builders.resume_key import _code, build_key
from thor_dflash.config.build import BuildConfig
from thor_dflash.core.progress import Silent

ROOT = Path(__file__).parents[2]


class Bars(Silent):
    """Counts what is reported for each label."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[int | None, list[int]]] = {}

    def task(self, label: str, total: int | None = None, unit: str = "") -> Bar:
        self.seen[label] = total, []
        return Bar(self.seen[label][1])


class Bar:
    def __init__(self, done: list[int]) -> None:
        self.done = done

    def advance(self, n: int) -> None:
        self.done.append(n)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def test_the_bar_of_a_resumed_build_counts_the_weights_that_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_target(tmp_path / "t", TargetGeometry(), 1)
    with monkeypatch.context() as patch:
        patch.setattr(AtomicPackage, "finish", lambda *_: 1 / 0)
        patch.setattr(
            AtomicPackage, "_discard", lambda stage: os.close(stage._lock)
        )  # as if killed
        with pytest.raises(ZeroDivisionError):
            build(target, None, tmp_path / "p", BuildConfig(), Silent())
    bars = Bars()
    build(target, None, tmp_path / "p", BuildConfig(), bars)
    total, done = bars.seen["writing weights"]
    assert sum(done) == total


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
    monkeypatch.setattr("thor_dflash.builders.resume_key._code", _code.__wrapped__)  # not cached
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
