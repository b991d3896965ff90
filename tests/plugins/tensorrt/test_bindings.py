"""Every plugin with TensorRT's published Python classes, of several versions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stand_ins.trt_stubs import VERSIONS, bindings, libraries

ROOT = Path(__file__).parents[3]


# Run in a process of its own: the bindings are loaded once per process.
ALONE = """
import sys
sys.path[:0] = sys.argv[1:3]
from stand_ins import trt_bindings
trt_bindings.main(*sys.argv[3:])
"""


def asked(site: Path, made: list[Path]) -> dict[str, Any]:
    """What trt_bindings.main reports about the bindings in `site` and these libraries."""
    given = [ROOT, ROOT / "tests", site, *made]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *map(str, given)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_every_plugin_answers_through_the_bindings(version: str, tmp_path: Path) -> None:
    report = asked(bindings(version), libraries(version, tmp_path))
    assert report["version"] == version
    assert report["plugins"] > 50
