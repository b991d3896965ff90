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
from support.constrained_model import package, session

from thor_dflash.cli import main
from thor_dflash.cli.commands.score import write_blocks
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.measure.score import score

TOKENS = list(range(40))


def ask(out: Path, *more: str) -> int:
    ids = out.with_name("ids.json")
    ids.write_text(json.dumps(TOKENS))
    source = ("--package", str(package()), "--tokens", str(ids), "-s", "engine.threads=1")
    return main.main(["score", *source, "--out", str(out), *more])


@pytest.mark.parametrize("taps", [False, True])
def test_the_file_is_the_one_that_numpy_writes_of_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], taps: bool
) -> None:
    out = tmp_path / "x.npz"
    assert ask(out, *(["--taps"] if taps else [])) == 0
    want = score(session(), TOKENS, taps, Silent())
    rows = [f"{out}: {name} float32 {list(array.shape)}" for name, array in want.items()]
    assert capsys.readouterr().out.splitlines() == rows
    np.savez(tmp_path / "want.npz", allow_pickle=False, **want)
    with ZipFile(out) as ours, ZipFile(tmp_path / "want.npz") as theirs:
        assert ours.namelist() == theirs.namelist()
        assert all(ours.read(name) == theirs.read(name) for name in ours.namelist())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ids.json", "want.npz", "x.npz"]


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
    assert ask(out) == status
    assert capsys.readouterr().err.endswith(f"{expected}\n")
    assert out.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ids.json", "x.npz"]
