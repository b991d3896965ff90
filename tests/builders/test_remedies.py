"""What a refusal of a damaged package advises is something that `build` does."""

from __future__ import annotations

from pathlib import Path

import pytest

from thor_dflash.builders.output.atomic_package import check_out
from thor_dflash.core.errors import PackageError
from thor_dflash.package.manifest import MAGIC, NAME, read


@pytest.mark.parametrize(
    "text",
    [b"", b"x = 1\n", b"\xff", f"{MAGIC}\nx = [\n".encode(), f"{MAGIC}\n\xff".encode()],
)
def test_the_remedy_for_a_damaged_manifest_is_one_that_build_takes(
    tmp_path: Path, text: bytes
) -> None:
    (tmp_path / NAME).write_bytes(text)
    with pytest.raises(PackageError, match="; (remove it and )?build it again") as caught:
        read(tmp_path)
    try:
        check_out(tmp_path)
    except PackageError:
        assert "remove it and build it again" in str(caught.value)
    else:
        assert "; build it again" in str(caught.value)


def test_nobody_is_told_to_remove_a_directory_that_was_never_a_package(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    message = r"must hold a manifest.toml, .*; name one that `thor-dflash build` made$"
    with pytest.raises(PackageError, match=message):
        read(tmp_path)


def test_a_manifest_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thor_dflash.core.strict_records.TEXT_LIMIT", 1000)
    (tmp_path / NAME).symlink_to("/dev/zero")
    with pytest.raises(PackageError, match=r"be a text in UTF-8 \(got: more than 1000 bytes\); r"):
        read(tmp_path)
