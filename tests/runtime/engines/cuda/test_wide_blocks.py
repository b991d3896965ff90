"""A verify wider than a DFlash2 drafter's block on the CUDA engine, on the emulator."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from stand_ins.emulated_driver import emulate
from support.checkpoints import write_drafter, write_target
from support.engine_pair import BUILD, DEVICE, SECOND, TARGET, opened
from support.loop_models import ForcedRuns, answer, prompt

from thor_dflash.builders.build import build
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.decode import SamplingConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.draft_chooser import DraftChooser
from thor_dflash.runtime.decoding.lookup import LookupTexts
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter
from thor_dflash.runtime.session import Request

ONE = Request(prompt=prompt(40, seed=1), max_tokens=24)
DRAWN = replace(ONE, sampling=SamplingConfig(temperature=1.0, seed=11))
RUNS = ForcedRuns({3: (9, 8, 7, 6, 5, 4, 3)})


@pytest.mark.slow
def test_a_text_goes_on_behind_the_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_target(tmp_path / "target", TARGET, 3, "mixed")
    write_drafter(tmp_path / "drafter", TARGET, SECOND, 4, "modelopt")
    own = {**BUILD, "widths": (), "chunks": (), "engine": "cuda", "block": 16}
    config = BuildConfig(**own)  # type: ignore[arg-type]
    build(tmp_path / "target", tmp_path / "drafter", tmp_path / "cuda", config, Silent())
    emulate(monkeypatch, DEVICE)
    with closing(opened(tmp_path / "cuda", 0)) as s:
        for asked in (ONE, DRAWN):
            truth = answer(s, asked, NoDrafter(), (RUNS,))
            text = (*ONE.prompt[-4:], *truth)
            chooser = DraftChooser(
                DflashDrafter(), ONE.prompt, lambda text=text: LookupTexts(session=(text,))
            )
            assert answer(s, asked, chooser, (RUNS,)) == truth
            assert any(one.tail and one.tail.accepted for one in s.report().drafts)
