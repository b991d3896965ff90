"""Blocks of fewer rows from the same package: the same tokens, and the same logits bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import GEOMETRIES, Dialect, DrafterGeometry, write_drafter, write_target
from support.coverings import some
from support.loop_models import answer, erring, prompt, session

from thor_dflash.builders.build import build
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter
from thor_dflash.runtime.measure.score import score
from thor_dflash.runtime.session import Request, Session, open_session

WIDTHS = (4, 8, 12)


def package(root: Path, geometry: str, dialect: Dialect = "bf16", **config: object) -> Path:
    g = GEOMETRIES[geometry]
    write_target(root / "target", g, 3, dialect)
    write_drafter(root / "drafter", g, DrafterGeometry(), 4)
    wanted = BuildConfig(chunk=32, capacity=512, widths=WIDTHS, **config)  # type: ignore[arg-type]
    build(root / "target", root / "drafter", root / "package", wanted, Silent())
    return root / "package"


def opened(path: Path, width: int = 0) -> Session:
    return open_session(path, EngineConfig(threads=1, block=width), Silent())


Widths = dict[int, Session]
"""Width of a block, in rows -> a session of the same package; 0: the package's own width."""


CASES = [
    pytest.param(("gqa2", "bf16"), marks=pytest.mark.slow, id="gqa2-bf16"),
    ("27b", "modelopt"),
    pytest.param(("heads27b", "bf16"), marks=pytest.mark.slow, id="heads27b-bf16"),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(tmp_path_factory.mktemp("widths"), *request.param)


@pytest.fixture(scope="module")
def widths(built: Path) -> Iterator[Widths]:
    found = {width: opened(built, width) for width in (0, *WIDTHS)}
    yield found
    for one in found.values():
        one.close()


def test_a_row_does_not_know_the_width_of_its_block(widths: Widths) -> None:
    tokens = prompt(180, 1)  # more than a tile of keys
    want = score(widths[0], tokens, True, Silent())
    for width in WIDTHS:
        got = score(widths[width], tokens, True, Silent())
        for name in want:
            assert np.array_equal(got[name], want[name]), (width, name)


@pytest.mark.parametrize(
    ("geometry", "block"), some([("27b", 6), ("4b", 7)], [("27b", 6)], pytest.mark.slow)
)
def test_a_row_does_not_know_its_place_in_a_block_of_any_size_that_is_built(
    geometry: str, block: int
) -> None:
    tokens = prompt(200, 3, GEOMETRIES[geometry].vocab)
    want = score(session(geometry), tokens, True, Silent())
    got = score(session(geometry, block=block), tokens, True, Silent())
    for name in want:
        assert np.array_equal(got[name], want[name]), name


@pytest.mark.slow
def test_every_width_gives_the_same_tokens(widths: Widths) -> None:
    # The answer crosses position 128, where a second tile of keys begins and the rings of the
    # drafter's sliding layers wrap around.
    request = Request(prompt=prompt(100, 2), max_tokens=48)
    truth = answer(widths[0], request, NoDrafter())
    for width in WIDTHS:
        s = widths[width]
        assert s.model.block == width
        assert s.model.limit == widths[0].model.limit
        assert answer(s, request, NoDrafter()) == truth
        assert answer(s, request, DflashDrafter()) == truth
        assert answer(s, request, erring(truth, 0.1, width)) == truth
        hist = s.report().spec.accept_hist
        assert len(hist) == width
        assert hist[-1] > 0


def test_a_width_the_package_has_not(built: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.block must be 4 or 8 or 12 or 16.*\(got 6\)"):
        opened(built, 6)
