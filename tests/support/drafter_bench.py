"""The graphs of a drafter's package, run step by step beside the plain drafter.

The package's observe graphs fill the rings from given taps, and its propose graph reads them. Its
logits are added to the graph's outputs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
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
from support.reference_drafter import Rules, logits, outputs, rules, walk

from thor_dflash.builders.build import build
from thor_dflash.config.build import BuildConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.model_runner import ring_rows
from thor_dflash.runtime.engines.onnxruntime_import import ort

Array = NDArray[Any]

CHUNK, CAPACITY = 40, 256
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


@dataclass
class DrafterBench:
    """A package's drafter graphs, what the plain drafter needs, and one sequence's rings."""

    rules: Rules
    weights: dict[str, Array]
    embedding: Array
    head: Array
    block: int
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
        rows = [ring_rows(w, CAPACITY, self.block, CHUNK) for w in self.windows]
        heads, dim = self.rules.kv_heads, self.rules.head_dim
        self.rings = {
            f"drafter.{i}.{n}": 9 * rng.standard_normal((heads, size, dim)).astype(np.float32)
            for i, size in enumerate(rows)
            for n in "kv"
        }
        self.first = self.length = first

    def observe(self, taps: Array, graph: str = "observe") -> None:
        """Commit rows, at most those of one step; the other rows of the step are noise."""
        rows = {"observe": self.block, "observe_chunk": CHUNK}[graph]
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
            forced=np.array([*forced, *[-1] * (self.block - len(forced))], np.int32),
        )
        return got["tokens"], got["draft_logits"]

    def plain(self, taps: Array, rules: Rules | None = None) -> Array:
        """The logits [R, V] by the plain drafter."""
        return logits(rules or self.rules, self.weights, self.embedding, self.head, taps, ANCHOR)

    def drafts(
        self,
        taps: Array,
        rules: Rules | None = None,
        forced: Mapping[int, int] = MappingProxyType({}),
        ids: Array | None = None,
    ) -> tuple[list[int], float]:
        """The drafts of a DFlash2 drafter and their lead, by the plain drafter."""
        r = rules or self.rules
        out = outputs(r, self.weights, self.embedding, taps, ANCHOR)
        return walk(r, self.weights, out, self.head, ANCHOR, forced, ids)

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


def make_bench(
    kind: DrafterKind, ids: Sequence[int] = (), seeds: tuple[int, int] = (21, 22)
) -> DrafterBench:
    """Build a package and load the drafter's graphs. `ids` are those that may be drafted, `seeds`
    those of the checkpoints.
    """
    g, target = kind.geometry, GEOMETRIES[kind.target]
    with TemporaryDirectory() as held:
        root = Path(held)
        write_target(root / "target", target, seeds[0], kind.target_dialect)
        write_drafter(root / "drafter", target, g, seeds[1], kind.dialect)
        write_config(root / "drafter", read_config(root / "drafter") | dict(kind.changes))
        config = BuildConfig(chunk=CHUNK, capacity=CAPACITY)
        if ids:
            (root / "ids.json").write_text(json.dumps(list(ids)))
            config = replace(config, draft_ids=str(root / "ids.json"))
        build(root / "target", root / "drafter", root / "package", config, Silent())
        _show_logits(root / "package" / "propose.onnx")
        own = dequantised(root / "target")
        sliding = [layer == SLIDING for layer in g.layer_types]
        made = DrafterBench(
            rules(read_config(root / "drafter")),
            dequantised(root / "drafter"),
            own["model.embed_tokens.weight"],
            own["lm_head.weight"],
            g.block,
            {n: _load(root / "package", n) for n in ("propose", "observe", "observe_chunk")},
            tuple(g.window if s else 0 for s in sliding),
            len(g.taps) * target.hidden,
        )
    made.clear()
    return made


def _show_logits(file: Path) -> None:
    model = onnx.load(str(file), load_external_data=False)
    if all(v.name != "draft_logits" for v in model.graph.output):
        [info] = [v for v in model.graph.value_info if v.name == "draft_logits"]
        model.graph.output.append(info)
    file.write_bytes(model.SerializeToString())


def _load(package: Path, name: str) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(package / f"{name}.onnx"), options)


def features(b: DrafterBench, count: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((count, b.width)).astype(np.float32)


def decoding(prompt: int = 0, seed: int = 1, block: int = 16) -> Iterator[tuple[str, int]]:
    """Steps as the decoding loop makes them: the prompt in chunks, then up to `block` rows."""
    while prompt > 0:
        yield "observe_chunk", min(prompt, CHUNK)
        prompt -= CHUNK
    rng = np.random.default_rng(seed)
    while True:
        yield "observe", int(rng.integers(1, block + 1))


def distance(a: Array, b: Array) -> float:
    return float(np.abs(a.astype(np.float64) - b).max() / np.abs(b).max())
