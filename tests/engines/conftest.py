"""A fixture shared by tests of engines."""

from __future__ import annotations

import pytest
from benching import small

from thor_dflash.builders import hollow
from thor_dflash.runtime.engines.cuda import bench, figures


@pytest.fixture
def small_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the shape "small" to those of the bench, and let the bench neither rest nor repeat."""
    monkeypatch.setitem(hollow.SHAPES, "small", small())
    monkeypatch.setattr(bench, "REST", 0.0)
    monkeypatch.setattr(figures, "REPEATED", 0.0)
