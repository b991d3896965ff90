"""What several tests of engines share."""

from __future__ import annotations

import pytest
from benching import small

from thor_dflash.builders import hollow
from thor_dflash.runtime.engines.cuda import bench, figures


@pytest.fixture
def small_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape "small", measured as often as it must be and no longer."""
    monkeypatch.setitem(hollow.SHAPES, "small", small())
    monkeypatch.setattr(bench, "REST", 0.0)
    monkeypatch.setattr(figures, "REPEATED", 0.0)
