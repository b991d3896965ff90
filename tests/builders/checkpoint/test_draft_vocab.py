"""The file that lists the ids of a reduced draft vocabulary, and files that are refused as such."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from thor_dflash.builders.checkpoint.draft_vocab import read_draft_ids
from thor_dflash.core.errors import ConfigError


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (f"[1, 1{30 * '0'}]", f"1{30 * '0'}, of 2 ids"),
        ("[-1, 2]", "-1, of 2 ids"),
        ("[0, 512]", "512, of 2 ids"),
        ("[1, 2, 2]", "2 after 2, of 3 ids"),
        ("[0, 3, 2]", "2 after 3, of 3 ids"),
    ],
)
def test_ids_out_of_range_or_not_ascending_are_refused(
    tmp_path: Path, wrong: str, got: str
) -> None:
    (tmp_path / "ids.json").write_text(wrong)
    message = rf"draft_ids must be ascending ids from 0 to 511 \(got {got}\)"
    with pytest.raises(ConfigError, match=message):
        read_draft_ids(tmp_path / "ids.json", 512)


@pytest.mark.parametrize("wrong", [b"[" * 200_000, b"\xff[1]", b"{}", b"[]", b"[true]", b"[1.0]"])
def test_what_is_no_list_of_ids_is_refused(tmp_path: Path, wrong: bytes) -> None:
    (tmp_path / "ids.json").write_bytes(wrong)
    with pytest.raises(ConfigError, match=r"build\.draft_ids must be a JSON list of ids \(got "):
        read_draft_ids(tmp_path / "ids.json", 512)


def test_a_file_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thor_dflash.core.strict_records.TEXT_LIMIT", 1000)
    message = r"must be a JSON list of ids \(got /dev/zero: more than 1000 bytes\)"
    with pytest.raises(ConfigError, match=message):
        read_draft_ids(Path("/dev/zero"), 512)


def test_the_first_id_and_the_last_may_be_listed(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[0, 511]")
    found = read_draft_ids(tmp_path / "ids.json", 512)
    assert (found.dtype, found.tolist()) == (np.int32, [0, 511])
