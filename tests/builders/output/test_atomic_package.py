"""A package appears in one rename or not at all: builds that fail, are killed or run twice."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from support.samples import MANIFEST

from thor_dflash.builders.output import atomic_package
from thor_dflash.builders.output.atomic_package import AtomicPackage, check_out, parents
from thor_dflash.core.errors import PackageError
from thor_dflash.package.manifest import hash_file, read, render

TEXT = render(MANIFEST)


def put(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def forbidden(path: Path) -> None:
    raise AssertionError(f"{path.name} is written again")


def build(out: Path, content: bytes, key: str = "k") -> None:
    with AtomicPackage(out, key) as stage:
        stage.write("w/a.bin", put(content))
        stage.finish(TEXT)


def tree(directory: Path) -> list[str]:
    return sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*"))


def killed(out: Path, body: str) -> None:
    """Run a build in a process of its own. `body` uses its `stage` and ends with a SIGKILL: `die`
    sends it.
    """
    lines = textwrap.indent(textwrap.dedent(body), "    ")
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from thor_dflash.builders.output import atomic_package\n"
        "from thor_dflash.builders.output.atomic_package import AtomicPackage\n"
        "def die(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
        "with AtomicPackage(Path(sys.argv[1]), 'k') as stage:\n" + lines
    )
    result = subprocess.run([sys.executable, "-c", script, str(out)], check=False)
    assert result.returncode == -signal.SIGKILL


def test_a_finished_build_is_the_package_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "new" / "pkg"
    with AtomicPackage(out, "k") as stage:
        entry = stage.write("w/a.bin", put(b"123"))
        stage.write("b", put(b""))
        assert not out.exists()
        assert entry == stage.files["w/a.bin"]
        stage.finish(TEXT)
    assert tree(tmp_path) == [
        "new", "new/pkg", "new/pkg/b", "new/pkg/manifest.toml", "new/pkg/w", "new/pkg/w/a.bin",
    ]  # fmt: skip
    assert read(out) == MANIFEST
    assert hash_file(out / "w/a.bin") == entry


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), PackageError("y")])
def test_an_error_leaves_nothing_behind(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), AtomicPackage(tmp_path / "a" / "b" / "pkg", "k") as stage:
        stage.write("a", put(b"1"))
        raise error
    assert tree(tmp_path) == []


def test_forgetting_to_finish_leaves_nothing_behind(tmp_path: Path) -> None:
    with AtomicPackage(tmp_path / "pkg", "k") as stage:
        stage.write("a", put(b"1"))
    assert tree(tmp_path) == []


def test_an_error_keeps_the_package_that_was_there(tmp_path: Path) -> None:
    out = tmp_path / "pkg"
    build(out, b"old")
    with pytest.raises(ValueError, match="x"), AtomicPackage(out, "k") as stage:
        stage.write("w/a.bin", put(b"new"))
        raise ValueError("x")
    assert (out / "w/a.bin").read_bytes() == b"old"
    assert tree(tmp_path) == ["pkg", "pkg/manifest.toml", "pkg/w", "pkg/w/a.bin"]


@pytest.mark.parametrize("swap", [True, False])
def test_replaces_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: bool) -> None:
    if not swap:
        monkeypatch.setattr(atomic_package, "_exchange", lambda a, b: False)
    out = tmp_path / "pkg"
    build(out, b"old")
    (out / "manifest.toml").write_text(TEXT[:200])  # damaged, but still a package
    build(out, b"new")
    assert (out / "w/a.bin").read_bytes() == b"new"
    assert tree(tmp_path) == ["pkg", "pkg/manifest.toml", "pkg/w", "pkg/w/a.bin"]


def test_replaces_through_a_link(tmp_path: Path) -> None:
    build(tmp_path / "real", b"old")
    (tmp_path / "link").symlink_to("real")
    build(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real/w/a.bin").read_bytes() == b"new"


def test_refuses_what_is_no_package_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir/manifest.toml").write_text("[mine]")
    for name, what in (("file", "a file"), ("dir", "a directory of something else")):
        with pytest.raises(PackageError, match=f"must be free or a thor-dflash .*got {what}"):
            AtomicPackage(tmp_path / name, "k").__enter__()
    (tmp_path / "loop").symlink_to("loop")
    for name in ("file", "loop"):
        with pytest.raises(PackageError, match="must be writable .got: "):
            AtomicPackage(tmp_path / name / "pkg", "k").__enter__()
    assert tree(tmp_path) == ["dir", "dir/manifest.toml", "file", "loop"]


def test_no_package_is_built_in_another(tmp_path: Path) -> None:
    out = tmp_path / "pkg"
    build(out, b"old")
    (tmp_path / "link").symlink_to("pkg/w")
    before = tree(tmp_path)
    for inside in (out / "sub", out / "new" / "sub", out / "w", tmp_path / "link" / "sub"):
        for begin in (check_out, lambda path: AtomicPackage(path, "k").__enter__()):
            with pytest.raises(PackageError, match=rf"^--out must be outside .*, in {out}\)"):
                begin(inside)
    assert tree(tmp_path) == before
    build(out, b"new")  # a package itself may be replaced


def test_what_others_put_at_its_place_meanwhile_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "pkg"
    with pytest.raises(PackageError, match="must be free or"), AtomicPackage(out, "k") as stage:
        stage.write("a", put(b"1"))
        out.mkdir()
        (out / "thesis.tex").write_text("years")
        stage.finish(TEXT)
    assert tree(tmp_path) == ["pkg", "pkg/thesis.tex"]


def test_a_killed_build_resumes_file_by_file(tmp_path: Path) -> None:
    out = tmp_path / "pkg"
    killed(out, """
        stage.write("a", lambda p: p.write_bytes(b"1"))
        stage.write("b", lambda p: p.write_bytes(b"2"))
        stage.write("longer", lambda p: p.write_bytes(b"3"))
        stage.write("gone", lambda p: p.write_bytes(b"4"))
        stage.write("c", lambda p: (p.write_bytes(b"half"), die()))
    """)  # fmt: skip
    assert not out.exists()
    partial = tmp_path / ".pkg.partial"
    (partial / "b").write_bytes(b"")  # as after a crash of the file system
    (partial / "longer").write_bytes(b"33")
    (partial / "gone").unlink()
    with (partial / ".journal").open("a") as file:
        file.write('{"name": "d", "sha')  # a line that was not written to its end
    with AtomicPackage(out, "k") as stage:
        assert list(stage.files) == ["a"]
        stage.write("a", forbidden)
        stage.write("b", put(b"2"))
        stage.write("e", put(b"5"))
        stage.finish(TEXT)
    assert tree(out) == ["a", "b", "e", "manifest.toml"]  # the half of c is gone
    assert tree(tmp_path)[0] == "pkg"


@pytest.mark.parametrize("journal", [b"", b"\xff", b'{"name": "a"}\n'])
def test_what_is_no_journal_of_a_build_starts_over(tmp_path: Path, journal: bytes) -> None:
    partial = tmp_path / ".pkg.partial"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").touch()
    (partial / "w").mkdir(parents=True)
    (partial / "link").symlink_to(tmp_path / "theirs")
    (partial / ".journal").write_bytes(journal)
    with AtomicPackage(tmp_path / "pkg", "k") as stage:
        assert stage.files == {}
        assert tree(partial) == [".journal"]
    assert tree(tmp_path) == ["theirs", "theirs/thesis.tex"]


def test_another_key_starts_over(tmp_path: Path) -> None:
    killed(tmp_path / "pkg", 'stage.write("w/a.bin", lambda p: p.write_bytes(b"1"))\ndie()')
    with AtomicPackage(tmp_path / "pkg", "other") as stage:
        assert stage.files == {}
        assert tree(tmp_path / ".pkg.partial") == [".journal"]


@pytest.mark.parametrize("swap", [True, False])
def test_a_build_killed_while_it_replaces_loses_no_package(tmp_path: Path, swap: bool) -> None:
    out = tmp_path / "pkg"
    build(out, b"old")
    hide = "" if swap else "atomic_package._exchange = lambda a, b: False\n"
    killed(out, hide + """
