"""A package appears in one rename or not at all: builds that fail, are killed or run twice."""

from __future__ import annotations

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
from thor_dflash.builders.output.atomic_package import AtomicPackage
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
        stage.write("same", lambda p: p.write_bytes(b"6"))
        stage.write("c", lambda p: (p.write_bytes(b"half"), die()))
    """)  # fmt: skip
    assert not out.exists()
    partial = tmp_path / ".pkg.partial"
    (partial / "b").write_bytes(b"")  # as after a crash of the file system
    (partial / "longer").write_bytes(b"33")
    (partial / "gone").unlink()
    (partial / "same").write_bytes(b"0")  # of the right size, as pages that never reached the disk
    with (partial / ".journal").open("a") as file:
        file.write('{"name": "d", "sha')  # a line that was not written to its end
    with AtomicPackage(out, "k") as stage:
        assert list(stage.files) == ["a"]
        stage.write("a", forbidden)
        stage.write("b", put(b"2"))
        stage.write("e", put(b"5"))
        stage.write("same", put(b"6"))
        stage.finish(TEXT)
    assert tree(out) == ["a", "b", "e", "manifest.toml", "same"]  # the half of c is gone
    assert (out / "same").read_bytes() == b"6"
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
