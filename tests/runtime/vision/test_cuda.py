"""Images on the CUDA engine, run by the emulator: the tower, a prompt with images, and the cycles
behind it give what ONNX Runtime gives.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from emulator.compiler import COMPILER
from support.engine_pair import DRAFTER, SEEING, packages, paired

from thor_dflash.core.tensors import Array
from thor_dflash.runtime.vision.picture import Picture
from thor_dflash.runtime.vision.prompt_images import ImageNumbers, place_images

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="needs g++"), pytest.mark.slow]

TOWER = 0.03
"""Most root mean square of the tower's errors, relative to its results: all rows are bf16. On a
tower of the 27B's width, transformers in bf16 is 1.1 % from itself in float32."""


def rms(x: Array) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def test_images_give_what_onnx_runtime_gives(tmp_path: Path) -> None:
    rng, numbers = np.random.default_rng(5), ImageNumbers()
    shown = [
        Picture(rng.integers(0, 256, (16 * rows, 16 * columns, 3), dtype=np.uint8))
        for rows, columns in ((6, 8), (12, 12))
    ]
    ids = [*range(3, 9), *numbers.ids(shown[0]), 20, *numbers.ids(shown[1]), *range(30, 50)]
    with paired(packages(tmp_path, DRAFTER, SEEING), 16) as made:
        for model in made.both():
            images = place_images(ids, shown, numbers)
            images = replace(images, encoded={numbers.of(p): model.encode(p) for p in shown})
            model.write_images(images)
        ours, theirs = (model.state.images for model in made.both())
        assert ours
        assert theirs
        for number, rows in theirs.encoded.items():
            off = ours.encoded[number].astype(np.float64) - rows
            assert rms(off) <= TOWER * rms(rows.astype(np.float64))
        for start in range(0, len(ids), 48):
            made.prefill(ids[start : start + 48])
        for forced in ([], [3, 4]):
            made.cycle(forced)
