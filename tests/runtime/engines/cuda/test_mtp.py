"""The MTP drafter on the CUDA engine, on the emulator: its answer is the plain one, bit for bit,
and it drafts what ONNX Runtime drafts.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from stand_ins.emulated_driver import emulate
from support.checkpoints import write_target
from support.engine_pair import BUILD, DEVICE, TARGET, opened
from support.loop_models import ForcedRuns, RecordedMtp, answer, prompt

from thor_dflash.builders.build import build
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.decode import SamplingConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.draft_chooser import DraftChooser
from thor_dflash.runtime.decoding.lookup import LookupTexts
from thor_dflash.runtime.decoding.mtp import MtpDrafter
from thor_dflash.runtime.decoding.proposers import NoDrafter
from thor_dflash.runtime.session import Request

ONE = Request(prompt=prompt(60, seed=1), max_tokens=12)
DRAWN = replace(ONE, sampling=SamplingConfig(temperature=1.0, seed=11))
RUNS = ForcedRuns({3: (9, 8, 7), 8: (5,)})


@pytest.mark.slow
def test_its_answer_is_the_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_target(tmp_path / "target", replace(TARGET, mtp=True), 3, "mixed")
    config = BuildConfig(**{**BUILD, "widths": (), "chunks": ()})  # type: ignore[arg-type]
    for engine in ("ort", "cuda"):
        own = replace(config, engine=engine)
        build(tmp_path / "target", "mtp", tmp_path / engine, own, Silent())
    emulate(monkeypatch, DEVICE)
    with closing(opened(tmp_path / "cuda", 0)) as s:
        truth = answer(s, ONE, NoDrafter(), (RUNS,))
        drafter = RecordedMtp()
        assert answer(s, ONE, drafter, (RUNS,)) == truth
        assert answer(s, DRAWN, MtpDrafter()) == answer(s, DRAWN, NoDrafter())
        texts = LookupTexts(session=((*ONE.prompt[-4:], *truth),))
        beside = DraftChooser(MtpDrafter(), ONE.prompt, lambda: texts)
        assert answer(s, ONE, beside, (RUNS,)) == truth
    with closing(opened(tmp_path / "ort", 0)) as s:
        theirs = RecordedMtp()
        answer(s, ONE, theirs, (RUNS,))
    ours = {tuple(before): drafts for before, drafts, _ in drafter.blocks}
    pairs = [(ours.get(tuple(before)), drafts) for before, drafts, _ in theirs.blocks]
    same = sum(a == b for a, b in pairs if a)
    assert same >= 0.7 * len(pairs), pairs
