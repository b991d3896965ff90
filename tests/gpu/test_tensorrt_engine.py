"""The TensorRT engine on the GPU. A stand-in of TensorRT calls the plugins in order."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from stand_ins import tensorrt_module as trt
from support.planner_nano import package, request
from support.trt_packages import planned

from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.plugins.cuda.driver import Driver
from thor_dflash.plugins.tensorrt.node import fingerprint
from thor_dflash.runtime.engines.tensorrt.compatibility import RuntimeFacts
from thor_dflash.runtime.session import open_session

pytestmark = pytest.mark.gpu
TOKENS = 96


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> RuntimeFacts:
    trt.stand_in(monkeypatch)
    driver = Driver()
    info = driver.info
    driver.close()
    return RuntimeFacts(
        trt.__version__,
        info.name,
        info.device.capability,
        info.device.multiprocessors,
        fingerprint(),
    )


def answers(out: Path, cubins: Path, *, graphs: bool = True) -> list[list[int]]:
    config = EngineConfig(cubins=str(cubins), graphs=graphs)
    with closing(open_session(out, config, Silent())) as s:
        return [
            [token for chunk in s.generate(request(s, index, TOKENS)) for token in chunk.tokens]
            for index in (0, 1, 2, 0)
        ]


def test_it_answers_as_the_cuda_engine_does(here: RuntimeFacts, tmp_path: Path) -> None:
    """Same kernels, same weights: every token is equal, with graphs and without."""
    cubins = tmp_path / "cubins"
    out = package(tmp_path / "nano", engine="cuda")
    want = answers(out, cubins)
    planned(out, here)
    assert answers(out, cubins) == want
    assert answers(out, cubins, graphs=False) == want
    assert want[0] == want[3]
