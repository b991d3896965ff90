"""Reuse between turns on a device: bits of an empty session, at nano's and at the 27B's sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from support.loop_models import answer
from support.planner_nano import package, request

from thor_dflash.builders.synthetic import write_synthetic
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.proposers import DflashDrafter
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.measure.random_weights import RandomWeights
from thor_dflash.runtime.session import Session, open_session
from thor_dflash.runtime.session.turn_cache import Conversation

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    made = package(tmp_path_factory.mktemp("cuda") / "nano", engine="cuda")
    config = EngineConfig(chunk=64)
    with closing(open_session(made, config, Silent(), reuse=64 << 20)) as opened:
        yield opened


def test_interleaved_conversations_give_the_bits_of_an_empty_session(nano: Session) -> None:
    turns = [request(nano, index, 24) for index in (0, 1)]
    empty = [answer(nano, one, DflashDrafter()) for one in turns]
    specs = [nano.report().spec]
    held = []
    for cut in (70, 40, 20, 1):
        for one, want in zip(turns, empty, strict=True):
            begun = replace(one, prompt=one.prompt[: len(one.prompt) - cut])
            conversation = Conversation(boundaries=((len(begun.prompt), "prompt"),))
            answer(nano, replace(begun, conversation=conversation), DflashDrafter())
            assert answer(nano, replace(one, conversation=conversation), DflashDrafter()) == want
            held.append(nano.report().usage.cached_tokens)
    assert nano.report().spec == specs[0]
    assert min(held) > 0
    assert nano.turns.totals.swapped_in > 0


SIZES = (512, 128, 64)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    folder, config = tmp_path_factory.mktemp("full"), EngineConfig()
    built = BuildConfig(engine="cuda", chunk=512, chunks=SIZES)
    made = write_synthetic("qwen3.6-27b", folder, built)
    with closing(
        CudaEngine(folder, config, Silent(), RandomWeights(folder, config.cubins_directory))
    ) as engine:
        yield ModelRunner(engine, made, 4096, made.block, SIZES)


def state(model: ModelRunner, cuts: Sequence[int]) -> dict[str, bytes]:
    ids = np.random.default_rng(5).integers(1, 200_000, 1024).tolist()
    model.state.reset()
    at = 0
    for count in cuts:
        model.prefill(ids[at : at + count], observe=True)
        at += count
    assert at == 1024
    return {name: array.tobytes() for name, array in model.state.snapshot().arrays.items()}


@pytest.mark.parametrize("cuts", [(128,) * 8, (64,) * 16, (512, 128, 64, 64, 128, 128)])
def test_how_a_prompt_is_cut_into_steps_of_64_rows_or_more_changes_no_bit(
    full: ModelRunner, cuts: tuple[int, ...]
) -> None:
    whole = state(full, (512, 512))
    got = state(full, cuts)
    assert {name for name in whole if got[name] != whole[name]} == set()
