"""The file that lists the ids of a reduced draft vocabulary, and files that are refused as such."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from thor_dflash.builders.checkpoint.draft_vocab import read_draft_ids
from thor_dflash.core.errors import ConfigError


@pytest.mark.parametrize(
    "wrong",
    [b"[1, 1" + 30 * b"0" + b"]", b"[-1, 2]", b"[0, 512]", b"[1, 2, 2]", b"[0, 3, 2]",
     b"\xff[1]", b"{}", b"[]", b"[true]", b"[1.0]"],
)  # fmt: skip
def test_what_is_no_ascending_list_of_ids_is_refused(tmp_path: Path, wrong: bytes) -> None:
    (tmp_path / "ids.json").write_bytes(wrong)
    with pytest.raises(ConfigError, match=r"^build\.draft_ids must be "):
        read_draft_ids(tmp_path / "ids.json", 512)


def test_the_first_id_and_the_last_may_be_listed(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[0, 511]")
    found = read_draft_ids(tmp_path / "ids.json", 512)
    assert (found.dtype, found.tolist()) == (np.int32, [0, 511])
