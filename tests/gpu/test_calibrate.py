"""`calibrate --package` on a device."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.planner_nano import package, tasks

from thor_dflash.calib.calibrate.package_statistics import observer
from thor_dflash.calib.quantize.statistics import Statistics, read_statistics
from thor_dflash.cli import main
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.session import open_session

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(tmp_path_factory.mktemp("cuda") / "nano", engine="cuda")


def statistics(path: Path, folder: Path) -> Statistics:
    prompts, out = folder / "p.jsonl", folder / "s.safetensors"
    chats = [[{"role": r, "content": c} for r, c in task.messages] for task in tasks()[:8]]
    prompts.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    args = ["calibrate", "--package", str(path), "--prompts", str(prompts), "--out", str(out)]
    assert main.main([*args, "--set", "calibrate.context=101"]) == 0
    return read_statistics(out)


def test_a_device_has_the_statistics_of_onnx_runtime(made: Path, tmp_path: Path) -> None:
    """Both keep bfloat16 rows and an FP8 cache. Limits: thrice what that changes of float32."""
    have = statistics(made, tmp_path)
    want = statistics(package(tmp_path / "ort"), tmp_path)
    assert have.metadata["tokens"] == want.metadata["tokens"] == "808"
    assert have.metadata["model"] == want.metadata["model"]
    assert have.metadata["engine"].startswith("cuda")
    assert list(have.inputs) == list(want.inputs)
    for name, one in want.inputs.items():
        found = have.inputs[name]
        np.testing.assert_allclose(found.energy, one.energy, rtol=0.3, err_msg=name)
        assert found.energy.sum() == pytest.approx(one.energy.sum(), rel=0.004), name
        assert found.amax == pytest.approx(one.amax, rel=0.09), name
    assert list(have.cache) == list(want.cache)
    for layer, cache in want.cache.items():
        np.testing.assert_allclose(have.cache[layer].k_amax, cache.k_amax, rtol=0.01)
        np.testing.assert_allclose(have.cache[layer].v_amax, cache.v_amax, rtol=0.01)
        assert have.cache[layer].v_rms == pytest.approx(cache.v_rms, rel=1e-3)


def test_steps_in_ranges_leave_the_state_of_a_replayed_graph(made: Path) -> None:
    """All blocks but one run in ranges, each range captured once and run at both places of a
    state; the logits of all blocks are those of blocks that ran whole.
    """
    tokens = [int(t) for t in np.random.default_rng(1).integers(0, 500, 96)]
    logits: list[list[np.ndarray]] = []
    for ranges in (False, True):
        with closing(open_session(made, EngineConfig(), Silent())) as session:
            model, found = session.model, list[np.ndarray]()
            show = observer(made, model.engine)
            for at in range(0, len(tokens), model.block):
                model.write_tokens(tokens[at : at + model.block])
                if ranges and at // model.block != 2:
                    model.verify(lambda call, show=show: [None for _ in show.run(call)])
                else:
                    model.verify()
                found.append(model.read("logits"))
                model.state.commit(model.block - 3 * (at == 0))
            logits.append(found)
    for i, (whole, parts) in enumerate(zip(*logits, strict=True)):
        np.testing.assert_array_equal(parts, whole, err_msg=f"block {i}")
