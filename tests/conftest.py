"""What every test shares: reproducible hypothesis, and a skip where a device is missing."""

from __future__ import annotations

import shutil

import pytest
from hypothesis import settings

# Derandomised: the same tests on every machine. No deadline: two shared cores say nothing of speed.
settings.register_profile("house", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("house")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("nvidia-smi") is not None:
        return
    for item in items:
        for name in ("gpu", "thor"):
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=f"needs a device ({name})"))
