"""Full-size packages of random weights on a GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from thor_dflash.builders.synthetic import write_synthetic
from thor_dflash.cli.commands.bench import CAPACITY, hollow, variants
from thor_dflash.config.tree import Config
from thor_dflash.core.progress import Progress as Reporter
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.measure.cuda_bench import CudaBench, open_bench
from thor_dflash.runtime.measure.random_weights import RandomWeights


@contextmanager
def opened(
    shape: str, reduced: bool, reporter: Reporter, *, mtp: bool = False, block: int = 0
) -> Iterator[CudaBench]:
    """An open package of random weights; with `mtp` its drafter is the target's MTP layer. `block`:
    rows of a verify, 0 for the drafter's.
    """
    variant = next(variants(Config(), ablations=False))
    own = replace(variant.build, engine="cuda", vision="off", block=block)
    variant = replace(variant, build=own)
    cubins = variant.engine.cubins_directory
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        if reduced:
            made = hollow(shape, out, variant, mtp=mtp)
        else:
            made = write_synthetic(shape, out, variant.build, mtp=mtp)
        fill = RandomWeights(out, cubins)
        with closing(CudaEngine(out, variant.engine, reporter, fill)) as engine:
            yield open_bench(engine, made, CAPACITY, (), cubins)
