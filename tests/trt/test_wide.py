"""The 27B's graphs without its weights, built by TensorRT for RTX on a CPU and never executed. The
checks of an engine run in each build.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.trt_wide import build_wide

pytestmark = pytest.mark.slow


def test_every_engine_of_the_27b_with_its_drafter_is_its_plugins(tmp_path: Path) -> None:
    made = build_wide(tmp_path, 64, dense=False)
    assert {"prefill", "prefill.chunk128", "verify", "propose", "observe"} < made.engines.keys()
    for one in made.engines.values():
        kinds = [layer.kind for layer in one.layers if layer.kind != "shape_call"]
        assert kinds == ["custom_layer"] * len(one.together.graphs[0].plugins)


def test_products_at_the_27b_s_width_are_in_fp4_in_both_sizes_of_a_step(tmp_path: Path) -> None:
    [engine] = build_wide(tmp_path, 8, dense=True).engines.values()
    assert len(engine.together.ranges) == 2
    # 6 layers of gdn, 2 of attention; the last one ends with its state.
    assert len(engine.together.graphs[0].products) == 6 * 6 + 8 + 3
