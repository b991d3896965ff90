"""`thor-dflash score`, with a small model of random weights."""

from __future__ import annotations

import errno
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from support.checkpoints import GEOMETRIES, DrafterGeometry, write_drafter, write_target

from thor_dflash.builders.build import build
from thor_dflash.cli import main
from thor_dflash.cli.commands.score import write_blocks
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.measure.score import score
from thor_dflash.runtime.session import open_session

TOKENS = list(range(40))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a package `pkg` and a file `ids.json` of token ids."""
    root = tmp_path_factory.mktemp("score")
    write_target(root / "target", GEOMETRIES["27b"], 3, "bf16")
    write_drafter(root / "drafter", GEOMETRIES["27b"], DrafterGeometry(), 4)
    config = BuildConfig(chunk=32, capacity=512)
    build(root / "target", root / "drafter", root / "pkg", config, Silent())
    (root / "ids.json").write_text(json.dumps(TOKENS))
    return root


def ask(root: Path, out: Path, *more: str) -> int:
    source = ("--package", str(root / "pkg"), "--tokens", str(root / "ids.json"))
    return main.main(["score", *source, "--out", str(out), *more])


@pytest.mark.parametrize("taps", [False, True])
def test_the_file_is_the_one_that_numpy_writes_of_the_whole(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], taps: bool
) -> None:
    out = tmp_path / "x.npz"
    assert ask(root, out, *(["--taps"] if taps else [])) == 0
    session = open_session(root / "pkg", EngineConfig(), Silent())
    want = score(session, TOKENS, taps, Silent())
    rows = [f"{out}: {name} float32 {list(array.shape)}" for name, array in want.items()]
    assert capsys.readouterr().out.splitlines() == rows
    np.savez(tmp_path / "want.npz", allow_pickle=False, **want)
    with ZipFile(out) as ours, ZipFile(tmp_path / "want.npz") as theirs:
        assert ours.namelist() == theirs.namelist()
        assert all(ours.read(name) == theirs.read(name) for name in ours.namelist())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["want.npz", "x.npz"]


def test_no_more_than_two_blocks_are_held(tmp_path: Path) -> None:
    held: list[weakref.ref[Any]] = []
    most = 0

    def made() -> Iterator[dict[str, Any]]:
        nonlocal most
        for i in range(9):
            logits = np.full((2, 5), i, np.float32)
            held.append(weakref.ref(logits))
            most = max(most, sum(each() is not None for each in held))
            yield {"logits": logits}

    write_blocks(tmp_path / "x.npz", {"logits": (18, 5)}, made())
    assert most <= 2
    assert np.load(tmp_path / "x.npz")["logits"][:, 0].tolist() == [i // 2 for i in range(18)]


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("where", "error", "status", "expected"),
    [
        ("os.fsync", FULL, 2, "x.npz must be writable (got: No space left on device)"),
        (
            "thor_dflash.runtime.decoding.sequence_state.SequenceState.verified",
            KeyboardInterrupt(),
            130,
            "interrupted",
        ),
    ],
)
def test_what_was_there_stays_until_the_new_one_is_whole(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
    error: BaseException,
    status: int,
    expected: str,
) -> None:
    out = tmp_path / "x.npz"
    out.write_bytes(b"old")

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(where, fail)
    assert ask(root, out) == status
    assert capsys.readouterr().err.endswith(f"{expected}\n")
    assert out.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]