stage.write("w/a.bin", lambda p: p.write_bytes(b"new"))
atomic_package.shutil.rmtree = lambda *_, **options: die()
rename = Path.rename
Path.rename = lambda self, to: (rename(self, to), die())
stage.finish(Path(sys.argv[1], "manifest.toml").read_text())
""")  # fmt: skip
    with AtomicPackage(out, "k"):
        assert (out / "w/a.bin").read_bytes() == (b"new" if swap else b"old")
    assert tree(tmp_path) == ["pkg", "pkg/manifest.toml", "pkg/w", "pkg/w/a.bin"]


def test_of_two_builds_at_once_the_second_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "pkg"
    with AtomicPackage(out, "k") as stage:
        stage.write("a", put(b"1"))
        with pytest.raises(PackageError, match="one build at a time"):
            build(out, b"2")
        script = (
            "import sys; from pathlib import Path\n"
            "from thor_dflash.builders.output.atomic_package import AtomicPackage\n"
            "AtomicPackage(Path(sys.argv[1]), 'k').__enter__()"
        )
        command = [sys.executable, "-c", script, str(out)]
        other = subprocess.run(command, check=False, capture_output=True, text=True)
        assert "one build at a time (got a second)" in other.stderr
        stage.finish(TEXT)
    assert tree(out) == ["a", "manifest.toml"]
    build(out, b"3")


def test_a_lock_on_a_directory_that_is_renamed_before_it_is_locked_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial, lock = tmp_path / ".pkg.partial", fcntl.flock

    def late(handle: int, how: int) -> None:
        if not (tmp_path / "renamed").exists():
            partial.rename(tmp_path / "renamed")
            partial.mkdir()
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with (
        AtomicPackage(tmp_path / "pkg", "k"),
        pytest.raises(PackageError, match="one build at a time"),
    ):
        build(tmp_path / "pkg", b"2")


def test_a_build_that_begins_while_the_old_package_is_deleted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, delete = tmp_path / "pkg", shutil.rmtree
    build(out, b"old")

    def second(path: Path, **options: bool) -> None:
        with pytest.raises(PackageError, match="one build at a time"):
            AtomicPackage(out, "k").__enter__()
        delete(path, **options)

    monkeypatch.setattr(shutil, "rmtree", second)
    build(out, b"new")
    assert tree(tmp_path) == ["pkg", "pkg/manifest.toml", "pkg/w", "pkg/w/a.bin"]


def refused(code: int) -> Callable[[Path], None]:
    """Returns a writer of files that the system refuses with this errno."""

    def write(path: Path) -> None:
        raise OSError(code, os.strerror(code), str(path))

    return write


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_one_line(tmp_path: Path, code: int) -> None:
    with (
        pytest.raises(PackageError, match=r"^the disk must have space for .*: no space left"),
        AtomicPackage(tmp_path / "pkg", "k") as stage,
    ):
        stage.write("a", refused(code))
    assert tree(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "broken")])
def test_an_error_before_the_first_file_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def flush(handle: int) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", flush)
        with pytest.raises((KeyboardInterrupt, PackageError)):
            AtomicPackage(tmp_path / "new" / "pkg", "k").__enter__()
    assert tree(tmp_path) == []
    build(tmp_path / "new" / "pkg", b"1")


def test_directories_above_it_that_cannot_all_be_made_are_removed(tmp_path: Path) -> None:
    out = tmp_path / "new" / "deep" / ("x" * 300) / "pkg"
    with pytest.raises(PackageError, match=r"must be writable \(got: File name too long\)"):
        AtomicPackage(out, "k").__enter__()
    with pytest.raises(OSError, match="File name too long"), parents(out):
        pass
    assert tree(tmp_path) == []


def test_what_a_writer_left_beside_its_file_is_no_part_of_the_package(tmp_path: Path) -> None:
    def untidy(path: Path) -> None:
        path.write_bytes(b"1")
        (path.parent / "scratch" / "deep").mkdir(parents=True)
        (path.parent / "scratch" / "deep" / "x").touch()
        (path.parent / "link").symlink_to("scratch")

    with AtomicPackage(tmp_path / "pkg", "k") as stage:
        stage.write("w/a.bin", untidy)
        stage.finish(TEXT)
    assert tree(tmp_path) == ["pkg", "pkg/manifest.toml", "pkg/w", "pkg/w/a.bin"]


@pytest.mark.parametrize("name", [".p.partial", ".p.old"])
def test_what_others_keep_beside_it_is_left_alone(tmp_path: Path, name: str) -> None:
    other = tmp_path / name
    other.mkdir()
    (other / "thesis.tex").write_text("years")
    if name == ".p.partial":
        with pytest.raises(PackageError, match="must be free or a build that was stopped"):
            build(tmp_path / "p", b"x")
    else:
        build(tmp_path / "p", b"x")
    assert (other / "thesis.tex").read_text() == "years"
