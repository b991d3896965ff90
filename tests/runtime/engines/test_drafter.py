"""The drafter's graphs equal the plain drafter of tests/plain, and differ from wrong drafters.

The package's observe graphs fill the rings from given taps, and its propose graph reads them. Its
logits are added to the graph's outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from support.checkpoints import (
    GEOMETRIES,
    Dialect,
    DrafterGeometry,
    dequantised,
    read_config,
    write_config,
    write_drafter,
    write_target,
)
from support.reference_drafter import Rules, logits, rules

from thor_dflash.builders.build import build
from thor_dflash.config.build import BuildConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.model_runner import ring_rows
from thor_dflash.runtime.engines.onnxruntime_import import ort

Array = NDArray[Any]

SAME = 1e-5
"""Largest difference from the plain drafter, relative to the largest logit."""
DIFFERENT = 1e-2
"""Least difference from a wrong drafter, in the same unit."""
BLOCK, CHUNK, CAPACITY = 16, 40, 256
SLIDING, FULL = "sliding_attention", "full_attention"
ANCHOR = 7


ORDINARY = DrafterGeometry()


@dataclass(frozen=True, kw_only=True)
class DrafterKind:
    """A drafter checkpoint."""

    geometry: DrafterGeometry = ORDINARY
    target: str = "27b"
    dialect: Dialect = "bf16"
    target_dialect: Dialect = "bf16"
    changes: tuple[tuple[str, object], ...] = ()
    """Keys of its config.json that differ from the ordinary one."""


KINDS: dict[str, DrafterKind] = {
    "sliding, full": DrafterKind(),
    "27b's": DrafterKind(
        geometry=DrafterGeometry(
            layer_types=(SLIDING,) * 4 + (FULL,), heads=8, head_dim=16, taps=(0, 1, 2, 3)
        ),
        dialect="modelopt",
        target_dialect="modelopt",
    ),
    "window of one block": DrafterKind(
        geometry=DrafterGeometry(layer_types=(SLIDING, FULL, SLIDING), window=16, taps=(2,)),
        target="0.8b",
    ),
    "all full": DrafterKind(geometry=DrafterGeometry(layer_types=(FULL, FULL)), dialect="fp8"),
    "bidirectional": DrafterKind(changes=(("is_causal", False),)),
    "causal": DrafterKind(changes=(("is_causal", True),), dialect="compressed-tensors"),
}


@dataclass
class DrafterBench:
    """A package's drafter graphs, what the plain drafter needs, and one sequence's rings."""

    rules: Rules
    weights: dict[str, Array]
    embedding: Array
    head: Array
    graphs: dict[str, Any]
    windows: tuple[int, ...]
    width: int
    """Columns of a row of taps."""
    rings: dict[str, Array] = field(default_factory=dict[str, Array])
    first: int = 0
    """Number of context rows at the beginning that are never observed."""
    length: int = 0

    def clear(self, first: int = 0) -> None:
        """Begin an empty sequence. The content of the rings must not matter, so it is noise."""
        rng = np.random.default_rng(5)
        rows = [ring_rows(w, CAPACITY, BLOCK, CHUNK) for w in self.windows]
        heads, dim = self.rules.kv_heads, self.rules.head_dim
        self.rings = {
            f"drafter.{i}.{n}": 9 * rng.standard_normal((heads, size, dim)).astype(np.float32)
            for i, size in enumerate(rows)
            for n in "kv"
        }
        self.first = self.length = first

    def observe(self, taps: Array, graph: str = "observe") -> None:
        """Commit rows, at most those of one step; the other rows of the step are noise."""
        rows = {"observe": BLOCK, "observe_chunk": CHUNK}[graph]
        step = 9 * np.random.default_rng(6).standard_normal((rows, self.width)).astype(np.float32)
        step[: len(taps)] = taps
        got = self._run(graph, taps=step)
        self.rings = {name.removeprefix("next."): value for name, value in got.items()}
        self.length += len(taps)

    def fill(self, taps: Array, steps: Iterator[tuple[str, int]], first: int = 0) -> None:
        """Begin a sequence and commit all rows, by steps of (graph, number of rows)."""
        self.clear(first)
        while self.length < len(taps):
            graph, count = next(steps)
            self.observe(taps[self.length : self.length + count], graph)

    def propose(self, last: int = ANCHOR, forced: Sequence[int] = ()) -> tuple[Array, Array]:
        """Tokens [R] and the logits [R, V] behind them."""
        got = self._run(
            "propose",
            last=np.array([last], np.int32),
            forced=np.array([*forced, *[-1] * (BLOCK - len(forced))], np.int32),
        )
        return got["tokens"], got["head.logits"]

    def plain(self, taps: Array, rules: Rules | None = None) -> Array:
        """The logits [R, V] by the plain drafter."""
        return logits(rules or self.rules, self.weights, self.embedding, self.head, taps, ANCHOR)

    def _run(self, name: str, **given: Array) -> dict[str, Array]:
        graph = self.graphs[name]
        counters = {"length": self.length, "drafter.first": self.first}
        given |= {n: np.array([value], np.int32) for n, value in counters.items()} | self.rings
        given |= {
            f"drafter.{i}.window": np.array([w], np.int32) for i, w in enumerate(self.windows)
        }
        wanted = {i.name for i in graph.get_inputs()}
        assert wanted <= set(given)
        names = [o.name for o in graph.get_outputs()]
        got = graph.run(names, {name: given[name] for name in wanted})
        return dict(zip(names, got, strict=True))


@cache
def bench(name: str) -> DrafterBench:
    kind = KINDS[name]
    g, target = kind.geometry, GEOMETRIES[kind.target]
    with TemporaryDirectory() as held:
        root = Path(held)
        write_target(root / "target", target, 21, kind.target_dialect)
        write_drafter(root / "drafter", target, g, 22, kind.dialect)
        write_config(root / "drafter", read_config(root / "drafter") | dict(kind.changes))
        config = BuildConfig(chunk=CHUNK, capacity=CAPACITY)
        build(root / "target", root / "drafter", root / "package", config, Silent())
        _show_logits(root / "package" / "propose.onnx")
        own = dequantised(root / "target")
        sliding = [layer == SLIDING for layer in g.layer_types]
        made = DrafterBench(
            rules(read_config(root / "drafter")),
            dequantised(root / "drafter"),
            own["model.embed_tokens.weight"],
            own["lm_head.weight"],
            {n: _load(root / "package", n) for n in ("propose", "observe", "observe_chunk")},
            tuple(g.window if s else 0 for s in sliding),
            len(g.taps) * target.hidden,
        )
    made.clear()
    return made


def _show_logits(file: Path) -> None:
    model = onnx.load(str(file), load_external_data=False)
    [info] = [v for v in model.graph.value_info if v.name == "head.logits"]
    model.graph.output.append(info)
    file.write_bytes(model.SerializeToString())


def _load(package: Path, name: str) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(package / f"{name}.onnx"), options)


def features(b: DrafterBench, count: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((count, b.width)).astype(np.float32)


def decoding(prompt: int = 0, seed: int = 1) -> Iterator[tuple[str, int]]:
    """Steps as the decoding loop makes them: the prompt in chunks, then 1 to 16 rows at a time."""
    while prompt > 0:
        yield "observe_chunk", min(prompt, CHUNK)
        prompt -= CHUNK
    rng = np.random.default_rng(seed)
    while True:
        yield "observe", int(rng.integers(1, BLOCK + 1))


def one_by_one() -> Iterator[tuple[str, int]]:
    while True:
        yield "observe", 1


def distance(a: Array, b: Array) -> float:
    return float(np.abs(a.astype(np.float64) - b).max() / np.abs(b).max())


# With a window of 32 and 16 rows, row 15 first loses context row 0 at a context of 17, row 0 at 32.
# A sliding ring has 32 + CHUNK slots, so 240 rows go round it more than three times.
CONTEXTS = (0, 1, 15, 16, 17, 31, 32, 33, 48, 71, 72, 73, 145, 240)


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_the_plain_drafters(name: str) -> None:
    b = bench(name)
    taps = features(b, max(CONTEXTS))
    for count in CONTEXTS:
        b.fill(taps[:count], decoding(prompt=count // 2, seed=count))
        tokens, got = b.propose()
        want = b.plain(taps[:count])
        assert distance(got, want) <= SAME, count
        assert tokens[0] == ANCHOR
        _check_choice(tokens, want)


def _check_choice(tokens: Array, want: Array) -> None:
    """The draft in row i must be the plain drafter's choice, or as good up to rounding."""
    for i in range(1, BLOCK):
        assert want[i].max() - want[i, tokens[i]] <= SAME * np.abs(want).max()


