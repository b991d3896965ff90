"""Images on a device: the tower gives what ONNX Runtime gives, and the laws hold bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.engine_pair import DRAFTER, SEEING, opened, packages
from support.loop_models import answer, erring

from thor_dflash.calib.studies.pictures import measure
from thor_dflash.config.decode import SamplingConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter
from thor_dflash.runtime.session import Request, Session, open_session
from thor_dflash.runtime.session.turn_cache import Conversation
from thor_dflash.runtime.vision.picture import Picture

pytestmark = pytest.mark.gpu

TOWER = 0.03
"""As in tests/runtime/vision/test_cuda.py."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packages(tmp_path_factory.mktemp("seeing"), DRAFTER, SEEING)


@pytest.fixture(scope="module")
def session(root: Path) -> Iterator[Session]:
    with closing(open_session(root / "cuda", EngineConfig(), Silent(), reuse=64 << 20)) as found:
        yield found


def pictures(count: int) -> list[Picture]:
    rng = np.random.default_rng(4)
    sizes = ((6, 8), (12, 12), (2, 2), (4, 10))
    return [
        Picture(rng.integers(0, 256, (16 * rows, 16 * columns, 3), dtype=np.uint8))
        for rows, columns in sizes[:count]
    ]


def asked(s: Session, count: int, sampling: SamplingConfig | None = None) -> Request:
    rng = np.random.default_rng(count)
    ids: list[int] = rng.integers(0, 240, 11).tolist()
    for _ in range(count):
        ids += [240, 241, 242, *rng.integers(0, 240, 2).tolist()]
    images = s.images(ids, pictures(count))
    assert images
    end = Conversation(boundaries=((len(images.prompt), "prompt"),))
    drawn = sampling or SamplingConfig()
    return Request(
        prompt=images.prompt, max_tokens=16, images=images, conversation=end, sampling=drawn
    )


def test_the_tower_gives_what_onnx_runtime_gives(root: Path, session: Session) -> None:
    with closing(opened(root / "ort")) as other:
        for shown in pictures(4):
            want = other.model.encode(shown).astype(np.float64)
            off = session.model.encode(shown).astype(np.float64) - want
            assert np.sqrt(np.mean(off**2)) <= TOWER * np.sqrt(np.mean(want**2))


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_any_drafter_gives_the_plain_answer(session: Session, count: int, drawn: bool) -> None:
    request = asked(session, count, SamplingConfig(temperature=0.9, seed=3) if drawn else None)
    truth = answer(session, request, NoDrafter())
    for proposer in (DflashDrafter(), erring(truth, 0.3, 1)):
        assert answer(session, request, proposer) == truth


def test_a_turn_reused_gives_what_an_empty_session_gives(root: Path, session: Session) -> None:
    with closing(open_session(root / "cuda", EngineConfig(), Silent())) as empty:
        for count in (2, 3, 4):
            request = asked(session, count)
            assert request.images
            fresh = replace(request, images=replace(request.images, encoded={}, encode_ms={}))
            got = answer(session, request, DflashDrafter())
            assert got == answer(empty, fresh, DflashDrafter())


def test_a_planner_with_eyes_needs_its_own_picture() -> None:
    _, *rows = measure(Path("models/planner-nano-eyes"), "cuda", 30)["pictures"]
    own, *others = (float(str(row[-2])) for row in rows if row[1] == "on")
    assert own >= 95
    assert max(others) <= 60
