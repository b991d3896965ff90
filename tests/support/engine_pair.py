"""Runs a small model on the CUDA engine, on the emulator, and on ONNX Runtime, and compares."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from stand_ins.emulated_driver import EmulatedCuda, emulate
from support.checkpoints import (
    PREFIXES,
    DrafterGeometry,
    TargetGeometry,
    TowerGeometry,
    read_config,
    write_drafter,
    write_target,
)

from thor_dflash.builders import build as builder
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins import ACCEPT
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.launch import Device
from thor_dflash.runtime.decoding.block import Block
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.engines.cuda.binding import cuda
from thor_dflash.runtime.session import Session, open_session

TARGET = TargetGeometry(
    hidden=128, intermediate=192, layers=3, interval=3, heads=2, kv_heads=1, head_dim=256,
    rotary=64, key_heads=1, value_heads=2, key_dim=128, value_dim=128,
    mix="in_proj_z=fp8 k_proj=fp8 v_proj=bf16 =modelopt",
)  # fmt: skip
"""Two gdn layers and one of attention; the first product of each has NVFP4, FP8 and bf16 parts."""
DRAFTER = DrafterGeometry(taps=(0, 2), head_dim=32, intermediate=192)
DEVICE = Device((9, 0), 3)
"""So few multiprocessors that each cluster computes several items."""
BUILD = {
    "activations": "bf16", "kv": "fp8", "chunk": 48, "chunks": (32,), "capacity": 128,
    "widths": (8,),
}  # fmt: skip
NEAR = 0.04
"""Most difference, relative to the largest value: a row is rounded to bf16 some ten times."""
REGRET = 0.03
"""Most by which a chosen token's logit may be below the largest one of its row, relative to the
largest magnitude of all logits."""


SECOND = DrafterGeometry(
    taps=(0, 2), head_dim=32, intermediate=192, block=8, second=True,
    layer_types=("sliding_attention",) * 2,
)  # fmt: skip
"""A DFlash2 drafter."""


def built(root: Path, engine: str, name: str = "") -> Path:
    """Build the package of the checkpoints in `root` for an engine."""
    out = root / (name or engine)
    config = BuildConfig(engine=engine, **BUILD)  # type: ignore[arg-type]
    if read_config(root / "drafter")["dflash_config"]["block_size"] <= max(config.widths):
        config = replace(config, widths=())
    builder.build(root / "target", root / "drafter", out, config, Silent())
    return out


SEEING = replace(
    TARGET, tower=TowerGeometry(depth=1, longest=36864), wrapper=True, prefix=PREFIXES[0]
)
"""With a vision tower, for images of up to 144 patches."""


def packages(
    root: Path, drafter: DrafterGeometry = DRAFTER, target: TargetGeometry = TARGET
) -> Path:
    """Write the checkpoints and build their packages for both engines, in `root`."""
    write_target(root / "target", target, 3, "mixed")
    write_drafter(root / "drafter", target, drafter, 4, "modelopt")
    built(root, "ort")
    built(root, "cuda")
    return root


@dataclass
class Pair:
    """The model on both engines, which are given the same work."""

    device: EmulatedCuda
    ours: ModelRunner
    """On the CUDA engine."""
    theirs: ModelRunner
    """On ONNX Runtime."""
    last: int = 7
    begun: tuple[Array, Array] | None = None
    """Tokens and logits of the first cycle."""
    agreed: list[bool] = field(default_factory=list[bool])
    """Of each cycle with a DFlash2 drafter, whether both engines drafted the same."""
    places: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    """State -> addresses at which it has lain."""

    def both(self) -> tuple[ModelRunner, ModelRunner]:
        return self.ours, self.theirs

    def prefill(self, tokens: list[int]) -> None:
        """One prefill step; its taps go into the drafter's rings too."""
        for model in self.both():
            model.prefill(tokens, observe=True)
        self.compare()

    def cycle(self, forced: list[int]) -> None:
        """One cycle, on the CUDA engine as one graph. Commits the forced rows and one row more."""
        ours, theirs = self.both()
        count = len(forced) + 1
        block = Block(cap=count, forced=tuple(forced), drafted=ours.block - 1)
        for model in self.both():
            model.write_last(self.last)
            model.write_first(0)
        before, after = (ours.call("propose"),), (ours.call("observe"),)
        record = ours.step(block, before, after, ())
        tokens = [int(t) for t in ours.read("tokens")]
        drafted = theirs.draft(block, (theirs.call("propose"),))
        self.hold_drafts(tokens, drafted, len(forced))
        theirs.write_tokens(tokens)
        theirs.step(block, (), (theirs.call("observe"),), ())
        self.hold_record(ours)
        near("taps", ours.read("taps"), theirs.read("taps"))
        logits, wanted = ours.read("logits"), theirs.read("logits")
        near("logits", logits, wanted)
        self.begun = self.begun or (np.array(tokens), logits)
        regret(logits.argmax(1), wanted)
        assert record.count == count
        for model in self.both():
            model.state.commit(count)
        self.last = record.tokens[-1]
        self.compare()

    def hold_drafts(self, tokens: list[int], others: tuple[int, ...], forced: int) -> None:
        """Our drafts must be the arg-max of our drafter's logits; by these logits, ONNX Runtime's
        drafts must be nearly as good. What a selector chooses is not seen in the logits.
        """
        if self.ours.manifest.drafter and self.ours.manifest.drafter.selector:
            assert tokens[: forced + 1] == list(others[: forced + 1])
            self.agreed.append(tokens == list(others))
            return
        logits = np.frombuffer(self.device.logits[0], np.float32).reshape(len(tokens), -1)
        free = range(forced + 1, len(tokens))
        assert [tokens[i] for i in free] == [int(logits[i].argmax()) for i in free]
        assert tokens[: forced + 1] == list(others[: forced + 1])
        regret(np.array([others[i] for i in free], np.int64), logits[forced + 1 :])

    def hold_record(self, model: ModelRunner) -> None:
        """The record must equal that of accept's reference for the same inputs."""
        call = model.call("accept")
        inputs = {name: model.engine.read(tensor) for name, tensor in call.inputs.items()}
        a = Attributes({"rows": model.block, "vocab": TARGET.vocab})
        want = ACCEPT.reference(inputs, a)["record"]
        np.testing.assert_array_equal(model.read("record"), want)

    def moved(self) -> set[str]:
        """States that a cycle cannot update in place."""
        names = self.ours.state.tensors
        return {n for n in names if n.startswith("gdn.") and not n.endswith(".state")}

    def compare(self) -> None:
        """Compare all states, and note where ours lie."""
        ours, theirs = (model.state.snapshot().arrays for model in self.both())
        assert ours.keys() == theirs.keys()
        for name, array in ours.items():
            near(name, array, theirs[name])
        for name, tensor in self.ours.state.tensors.items():
            self.places.setdefault(name, set()).add(cuda(tensor).now)


