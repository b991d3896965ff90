"""A package that takes the place of an earlier one: what may go wrong then, and what is left."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.samples import MANIFEST
from support.unprivileged import unprivileged

from thor_dflash.builders.output import atomic_package
from thor_dflash.builders.output.atomic_package import AtomicPackage
from thor_dflash.core.errors import PackageError
from thor_dflash.package.manifest import render


def build(out: Path, content: bytes) -> None:
    with AtomicPackage(out, "key") as stage:
        stage.write("w/a", lambda path: path.write_bytes(content) and None)
        stage.finish(render(MANIFEST))


def left(out: Path) -> tuple[list[str], bytes]:
    return sorted(p.name for p in out.parent.iterdir()), (out / "w/a").read_bytes()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
@pytest.mark.parametrize("late", [False, True])
def test_a_package_stays_or_is_replaced_if_the_second_rename_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, late: bool
) -> None:
    """`late`: an interrupt comes when the name has already changed."""
    out, rename = tmp_path / "p", Path.rename
    build(out, b"old")

    def failing(path: Path, to: Path) -> Path:
        if path.name != ".p.partial":
            return rename(path, to)
        if late:
            rename(path, to)
        raise error

    monkeypatch.setattr(atomic_package, "_exchange", lambda a, b: False)
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(type(error)):
        build(out, b"new")
    monkeypatch.undo()
    assert (out / "w/a").read_bytes() == (b"new" if late else b"old")
    build(out, b"newer")
    assert left(out) == (["p"], b"newer")


def test_what_cannot_be_emptied_is_named(tmp_path: Path) -> None:
    part = tmp_path / ".p.partial"
    part.mkdir()
    (part / atomic_package.JOURNAL).write_text("{}\n")
    part.chmod(0o500)
    message = rf"{part}/\{atomic_package.JOURNAL} must be writable \(got: Permission denied\)"
    with unprivileged(), pytest.raises(PackageError, match=message):
        build(tmp_path / "p", b"")


@pytest.mark.parametrize("swap", [True, False])
def test_an_old_package_that_stays_is_told_then_and_before_the_next_build(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    swap: bool,
) -> None:
    out, name = tmp_path / "p", ".p.partial" if swap else ".p.old"
    build(out, b"old")
    if not swap:
        monkeypatch.setattr(atomic_package, "_exchange", lambda a, b: False)
    monkeypatch.setattr(atomic_package, "_remove", lambda directory: False)
    build(out, b"new")
    message = f"note: {tmp_path / name}, the replaced package, cannot be deleted\n"
    assert capsys.readouterr().err == message
    with pytest.raises(PackageError, match=rf"\{name}\S* must be removable"):
        AtomicPackage(out, "key").__enter__()
    assert (out / "w/a").read_bytes() == b"new"
