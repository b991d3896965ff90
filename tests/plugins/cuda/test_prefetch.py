"""How much of the next product's weight the blocks of a launch prefetch."""

from __future__ import annotations

import pytest

from thor_dflash.core.tensors import DType
from thor_dflash.plugins import GDN
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.launch import (
    MOST_PREFETCHED,
    PREFETCHED,
    CallSite,
    Int,
    Pointer,
    Shaped,
    prefetch_next,
)


@pytest.mark.parametrize(
    ("nbytes", "blocks", "each"),
    [
        (None, 7, 0),
        (4096, 4, 1024),
        (1000, 7, 128),  # of 142: the hardware prefetches units of 16 bytes
        (MOST_PREFETCHED + 4096, 16, MOST_PREFETCHED // 16),
    ],
)
def test_every_block_prefetches_an_equal_part_of_what_the_cache_holds(
    nbytes: int | None, blocks: int, each: int
) -> None:
    ports = {} if nbytes is None else {PREFETCHED: Shaped(DType.U8, (nbytes,))}
    assert prefetch_next(CallSite(GDN, Attributes({}), ports), blocks) == (
        Pointer(PREFETCHED),
        Int(each),
    )
