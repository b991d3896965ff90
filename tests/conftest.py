"""Settings for all tests: hypothesis is reproducible, and tests that need a device are deselected
where there is none.
"""

from __future__ import annotations

import gc
import shutil
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# What a shell starts in the background ignores Ctrl-C, and so do commands that tests start there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ("support.bench_fixtures", "support.cpu_seconds", "support.serving_fixtures")

# Derandomised: the same examples on every machine. No deadline: on a busy machine a slow example
# is no error.
settings.register_profile("house", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("house")

DEVICE = shutil.which("nvidia-smi") is not None
collect_ignore = [] if DEVICE else ["gpu"]
"""Only saves the time of collecting them: a folder given to pytest by name is collected."""

# What collecting makes lives as long as the process: no search for garbage need visit it.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def no_power_cut() -> Iterator[None]:
    """No test cuts the power, so none waits for the disk: a package syncs sixty files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda file: None)
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    devices = {item for item in items if any(map(item.get_closest_marker, ("gpu", "thor")))}
    if devices and not DEVICE:
        config.hook.pytest_deselected(items=list(devices))
        items[:] = [item for item in items if item not in devices]
