"""Settings for all tests: hypothesis is reproducible, and tests that need a GPU are skipped where
there is none.
"""

from __future__ import annotations

import shutil

import pytest
from hypothesis import settings

pytest_plugins = ("support.bench_fixtures", "support.serving_fixtures")

# Derandomised: the same examples on every machine. No deadline: on a busy machine a slow example
# is no error.
settings.register_profile("house", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("house")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("nvidia-smi") is not None:
        return
    for item in items:
        for name in ("gpu", "thor"):
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=f"needs a device ({name})"))
