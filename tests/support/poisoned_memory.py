"""Memory of the CUDA engine that begins as NaN."""

from __future__ import annotations

import pytest

from thor_dflash.runtime.engines.cuda.arena import ALIGNMENT
from thor_dflash.runtime.engines.cuda.engine import CudaEngine, Offsets


def poison(patch: pytest.MonkeyPatch) -> None:
    """Fill the memory of every engine opened from now on with NaN: state, caches, rows, rings,
    scratch, and weights until they are loaded. Only the control page and the counters of arrivals
    may rely on an engine's memory being zero when it opens.
    """
    place = CudaEngine._place

    def poisoned(engine: CudaEngine, base: int, found: Offsets) -> None:
        engine.driver("cuMemsetD8", base, 0xFF, engine._arena.nbytes)
        engine.driver("cuMemsetD8", base + found.page, 0, engine._page.bytes.nbytes)
        for counters in found.zeroed.values():
            engine.driver("cuMemsetD8", base + counters, 0, ALIGNMENT)
        place(engine, base, found)

    patch.setattr(CudaEngine, "_place", poisoned)
