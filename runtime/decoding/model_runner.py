"""The package's graphs bound to one sequence. The only file that knows graph input/output names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from threading import RLock

import numpy as np

from thor_dflash.core.progress import Progress, Silent
from thor_dflash.core.tensors import Array, TensorSpec
from thor_dflash.package.manifest import (
    CHUNK_STEPS,
    CHUNKED,
    ENCODE,
    HIDDEN,
    Manifest,
    encoder_name,
    graph_name,
)
from thor_dflash.plugins.accept.record import Record
from thor_dflash.plugins.contract import NEXT
from thor_dflash.plugins.verify_attention import TILE
from thor_dflash.runtime.decoding.block import Block, Sampling
from thor_dflash.runtime.decoding.sequence_state import SequenceState
from thor_dflash.runtime.engines.protocol import Call, Engine, Graph, Tensor
from thor_dflash.runtime.vision.picture import Picture, encoder_inputs
from thor_dflash.runtime.vision.prompt_images import PromptImages, local_rows

ALL = -1
"""A word of a mask that allows every id."""
CONVERSATIONS = 16
"""Conversations of the longest length beyond which no memory is reserved for reuse."""


def cache_rows(capacity: int, block: int, chunk: int) -> int:
    """Rows of the key/value cache for a context of `capacity` tokens.

    A context ends one block before the capacity, and the last prefill chunk may be padded.
    """
    return -(-(capacity - block + max(block, chunk)) // TILE) * TILE


def ring_rows(window: int, capacity: int, block: int, chunk: int) -> int:
    """Slots of a drafter ring buffer: the rows a query may attend to plus the rows of one step.

    A step also writes rows past the committed length; they must not overwrite a visible slot.
    """
    limit = capacity - block
    return (min(window, limit) if window else limit) + max(block, chunk)


class ModelRunner:
    """The steps of one sequence: prefill, propose, verify, accept and observe."""

    def __init__(
        self,
        engine: Engine,
        manifest: Manifest,
        capacity: int,
        block: int,
        chunks: tuple[int, ...] = (),
        reuse: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """`reuse`: memory for the states of earlier turns, bytes."""
        self.engine = engine
        self.alone = RLock()
        """Held from the beginning of a step to its commit, and to close the engine: two threads may
        use one session, and a step of one must not run within a step of the other. Its holder may
        take it again, since a finaliser may run within a step and end an abandoned request."""
        self.manifest = manifest
        self.capacity = capacity
        self.block = block
        """Rows of a verify step, one of the package's widths."""
        self.chunks = chunks or (manifest.chunk,)
        """The prefill step sizes that are loaded, in rows."""
        self.chunk = self.chunks[0]
        """Tokens per prefill step, except a prompt's last. Set before the first request and not
        changed after it.
        """
        drafter = manifest.drafter
        self.graphs = self._load(progress or Silent())
        widest = manifest.widest_chunk
        dims = {"cache_rows": cache_rows(capacity, manifest.block, widest)}
        for i, layer in enumerate(drafter.layers if drafter else ()):
            dims[f"ring_rows.{i}"] = ring_rows(layer.window, capacity, manifest.block, widest)
        self.state = SequenceState(engine, list(self.graphs.values()), dims)
        self._inputs: dict[str, Tensor] = {}
        for step, graph in self.graphs.items():
            for spec in (*graph.inputs.values(), *graph.outputs.values()):
                self._scratch(step, spec)
        self.state.taps = self._inputs["taps"] if self.chained else None
        self._written: tuple[int, ...] = ()
        """The tokens last written from the host."""
        self._values: dict[str, int | float | tuple[int, ...]] = {}
        """Values last written to some inputs; most do not change from one block to the next."""
        self._calls = {name: self._bind(name) for name in self.graphs}
        self.reuse = self._reserve(reuse)
        engine.prepare(list(self._calls.values()))
        if drafter:
            self.write_windows(0, 0)

    @property
    def chained(self) -> bool:
        """The drafter is an MTP layer: it drafts one token after another, from normed rows."""
        return self.manifest.own_drafter == "mtp"

    @property
    def drafts(self) -> int:
        """Tokens that the drafter drafts for a block; those behind them are the host's."""
        drafter = self.manifest.drafter
        return min(drafter.block, self.block) - 1 if drafter else 0

    @property
    def wide(self) -> bool:
        """A block has rows behind those of a DFlash drafter."""
        return not self.chained and 0 < self.drafts < self.block - 1

    def _load(self, progress: Progress) -> dict[str, Graph]:
        """Load the graphs that are needed from the start: step -> graph."""
        files = {
            self.sized(step, chunk): self.manifest.graph(step, self.block, chunk)
            for chunk in self.chunks
            for step in self._steps()
        }
        files |= {name: name for name in map(encoder_name, self.manifest.image_patches)}
        graphs: dict[str, Graph] = {}
        with progress.task("loading graphs", len(files), "graphs") as task:
            for step, file in files.items():
                graphs[step] = self.engine.load(file)
                task.advance(1)
        return graphs

    def _steps(self) -> list[str]:
        """The graphs that are loaded at once."""
        names = ["prefill", "verify", "accept", "accept_masked"]
        if self.manifest.drafter:
            names += ["propose", CHUNKED] + ["observe"] * (not self.chained)
        return names if self.engine.loads_late else names + self._drawing(rejection=True)

    def _drawing(self, *, rejection: bool) -> list[str]:
        """The graphs that only sampled requests need, with or without rejection."""
        names = ["accept_sampled", "accept_sampled_masked"]
        if self.chained:
            names += ["propose_sampled"]
        elif self.manifest.drafter:
            names += ["sample_drafts"]
            rejection &= not self.wide
            names += ["sample_drafts_rejection", "accept_rejection"] * rejection
        return names

    def load_drawing(self, *, rejection: bool) -> None:
        """Load what sampled requests need, if the engine was not prepared with it."""
        for name in self._drawing(rejection=rejection):
            if name not in self.graphs:
                graph = self.engine.load(self.manifest.graph(name, self.block, self.chunk))
                for spec in (*graph.inputs.values(), *graph.outputs.values()):
                    self._scratch(name, spec)
                self.graphs[name] = graph
                self._calls[name] = self._bind(name)

    @property
    def limit(self) -> int:
        """Maximum tokens of prompt and answer together: one block stays free."""
        return self.capacity - self.manifest.block

    def _reserve(self, most: int) -> int:
        """Reserve memory for the states of earlier turns, for at most CONVERSATIONS full contexts;
        return its bytes.
        """
        state = sum(spec.nbytes({}) for spec in self.state.layout(self.limit).values())
        found = min(most, CONVERSATIONS * state)
        if found:
            self.engine.reserve(found)
        return found

    def _scratch(self, step: str, spec: TensorSpec) -> None:
        name = spec.name.removeprefix(NEXT)
        if name not in self.state.tensors:
            key = _key(step, name)
            if key not in self._inputs:
                self._inputs[key] = self.engine.empty(spec, {})

    def _tensor(self, step: str, name: str) -> Tensor:
        return self.state.tensors.get(name) or self._inputs[_key(step, name)]

    def call(self, name: str, rows: int = 0) -> Call:
        """A graph bound to this sequence's tensors; always returns the same Call object. `rows` is
        the size of a prefill step; 0 means `chunk`.
        """
        return self._calls[self.sized(name, rows or self.chunk)]

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Allowed sizes of a prefill step, in rows, ascending: `chunk` and smaller."""
        return tuple(sorted(rows for rows in self.chunks if rows <= self.chunk))

    def step_rows(self, tokens: int) -> int:
        """The smallest prefill step size, in rows, that holds `tokens` (at most `chunk`).

        So a prompt's last step is cheaper. Its size depends on the prompt's length alone, not on
        the prefix that the prompt continues from.
        """
        assert tokens <= self.chunk, tokens
        return next(rows for rows in self.step_sizes if rows >= tokens)

    def sized(self, step: str, rows: int) -> str:
        """The graph name of a step; it includes the chunk size unless that is the default."""
        other = step in CHUNK_STEPS and rows != self.manifest.chunk
        return graph_name(step, chunk=rows) if other else step

    def _bind(self, name: str) -> Call:
        graph = self.graphs[name]
        return Call(
            graph,
            {n: self._tensor(name, n) for n in graph.inputs},
            {n: self._tensor(name, n.removeprefix(NEXT)) for n in graph.outputs},
        )

    def _set(self, name: str, *values: int | float) -> None:
        tensor = self._inputs[name]
        self.engine.write(tensor, np.array(values, tensor.spec.dtype.numpy))

    def write_tokens(self, tokens: Sequence[int]) -> None:
        """Write the next block's tokens from the host: the last committed token and the drafts."""
        padded = [*tokens, *[0] * (self.block - len(tokens))]
        self._written = tuple(padded[: self.block])
        self._set("tokens", *self._written)

    def write_last(self, token: int) -> None:
        """Write the last committed token, for a drafter that runs as a graph."""
        self._set("last", token)

    def write_windows(self, sliding: int, full: int) -> None:
        """Set the attention windows of the drafter's sliding and full layers, in tokens; 0: the
        window the layer was made for. The rings hold no more, so no window may be larger.
        """
        for i, layer in enumerate(self.manifest.drafter.layers if self.manifest.drafter else ()):
            asked = sliding if layer.window else full
            self._set(f"drafter.{i}.window", asked or layer.window)

    def write_first(self, context: int, least: int = 0) -> None:
        """Limit how many positions before the block the drafter sees; 0: no limit. It never sees
        those before `least`.
        """
        oldest = self.state.length - context if context else 0
        self._write_changed("drafter.first", max(self.state.first, oldest, least))

    def write_sampling(self, sampling: Sampling | None) -> None:
        """Set how blocks with `sampled` draw tokens; None: the sequence is greedy."""
        if sampling is None:
            return
        self.load_drawing(rejection=sampling.rejection)
        self._write_changed("sampling.temperature", sampling.temperature)
        self._write_changed("sampling.top_k", sampling.top_k)
        self._write_changed("sampling.top_p", sampling.top_p)
        lowest = math.log(sampling.min_p) if sampling.min_p else -math.inf
        self._write_changed("sampling.min_log_p", lowest)
        words = np.array([sampling.seed], np.uint64).view(np.int32)
        self._set_ids("sampling.seed", tuple(int(word) for word in words))

    def write_images(self, images: PromptImages | None) -> None:
        """Set the images of the sequence that has begun; it has none until then."""
        self.state.images = images

    def encode(self, picture: Picture) -> Array:
        """Run the vision tower on one image; return its rows [tokens, H]. Waits for them."""
        grid = picture.grid
        size = next(size for size in self.manifest.image_patches if size >= grid.patches)
        self.engine.run([self.encoding(picture, size)])
        rows = self._inputs[_key(encoder_name(size), "image_rows")]
        return self.engine.read(rows, (grid.tokens, *rows.spec.at({})[1:]))

    def encoding(self, picture: Picture, size: int) -> Call:
        """Write the inputs of the vision graph for `size` patches; return its call."""
        vision, call = self.manifest.vision, self.call(encoder_name(size))
        assert vision is not None, "a package without a tower"
        for port, values in encoder_inputs(picture, vision.tower, size).items():
            tensor = call.inputs[port]
            self.engine.write(tensor, values.astype(tensor.spec.dtype.numpy))
        return call

    def hold(self, count: int) -> None:
        """Keep the taps of the `count` rows just committed for `catch_up`.

        This copies but does not wait: the step's work was already waited for when its record was
        read.
        """
        taps = self._inputs["taps"]
        self.state.behind.append(self.engine.read(taps, (count, *taps.spec.at({})[1:])))

    def catch_up(self) -> None:
        """Run the drafter's observe step on the rows it has not taken in yet, a chunk at a time.
        The rings end up the same as if each block had been observed when it was committed.
        """
        if not self.state.behind:
            return
        rows = np.concatenate(self.state.behind)
        start = self.state.length - len(rows)
        for done in range(0, len(rows), self.chunk):
            part = rows[done : done + self.chunk]
            size = self.step_rows(len(part))
            taps = self._inputs[_key(self.sized(CHUNKED, size), "taps")]
            self.engine.write(taps, part)
            self.state.log.writing(start + done, size)
            self._set("length", start + done)
            self.engine.run([self.call(CHUNKED, size)])
        self.state.behind.clear()

    def settle(self) -> None:
        """Hold what an MTP layer has yet to take in before a step overwrites it: rows of the last
        verify, or the last one of the prompt, as until now the token after it was not known.
        """
        state = self.state
        if state.fresh:
            state.behind.append(state.read_fresh())
            state.fresh = 0
        elif not state.behind and state.length:
            state.behind.append(self._hidden())

    def _hidden(self) -> Array:
        """The target's last prefilled row, normed, [1, H]."""
        hidden = self.state.tensors[HIDDEN]
        # With a shape, as the state may have been swapped in since the last run copied it out.
        return self.engine.read(hidden, hidden.spec.at({}))

    def write_ids(self, tokens: Sequence[int], tail: Sequence[int]) -> None:
        """Write the block for a drafter that fills the places of its drafts: the last committed
        token and forced ids, and the `tail` behind its last draft.
        """
        ids = [*tokens, *[-1] * (self.drafts + 1 - len(tokens)), *tail, *[0] * self.block]
        self._set("block_ids", *ids[: self.block])
        if "drafter.forced" in self._inputs:  # read by a selector, in a block of the drafter's
            self._set("drafter.forced", *[*tokens[1:], *[-1] * self.block][: self.drafts + 1])

    def chain(self, following: Sequence[int], context: int) -> None:
        """Write what `propose` of an MTP layer reads, if it has yet to take in rows. `following`:
        the newest tokens, each the one after such a row; as many or more.
        """
        state, length = self.state, self.state.length
        if state.behind or not state.fresh:
            self.settle()
            self._write_held(following)
        count = state.fresh or len(state.behind[0])  # fresh rows lie where a verify left them
        self._set("following", *following[-count:], *[0] * (self.block - count))
        self._set("drafter.row", count - 1)
        self._set("drafter.length", length - count + 1)
        for step in range(1, self.drafts):
            self._set(f"drafter.length.{step}", length + step)
        # Index 0 has no row: a row has a token and the target's row before it.
        self.write_first(context, least=1)

    def _write_held(self, following: Sequence[int]) -> None:
        """Write the last held rows, which stay held; take in those before them."""
        rows, length = np.concatenate(self.state.behind), self.state.length
        following = following[-len(rows) :]
        while len(rows) > self.block:
            part = rows[: min(len(rows) - 1, self.chunk)]
            self._take_in(length - len(rows) + 1, part, following)
            rows, following = rows[len(part) :], following[len(part) :]
        self.state.behind[:] = [rows]
        self.engine.write(self._inputs["taps"], rows)

    def _take_in(self, start: int, rows: Array, following: Sequence[int]) -> None:
        """Put rows of an MTP layer into its ring from an index on, with the token after each."""
        size = self.step_rows(len(rows))
        step = self.sized(CHUNKED, size)
        self.engine.write(self._inputs[_key(step, "taps")], rows)
        padded = [*following[: len(rows)], *[0] * (size - len(rows))]
        self._set(_key(step, "following"), *padded)
        self._set("drafter.length", start)
        self.state.log.writing(start, size)
        self.engine.run([self.call(CHUNKED, size)])

    def prefill(self, tokens: Sequence[int], observe: bool) -> None:
        """Commit up to `chunk` prompt tokens; `observe` also updates the drafter's rings."""
        rows = self.step_rows(len(tokens))
        start = self.state.length
        if self.chained:
            self._chain_prefill(tokens, rows, observe)
        if self.manifest.vision:
            tokens = self._see(tokens, self.sized("prefill", rows), rows)
        padded = [*tokens, *[0] * (rows - len(tokens))]
        self._set(_key(self.sized("prefill", rows), "tokens"), *padded)
        self._set("valid", len(tokens))
        self._begin(rows)
        calls = [self.call("prefill", rows)]
        if observe and self.manifest.drafter:
            calls.append(self.call(CHUNKED, rows))
        self.engine.run(calls)
        # Wait, so that a request can be cancelled within a chunk and the chunk's time is known.
        self.engine.read(self._inputs["valid"])
        self.state.advance(len(tokens))
        if observe or not self.manifest.drafter:
            self.state.log.prefilled(start, len(tokens))

    def _chain_prefill(self, tokens: Sequence[int], rows: int, observe: bool) -> None:
        """Prepare a prefill step for an MTP layer. Its row for a token needs the target's row
        before it: that of the first token was the last one of the step before. So rows of the ring
        depend on the tokens up to their own alone, as those of the caches do.
        """
        start, vision = self.state.length, self.manifest.vision
        # An image's tokens are negative; the layer sees the id that stands for all of them.
        ids = [vision.image_token if token < 0 and vision else token for token in tokens]
        if observe and start:
            self._take_in(start, self._hidden(), ids[:1])
        padded = [*ids[1:], *[0] * (rows - len(ids) + 1)]
        self._set(_key(self.sized(CHUNKED, rows), "following"), *padded)
        self._set("last_row", len(ids) - 1)
        self._set("drafter.length", start + 1)
        self.state.log.writing(start + rows, 1)  # the step's last row is one index further

    def _see(self, tokens: Sequence[int], step: str, rows: int) -> Sequence[int]:
        """Write the rows and positions of a prefill step; return its ids of text and of rows."""
        start, images = self.state.length, self.state.images
        at = np.repeat(np.arange(start, start + rows, dtype=np.int32)[:, None], 3, axis=1)
        if images is not None:
            at[: len(tokens)] = images.positions[start : start + len(tokens)]
            tokens, image = local_rows(tokens, images.encoded)
            if image is not None:
                self.engine.write(self._inputs[_key(step, "image")], image)
        self.engine.write(self._inputs[_key(step, "at")], at)
        return tokens

    def draft(self, block: Block, before: Sequence[Call]) -> tuple[int, ...]:
        """Run propose alone; return [R] tokens: the last committed one and the drafts. One wait; or
        none, if there is nothing to run because the host wrote the tokens.
        """
        if not before:
            return self._written
        self._position()
        self._forced(block)
        self.engine.run(before)
        return tuple(int(t) for t in self.engine.read(self._inputs["tokens"]))

    def step(
        self, block: Block, before: Sequence[Call], after: Sequence[Call], stop: Sequence[int]
    ) -> Record:
        """Run propose, verify and accept, with a single wait. Nothing is committed.

        A mask is computed and written while the verify runs.
        """
        self._begin(self.block)
        self._forced(block)
        self._bounds(block, stop)
        verify, accept = (*before, self.call("verify")), self._accept(block)
        if block.mask is None:
            if block.drawn:
                self._write_changed("mask", ALL)
            self.engine.run((*verify, accept, *after))
        else:
            self.engine.run(verify)
            self._values.pop("mask", None)
            self.engine.write(self._inputs["mask"], block.mask())
            self.engine.run((accept, *after))
        self.state.verified(self.block)
        return Record.read(self.engine.read(self._inputs["record"]))

    def _accept(self, block: Block) -> Call:
        """The accept of a block. That of drafts that were drawn is always masked."""
        if block.drawn:
            return self.call("accept_rejection")
        return self.call(
            "accept" + "_sampled" * block.sampled + "_masked" * (block.mask is not None)
        )

    def verify(self, run: Callable[[Call], None] | None = None) -> None:
        """Run verify alone, for scoring. `run` runs it instead of the engine, to see inside."""
        self._begin(self.block)
        call = self.call("verify")
        self.engine.run([call]) if run is None else run(call)
        self.state.verified(self.block)

    def read(self, name: str) -> Array:
        """Read an output of the last step, "logits" or "taps"."""
        return self.engine.read(self._inputs[name])

    def _begin(self, rows: int) -> None:
        self.state.begin(rows)
        if self.manifest.vision:
            images = self.state.images
            self._write_changed("shift", images.shift if images else 0)
        self._position()

    def _forced(self, block: Block) -> None:
        for name, ids in (("forced", block.forced), ("soft", block.soft)):
            self._set_ids(name, ids)

    def _position(self) -> None:
        self._set("length", self.state.length)
        self._set("accepted", self.state.accepted)

    def _bounds(self, block: Block, stop: Sequence[int]) -> None:
        relaxed = block.relaxed
        numbers: Mapping[str, int | float] = {
            "drafted": block.drafted,
            "cap": block.cap,
            "rule": relaxed.rule,
            "top_k": relaxed.top_k,
            "close": relaxed.close,
            "margin": relaxed.margin,
            "soft_margin": block.soft_margin,
        }
        if block.drawn:
            self._write_changed("drawn", block.drawn)
        for name, value in numbers.items():
            self._write_changed(name, value)
        ends = tuple(sorted({*stop, *block.ends}))
        for name, ids in (("stop", ends), ("strict", relaxed.never)):
            self._set_ids(name, ids)

    def _write_changed(self, name: str, value: int | float) -> None:
        """Fill an input with a number unless it is unchanged. No other method may write it."""
        if self._values.get(name) != value:
            self._values.pop(name, None)  # unknown if the write is interrupted
            tensor = self._inputs[name]
            filled = np.full(tensor.spec.at({}), value, tensor.spec.dtype.numpy)
            self.engine.write(tensor, filled)
            self._values[name] = value

    def _set_ids(self, name: str, ids: Sequence[int]) -> None:
        """Write ids to an input, padded with -1."""
        if self._values.get(name) != ids:
            self._values.pop(name, None)  # as in _write_changed
            slots = self._inputs[name].spec.at({})[0]
            self._set(name, *ids, *[-1] * (slots - len(ids)))
            self._values[name] = tuple(ids)


def _key(step: str, name: str) -> str:
    """Scratch tensors are shared by name, but chunk steps have their own tokens and taps, and so
    have vision graphs.
    """
    base, dot, size = step.partition(".")
    if base == ENCODE:
        return f"{name}.{step}"
    chunk = base in CHUNK_STEPS and name in ("tokens", "taps", "following", "image", "at")
    return f"{name}_chunk{dot}{size}" if chunk else name