def near(name: str, have: Array, want: Array) -> None:
    """Differences must be at most NEAR of the largest value, and for FP8 one FP8 step more."""
    assert have.shape == want.shape, name
    step = np.abs(want.astype(np.float64)) / 8 * (want.dtype == DType.FP8.numpy)
    off = np.abs(have.astype(np.float64) - want.astype(np.float64)) - step
    scale = np.abs(want.astype(np.float64)).max(initial=0)
    print(f"{name}: {off.max():.4g} of {scale:.4g}")
    assert np.all(off <= NEAR * scale), f"{name}: off by {off.max():.4g}, largest is {scale:.4g}"


def regret(chosen: Array, logits: Array) -> None:
    """Each chosen id must be nearly the best of its row: see REGRET."""
    rows = logits.astype(np.float64)
    lost = rows.max(1, initial=-np.inf) - rows[np.arange(len(rows)), chosen]
    assert np.all(lost <= REGRET * np.abs(rows).max(initial=0)), lost


def opened(package: Path, block: int = 16) -> Session:
    return open_session(package, EngineConfig(threads=1, block=block), Silent())


@contextmanager
def paired(root: Path, block: int) -> Generator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        device = emulate(patch, DEVICE)
        with closing(opened(root / "cuda", block)) as a, closing(opened(root / "ort", block)) as b:
            yield Pair(device, a.model, b.model)
