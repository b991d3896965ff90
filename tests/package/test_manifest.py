"""A package's manifest, and the check of all files against it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
from support.samples import MANIFEST, package, verify
from support.waiting import until

from thor_dflash.core.errors import PackageError
from thor_dflash.core.progress import Silent
from thor_dflash.package import manifest as m
from thor_dflash.package.manifest import (
    MAGIC,
    NAME,
    FileEntry,
    Manifest,
    checking,
    hash_file,
    read,
    render,
)


def sign(body: str) -> str:
    return f"{MAGIC}{hashlib.sha256(body.encode()).hexdigest()}\n{body}"


def body() -> str:
    return render(MANIFEST).partition("\n")[2]


@pytest.mark.parametrize("manifest", [MANIFEST, replace(MANIFEST, drafter=None, stop_tokens=())])
def test_round_trip(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / NAME).write_text(render(manifest))
    assert read(tmp_path) == manifest
    verify(tmp_path, read(tmp_path))


def test_a_file_name_may_hold_anything_but_a_way_out(tmp_path: Path) -> None:
    entry = FileEntry(sha256="", bytes=0)
    manifest = replace(MANIFEST, files={'w/a "b".é': entry})
    (tmp_path / NAME).write_text(render(manifest), encoding="utf-8")
    assert read(tmp_path) == manifest
    for name in ("../x", "/x", "a/../../x", NAME, "a\0b", "."):
        with pytest.raises(PackageError, match="files must be paths inside"):
            replace(MANIFEST, files={name: entry})


def test_refuses_no_package(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="got nothing there"):
        read(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(PackageError, match="got a file"):
        read(tmp_path / "file")
    with pytest.raises(PackageError, match=r"must hold a manifest.toml, .*thor-dflash build"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (body(), "must begin with"),
        (render(MANIFEST).replace("block = 16", "block = 15"), "got an edited file"),
        (sign(body().replace("format = 6", "format = 5")), "format must be 6 .got 5.*build it"),
        (sign(body() + "\n[xtra]\n"), "unknown key"),
        (sign(body().replace("hidden = 128", "hiden = 128")), r"unknown key target.hiden .did you"),
        *((sign(body().replace("block = 16", f"block = {n}")), f"block must be 1 to .* .got {n}")
          for n in (-1, 0, 1 << 40)),
        (sign(body().replace("chunk = 64", "chunk = 0")), "chunk must be 1 to .* .got 0"),
        (sign(body().replace("hidden = 128", "hidden = -128")), "target.hidden must be 1 to"),
        (sign(body() + '"a\\u0000b" = { sha256 = "", bytes = 0 }\n'), "files must be paths inside"),
        (sign(body().replace('"attention",', '"mamba",')), r'target.layers\[3\] must be "gdn" or'),
    ],
)  # fmt: skip
def test_refuses_a_bad_manifest(tmp_path: Path, text: str, message: str) -> None:
    assert text != render(MANIFEST)
    (tmp_path / NAME).write_text(text)
    with pytest.raises(PackageError, match=message):
        read(tmp_path)


def test_verify_names_every_problem(tmp_path: Path) -> None:
    manifest = package(tmp_path, a=b"aaaa", w__b=b"bbbb", c=b"cccc", d=b"dddd")
    verify(tmp_path, manifest)

    (tmp_path / "c").write_bytes(b"cccC")
    with pytest.raises(PackageError, match=r"\(got c altered\); build it again"):
        verify(tmp_path, manifest)

    (tmp_path / "a").unlink()
    (tmp_path / "w/b").write_bytes(b"bb")
    (tmp_path / "w/e").mkdir()
    with pytest.raises(PackageError) as error:
        verify(tmp_path, manifest)
    assert "a missing, w/b of 2 bytes, not 4, w/e that no build wrote" in str(error.value)


def damaged(tmp_path: Path, *names: str) -> Manifest:
    made = package(tmp_path, other=b"other", weights__a=bytes(40), weights__b=bytes(40))
    for name in names:
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1] + b"!")
    return made


def test_weights_are_hashed_while_they_are_loaded_and_all_else_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, hashed = Event(), list[str]()

    def held(path: Path, advance: Callable[[int], None]) -> FileEntry:
        if path.parent.name == "weights":
            assert go.wait(20)
        hashed.append(path.name)
        return hash_file(path, advance)

    monkeypatch.setattr(m, "hash_file", held)
    with checking(tmp_path, damaged(tmp_path), Silent()):
        assert hashed == ["other"]
        go.set()
    assert sorted(hashed) == ["a", "b", "other"]


def test_damaged_weights_are_reported_at_the_end_of_loading_them(tmp_path: Path) -> None:
    made, loaded = damaged(tmp_path, "weights/b"), False
    with (
        pytest.raises(PackageError, match=r"\(got weights/b altered\)"),
        checking(tmp_path, made, Silent()),
    ):
        loaded = True
    assert loaded


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Hashes files byte by byte, one file at a time. Returns the sizes of the pieces read."""
    pieces: list[int] = []

    def hash_slowly(path: Path, advance: Callable[[int], None]) -> FileEntry:
        def read_piece(count: int) -> None:
            pieces.append(count)
            advance(count)

        return hash_file(path, read_piece)

    monkeypatch.setattr(m, "hash_file", hash_slowly)
    monkeypatch.setattr(m, "CHUNK", 1)
    monkeypatch.setattr(m, "HASHERS", 1)
    return pieces


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_to_load_ends_the_hashing(
    tmp_path: Path, slow: list[int], error: type[BaseException]
) -> None:
    made = package(tmp_path, weights__a=bytes(1 << 18), weights__b=bytes(1 << 18))
    with pytest.raises(error), checking(tmp_path, made, Silent()):
        raise error
    done = len(slow)
    time.sleep(0.05)
    assert len(slow) == done < 1 << 17, "it would have been 2^19"


def test_a_failure_to_load_what_is_damaged_is_reported_as_damage(
    tmp_path: Path, slow: list[int]
) -> None:
    made = damaged(tmp_path, "weights/a")
    with (
        pytest.raises(PackageError, match=r"\(got weights/a altered\)") as error,
        checking(tmp_path, made, Silent()),
    ):
        until(lambda: len(slow) > len(b"other") + 40)  # weights/b has begun: weights/a is done
        raise ValueError("not what I can load")
    assert isinstance(error.value.__cause__, ValueError)
