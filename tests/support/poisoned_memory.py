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
        engine.driver("cuMemsetD8", base, 0xFF, engine.tensors.arena.nbytes)
        engine.driver("cuMemsetD8", base + found.page, 0, engine.tensors.page.bytes.nbytes)
        launches = (one for bound in engine.replay.bound.values() for one in bound.launches)
        for offset in {at for one in launches for at in one.counters.values()}:
            engine.driver("cuMemsetD8", base + offset, 0, ALIGNMENT)
        place(engine, base, found)

    patch.setattr(CudaEngine, "_place", poisoned)
