"""Who computes a prefill's products in packages that TensorRT for RTX builds on a CPU: it itself,
those stored in NVFP4, or our plugin.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.checkpoints import Dialect
from support.trt_builds import CHUNKS, build_hybrid


def products(dialect: Dialect) -> Counter[str]:
    """Return how many of TensorRT's own products a prefill has, by projection: the last layer,
    which is of attention, has none behind its mixer, nor for the gate of its rows.
    """
    if dialect not in ("modelopt", "compressed-tensors", "mixed"):
        return Counter()
    mlp = Counter(gate_up=2, down_proj=1)
    gdn = Counter(in_proj=2, out_proj=1)
    if dialect == "mixed":
        gdn = Counter()  # stored in FP8
    found: Counter[str] = Counter()
    for _ in range(3):
        found += gdn + mlp
    return found + Counter(qkv=3 if dialect != "mixed" else 0)


@pytest.mark.parametrize(
    "dialect",
    [
        "modelopt",
        pytest.param("fp8", marks=pytest.mark.slow),
        pytest.param("compressed-tensors", marks=pytest.mark.slow),
        pytest.param("mixed", marks=pytest.mark.slow),
    ],
)
def test_products_of_a_prefill_are_tensorrt_s_own_if_stored_in_nvfp4(
    tmp_path: Path, dialect: Dialect
) -> None:
    """The build refuses an engine in which one of them is computed in another type."""
    made = build_hybrid(tmp_path, dialect)
    assert not (made.out / ".scratch").exists()
    assert {n for n in made.engines if n.startswith("prefill")} == (
        {"prefill"} if products(dialect) else {"prefill", f"prefill.chunk{CHUNKS[1]}"}
    )
    engine = made.engines["prefill"]
    names = [name.rpartition(".")[0].rpartition(".")[2] for name in
             engine.together.graphs[0].products]  # fmt: skip
    assert Counter(names) == products(dialect)
    assert "gemm" not in {layer.kind for layer in made.engines["verify"].layers}
    profiles = len(engine.together.ranges)
    assert profiles == (len(CHUNKS) if names else 1)
    for i, chunk in enumerate(CHUNKS[:profiles]):
        description = made.description("prefill" if i == 0 else f"prefill.chunk{chunk}")
        assert (description.file, description.profile) == ("prefill.plan", i)
        assert description.inputs["tokens"].shape == (chunk,)
