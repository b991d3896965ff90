"""A fixture shared by tests of the bench."""

from __future__ import annotations

import pytest
from support.tiny_bench import VOCABULARY, small

from thor_dflash.builders import synthetic
from thor_dflash.cli.commands import bench
from thor_dflash.runtime.measure import bench_report, cuda_bench


@pytest.fixture
def small_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the shape "small" to those of the bench, and let the bench neither rest nor repeat."""
    monkeypatch.setitem(synthetic.SHAPES, "small", small())
    monkeypatch.setattr(bench, "DRAFT_VOCABULARY", VOCABULARY // 2)
    monkeypatch.setattr(cuda_bench, "REST", 0.0)
    monkeypatch.setattr(bench_report, "REPEATED", 0.0)
