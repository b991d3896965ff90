"""An option of the GPU tests: launches other than the rules'."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from thor_dflash.plugins.launch import CallSite, Choice, Device
from thor_dflash.plugins.registry import KERNELS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--launches", choices=("rules", "other"), default="rules",
                     help="other: every call by a candidate of its rule that is not the rule's, as "
                     "a tuning might choose it")  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def launches(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.config.getoption("launches", "rules") == "rules":
        yield
        return
    chosen, found = Device.choice, dict[tuple[str, int], Choice | None]()

    def other(self: Device, site: CallSite) -> Choice | None:
        at = site.key, self.multiprocessors
        if at not in found:
            _, *others = KERNELS[site.op.name].candidates(site, self, None) or [None]
            found[at] = others[int(site.key, 16) % len(others)] if others else None
        return chosen(self, site) or found[at]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "choice", other)
        yield
