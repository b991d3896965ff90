"""Kernels that fetch the weight of the next product while they leave memory idle."""

from __future__ import annotations

import pytest
from emulation import COMPILER, Emulator, EmulatorFault
from fetching import PACKED, fetching, of_few_rows
from kernels import launch
from row_law import same_bits

from thor_dflash.plugins import GDN, VERIFY_ATTENTION, Op
from thor_dflash.plugins.gdn import launch as gdn
from thor_dflash.plugins.launch import MOST_AHEAD, THOR, At, Int, ahead

emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")
rooms = pytest.mark.parametrize("op", [GDN, VERIFY_ATTENTION], ids=lambda op: op.name)


@emulated
@rooms
def test_nothing_else_changes(op: Op) -> None:
    for call in list(of_few_rows(op).values())[:3]:
        alone = launch(call, Emulator(1), THOR)
        got = launch(fetching(call), Emulator(1), THOR)
        same_bits(got, alone)


@emulated
def test_no_byte_beyond_the_weight_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    call = next(iter(of_few_rows(GDN).values()))
    launch(fetching(call), Emulator(0), THOR)

    def more(site: object, blocks: int) -> tuple[At, Int]:
        return At("next_packed"), Int((PACKED // blocks // 16 + 1) * 16)

    monkeypatch.setattr(gdn, "ahead", more)
    with pytest.raises(EmulatorFault, match="prefetch"):
        launch(fetching(call), Emulator(0), THOR)


@rooms
def test_blocks_share_the_weight(op: Op) -> None:
    call = next(iter(of_few_rows(op).values()))
    assert ahead(call.site, 128) == (At("next_packed"), Int(0))
    for nbytes, share in ((100, 0), (128 * 31, 16), (MOST_AHEAD + 1, 196_608)):
        site = fetching(call, nbytes).site
        assert ahead(site, 128) == (At("next_packed"), Int(share))
    assert MOST_AHEAD == 128 * 196_608
