"""A package that takes the place of an earlier one: what may go wrong then, and what is left."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.samples import MANIFEST

from thor_dflash.builders.output import atomic_package
from thor_dflash.builders.output.atomic_package import AtomicPackage
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
