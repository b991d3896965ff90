"""The weight files of a package."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from thor_dflash.builders.output.weight_files import ALIGNMENT, WeightFiles
from thor_dflash.core.tensors import DType


def test_every_byte_that_is_written_is_counted(tmp_path: Path) -> None:
    """The gaps before page boundaries, too: a progress bar ends at the size of the file."""
    files, counts = WeightFiles(), list[int]()
    for name in "ab":
        files.add("file", name, DType.U8, (3,), lambda: np.ones(3, np.uint8))
    files.write("file", counts.append, tmp_path / "file")
    assert sum(counts) == files.nbytes("file") == (tmp_path / "file").stat().st_size
    assert files.nbytes("file") == ALIGNMENT + 3