@pytest.mark.parametrize("name", ["sliding, full", "27b's", "window of one block"])
def test_the_steps_by_which_rows_are_observed_do_not_matter(name: str) -> None:
    b = bench(name)
    taps = features(b, 200)
    answers: list[Array] = []
    for steps in (decoding(200), decoding(0, 2), decoding(100, 3), one_by_one()):
        b.fill(taps, steps)
        answers.append(b.propose()[1])
    for other in answers[1:]:
        assert distance(other, answers[0]) <= 1e-6


@pytest.mark.parametrize("first", [1, 30, 90])
def test_rows_before_the_first_are_not_attended(first: int) -> None:
    b = bench("27b's")
    taps = features(b, 100)
    b.fill(taps, decoding(50), first)
    # Rotary positions are relative, so the plain drafter may count from `first`.
    assert distance(b.propose()[1], b.plain(taps[first:])) <= SAME
    assert distance(b.propose()[1], b.plain(taps)) >= DIFFERENT


def test_a_dropped_step_leaves_no_trace() -> None:
    b = bench("sliding, full")
    taps = features(b, 100)
    b.fill(taps, decoding(50))
    want = b.propose()[1]
    b.observe(features(b, BLOCK, 8))
    b.length -= BLOCK
    np.testing.assert_array_equal(b.propose()[1], want)


