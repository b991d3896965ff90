"""The CUDA engine with a fake driver: what can be tested without a device."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from stand_ins.fake_driver import FACTS, MEMORY, FakeCuda, fake
from support.planner_nano import package, request

from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import EngineError
from thor_dflash.core.progress import Silent
from thor_dflash.package import manifest
from thor_dflash.plugins.gdn import launch as gdn
from thor_dflash.runtime.decoding.draft_chooser import DraftChooser
from thor_dflash.runtime.decoding.lookup import LookupTexts
from thor_dflash.runtime.decoding.proposers import DflashDrafter
from thor_dflash.runtime.engines.cuda.arena import RESERVE
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.session import Session, open_session


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(tmp_path_factory.mktemp("cuda") / "nano", engine="cuda")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return fake(monkeypatch)


def cycles(s: Session, count: int) -> int:
    """Number of cycles of a request; with this driver each commits one token."""
    return sum(bool(chunk.tokens) for chunk in s.run(request(s, 0, count), DflashDrafter()))


def test_each_engine_of_a_thread_works_in_its_own_context(made: Path, device: FakeCuda) -> None:
    with (
        closing(open_session(made, EngineConfig(), Silent())) as one,
        closing(open_session(made, EngineConfig(), Silent())) as two,
    ):
        for _ in range(3):
            assert cycles(one, 4) == cycles(two, 4) == 4
    assert device.contexts == 2


def test_a_step_is_captured_once(made: Path, device: FakeCuda) -> None:
    with closing(open_session(made, EngineConfig(), Silent())) as s:
        cycles(s, 9)
        cycles(s, 9)
        captured = len(device.graphs)
        taken = device.taken
        for _ in range(20):
            cycles(s, 9)
        assert (len(device.graphs), device.taken) == (captured, taken)
        assert captured == 2  # a prefill step and a cycle


def test_a_lookup_cycle_is_one_graph_without_the_drafter(made: Path, device: FakeCuda) -> None:
    with closing(open_session(made, EngineConfig(), Silent())) as s:
        asked = request(s, 0, 9)
        tokens = [t for chunk in s.run(asked, DflashDrafter()) for t in chunk.tokens]
        before = [*device.graphs]
        texts = LookupTexts(session=((*asked.prompt[-8:], *tokens, *[1] * 16),))
        proposer = DraftChooser(DflashDrafter(), asked.prompt, lambda: texts)
        assert [t for chunk in s.run(asked, proposer) for t in chunk.tokens] == tokens
        assert {*s.report().spec.sources} == {"drafter", "session"}
        engine = s.model.engine
        assert isinstance(engine, CudaEngine)
        skipped = engine.launches([s.model.call("propose")])
        assert device.graphs == [*before, before[-1] - skipped]


def test_a_kernel_without_the_shift_of_its_states_is_refused(
    made: Path, device: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gdn, "_OFFSETS", gdn._OFFSETS[:1])
    with pytest.raises(EngineError, match=r"layers\.0\.linear_attn: .*record_qkv"):
        open_session(made, EngineConfig(), Silent())


def test_what_a_kernel_may_have_changed_is_sent_again(made: Path, device: FakeCuda) -> None:
    with closing(open_session(made, EngineConfig(), Silent())) as s:
        engine, call = s.model.engine, s.model.call("propose")
        for tensor, copies in ((call.outputs["tokens"], 2), (call.inputs["last"], 1)):
            engine.read(tensor)
            device.sent.clear()
            for _ in range(2):
                engine.write(tensor, np.full(tensor.spec.at({}), 7, np.int32))
                engine.read(tensor)
            assert len(device.sent) == copies, tensor.spec.name


def test_what_does_not_fit_is_refused_before_it_is_allocated(made: Path, device: FakeCuda) -> None:
    device.taken = MEMORY - (260 << 20)
    with pytest.raises(EngineError, match=r"the package must fit .*build with fewer bits"):
        open_session(made, EngineConfig(), Silent())
    assert "cuMemAlloc" not in device.calls


def test_a_context_that_does_not_fit_is_refused_with_one_that_does(
    made: Path, device: FakeCuda
) -> None:
    longest = manifest.read(made).target.max_position
    with closing(open_session(made, EngineConfig(capacity=longest), Silent())):
        most = device.taken
    device.taken = 0
    with closing(open_session(made, EngineConfig(capacity=longest // 2), Silent())):
        least = device.taken
    device.taken = MEMORY - (most + least) // 2 - RESERVE
    with pytest.raises(EngineError, match=rf"engine\.capacity from {longest} to ") as e:
        open_session(made, EngineConfig(capacity=longest), Silent())
    fits = int(str(e.value).rpartition(" to ")[2].partition(":")[0])
    assert longest // 2 <= fits < longest
    open_session(made, EngineConfig(capacity=fits), Silent()).close()


@pytest.mark.parametrize(("shared", "layer"), [(49152, 0), (101376, 3)])
def test_a_device_with_too_little_shared_memory_is_refused(
    made: Path, device: FakeCuda, monkeypatch: pytest.MonkeyPatch, shared: int, layer: int
) -> None:
    """With 48 KB not even two stages of a linear fit. With 99 KB linears do with fewer stages, but
    the attention in layer 3 does not fit.
    """
    facts = {**FACTS, "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": shared}
    monkeypatch.setattr(device, "CUdevice_attribute", SimpleNamespace(**facts))
    wrong = rf"\w+: layers\.{layer}\..*: shared memory .* must be at most {shared} bytes .* \(got"
    with pytest.raises(EngineError, match=wrong):
        open_session(made, EngineConfig(), Silent())
