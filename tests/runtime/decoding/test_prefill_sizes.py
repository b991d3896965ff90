"""Packages with prefill steps of several sizes: whichever is chosen, the answers are the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.checkpoints import DrafterGeometry, write_drafter, write_target
from support.loop_models import SHORT, answer, prompt

from thor_dflash.builders.build import build
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter
from thor_dflash.runtime.engines.ort import OrtEngine
from thor_dflash.runtime.engines.protocol import Call
from thor_dflash.runtime.session import Request, Session, open_session
from thor_dflash.runtime.session.prefix_cache import PrefixCache

SIZES = (32, 8, 100)
LONG = prompt(300, 5)


def written(root: Path, **config: object) -> Path:
    write_target(root / "target", SHORT, 3)
    write_drafter(root / "drafter", SHORT, DrafterGeometry(taps=(0, 1)), 4)
    wanted = BuildConfig(chunk=32, capacity=384, **config)  # type: ignore[arg-type]
    build(root / "target", root / "drafter", root / "package", wanted, Silent())
    return root / "package"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("chunks"), chunks=(8, 100), widths=(8,))


@pytest.fixture(scope="module")
def every(package: Path) -> Session:
    return open_session(package, EngineConfig(threads=1), Silent(), choose=True)


def test_every_size_gives_the_same_tokens(every: Session) -> None:
    request = Request(prompt=LONG[:207], max_tokens=20)
    assert every.model.chunks == SIZES
    reported: list[list[int]] = []
    for size in SIZES:
        every.model.chunk = size
        assert answer(every, request, DflashDrafter()) == answer(every, request, NoDrafter())
        chunks = list(every.run(request, NoDrafter()))
        reported.append([token for chunk in chunks for token in chunk.tokens])
        done = [chunk.prompt_done for chunk in chunks if chunk.prompt_done]
        assert done == [*range(size, 206, size), 206], size
    assert reported[0] == reported[1] == reported[2]


@pytest.mark.parametrize("length", [1, 8, 9, 32, 33, 100, 108, 233])
def test_the_rest_of_a_prompt_is_read_by_the_smallest_step_that_holds_it(
    every: Session, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    model = every.model
    model.chunk, every.prefixes = 100, PrefixCache(model)
    names = {id(graph): name for name, graph in model.graphs.items()}
    ran: list[str] = []
    run = OrtEngine.run

    def seen(engine: OrtEngine, calls: Sequence[Call]) -> None:
        ran.extend(names[id(call.graph)] for call in calls)
        run(engine, calls)

    monkeypatch.setattr(OrtEngine, "run", seen)
    request = Request(prompt=LONG[: length + 1], max_tokens=1)
    rows = [c.prompt_rows for c in every.run(request, DflashDrafter()) if c.prompt_done]
    rest = length % 100
    assert rows == [100] * (length // 100) + [n for n in (8, 32, 100) if n >= rest][:1] * (rest > 0)
    for step in ("prefill", "observe_chunk"):
        assert [name for name in ran if name.startswith(step)] == [
            model.sized(step, n) for n in rows
        ]


def test_caches_and_rings_have_space_for_the_largest(every: Session) -> None:
    """With a full context, the padding rows that a prefill step writes past the end of the prompt
    must not overwrite a row that is still visible.
    """
    limit = every.model.limit
    request = Request(prompt=prompt(limit - 60, 6), max_tokens=60)
    reported: list[tuple[object, object]] = []
    for size in SIZES:
        every.model.chunk = size
        reported.append((answer(every, request, DflashDrafter()), every.report().spec))
    assert reported[0] == reported[1] == reported[2]
    for name, tensor in every.model.state.tensors.items():
        if name.startswith("attention."):
            assert tensor.spec.at({})[1] >= limit + max(SIZES), name
    for i, layer in enumerate(every.manifest.drafter.layers if every.manifest.drafter else ()):
        rows = every.model.state.tensors[f"drafter.{i}.k"].spec.at({})[1]
        assert rows == (min(layer.window, limit) if layer.window else limit) + max(SIZES)


@pytest.mark.parametrize("size", SIZES)
def test_a_prefix_is_kept_in_steps_of_the_size_that_was_chosen(every: Session, size: int) -> None:
    every.model.chunk = size
    every.prefixes = PrefixCache(every.model)
    request = Request(prompt=LONG[:290], max_tokens=24)
    truth, spec = answer(every, request, DflashDrafter()), every.report().spec
    put = every.prefixes.put("skills", LONG[:250])
    assert put
    assert put.held == 249 // size * size
    assert answer(every, request, DflashDrafter()) == truth
    assert every.report().usage.cached_tokens == put.held
    assert every.report().spec == spec, "the rings are the same, too"