def test_forced_ids_stand_in_place_of_drafts() -> None:
    b = bench("sliding, full")
    b.fill(features(b, 20), decoding())
    free, same = b.propose()
    tokens, logits_ = b.propose(forced=(-1, 200, 0, -1, 201))
    np.testing.assert_array_equal(logits_, same)
    want = free.copy()
    want[[2, 3, 5]] = 200, 0, 201
    np.testing.assert_array_equal(tokens, want)


def _every(r: Rules, value: Any) -> tuple[Any, ...]:
    return (value,) * len(r.causal)


BROKEN: dict[str, Callable[[Rules], Rules]] = {
    "sliding layers bidirectional": lambda r: replace(r, causal=_every(r, False)),
    "full layer causal": lambda r: replace(r, causal=_every(r, True)),
    "window ignored": lambda r: replace(r, windows=_every(r, None)),
    "window one too long": lambda r: replace(r, windows=tuple(w and w + 1 for w in r.windows)),
    "window one too short": lambda r: replace(r, windows=tuple(w and w - 1 for w in r.windows)),
    "window on every layer": lambda r: replace(r, windows=_every(r, r.windows[0])),
    "other rotary base": lambda r: replace(r, theta=1e6),
    "norms of the target's kind": lambda r: replace(r, norm_offset=1.0),
    "input norm on context rows": lambda r: replace(r, context_input_norm=True),
    "other mask token": lambda r: replace(r, mask_token=r.mask_token - 1),
}


@pytest.mark.parametrize(
    ("rule", "name"), list(zip(BROKEN, itertools.cycle(["sliding, full", "27b's"]), strict=False))
)
def test_a_drafter_with_another_rule_is_far_away(name: str, rule: str) -> None:
    b = bench(name)
    taps = features(b, 60)
    b.fill(taps, decoding(30))
    assert distance(b.propose()[1], b.plain(taps, BROKEN[rule](b.rules))) >= DIFFERENT
