"""Builds the 27B's engines with the recorder: memory stays bounded, and the bytes are those of the
table in the docstring of builders/tensorrt.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import trt_synthetic_27b

from thor_dflash.builders import tensorrt

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
MOST = 6 << 30
"""Bound on the memory of the process that builds, bytes."""
GDN, ATTENTION = 48, 16
"""Number of layers of each kind."""
RUN = (
    "import sys; sys.path[:0] = sys.argv[1:3]; from pathlib import Path; "
    "from support import trt_synthetic_27b; "
    "trt_synthetic_27b.main(Path(sys.argv[3]), sys.argv[4])"
)


def built(directory: Path, prefill: str) -> dict[str, Any]:
    tests = str(Path(trt_synthetic_27b.__file__).parents[1])
    command = [sys.executable, "-c", RUN, str(ROOT), tests, str(directory), prefill]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    report: dict[str, Any] = json.loads(run.stdout)
    assert report["peak"] < MOST
    return report


def test_27b_with_plugins_alone_shares_one_copy_of_the_weights(tmp_path: Path) -> None:
    report = built(tmp_path, "plugin")
    # Each layer is a GDN or attention node and four linears.
    assert report["layers"]["verify"] == 5 * (GDN + ATTENTION) + len(("embed", "taps", "head"))
    assert report["layers"]["prefill.chunk128"] == report["layers"]["prefill"]
    assert set(report["constants"].values()) == {0}
    assert report["profiles"]["verify"] == 1
    assert documented(report["weights"])
    assert documented(sum(report["by_engine"].values()))


def test_27b_with_a_prefill_of_tensorrts_own_holds_that_ones_weights_twice(
    tmp_path: Path,
) -> None:
    report = built(tmp_path, "tensorrt")
    assert report["profiles"]["prefill"] == 2
    assert "prefill.chunk128" not in report["layers"]
    assert report["constants"]["prefill"] == sum(report["constants"].values()) > 13e9
    assert documented(report["weights"] + report["constants"]["prefill"])


def documented(count: int) -> bool:
    """Whether the table in the docstring of builders/tensorrt has this number of bytes, in GB."""
    assert tensorrt.__doc__
    return f" {count / 1e9:.1f} GB" in tensorrt.__doc__
