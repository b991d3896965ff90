"""The `build` command: two checkpoints in, one package out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from thor_dflash import __version__
from thor_dflash.builders.checkpoint.draft_vocab import read_draft_ids
from thor_dflash.builders.checkpoint.drafter import check_pair, read_drafter
from thor_dflash.builders.checkpoint.mtp import PREFIX, read_mtp
from thor_dflash.builders.checkpoint.protocols import DrafterSource, TargetSource, VisionSource
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.builders.checkpoint.vision import VisionMode, read_vision
from thor_dflash.builders.engine_limits import check_ids, check_target
from thor_dflash.builders.graphs.drafter import DrafterGraphs
from thor_dflash.builders.graphs.graph_builder import GraphBuilder
from thor_dflash.builders.graphs.mtp import MtpGraphs
from thor_dflash.builders.graphs.target import ID_SLOTS, GraphOptions, TargetGraphs
from thor_dflash.builders.graphs.vision import VisionGraph
from thor_dflash.builders.graphs.weight_placement import WeightPlacement
from thor_dflash.builders.lowering.lower import lower
from thor_dflash.builders.lowering.packed_weights import WeightPacker
from thor_dflash.builders.model_card import make_card
from thor_dflash.builders.output.atomic_package import AtomicPackage
from thor_dflash.builders.output.weight_files import WeightFiles
from thor_dflash.builders.resume_key import build_key
from thor_dflash.builders.tensorrt.package import (
    EngineSources,
    engine_builder,
    plan_engines,
    write_engines,
)
from thor_dflash.builders.tensorrt.profiles import session_ranges
from thor_dflash.config.build import BLOCK, CAPACITY, MTP, BuildConfig
from thor_dflash.core.errors import CheckpointError, ConfigError
from thor_dflash.core.model_dims import (
    MERGED,
    MIN_CONVERSATION,
    PATCH,
    VisionDims,
    longest_context,
)
from thor_dflash.core.progress import Progress
from thor_dflash.core.tensors import DType
from thor_dflash.package import manifest
from thor_dflash.package.launch_program import ENDING, Program, render
from thor_dflash.package.manifest import KvScales, Manifest, TensorTotals
from thor_dflash.package.tokenizer_files import addressed_ids, stop_tokens, tokenizer_files
from thor_dflash.plugins.linear.decode_launch import MOST_ROWS

if TYPE_CHECKING:
    from thor_dflash.builders.tensorrt.engine import TensorRTBuilder

_DTYPE = {"f32": DType.F32, "bf16": DType.BF16, "fp8": DType.FP8}
_NAMES: dict[DType, Literal["f32", "bf16", "fp8"]] = {
    DType.F32: "f32",
    DType.BF16: "bf16",
    DType.FP8: "fp8",
}
_ON_GPU = (512, DType.FP8, DType.BF16)
_AUTO = {"ort": (64, DType.F32, DType.F32), "cuda": _ON_GPU, "tensorrt": _ON_GPU}
"""Default chunk (rows of a prefill step), KV cache type and activation type by engine."""
_CHUNKS: dict[str, tuple[int, ...]] = {
    "ort": (),
    "cuda": (256, 128, 64, 32),
    "tensorrt": (128,),
}
"""Default further sizes of a prefill step by engine. None above 512: 512 rows fill a Thor's 20
multiprocessors, and prefixes are kept in whole steps, so none shorter than a step. A device with
many more multiprocessors reads long prompts faster in steps of 2048. The smaller sizes are for a
prompt's last step; one of 32 rows takes little longer than reading the weights."""

PATCHES = 1280, 4096
"""Default sizes of the vision graph, patches: 640 x 480 has 1200, a square of a megapixel 4096."""
FEWEST_ON_GPU = MERGED * (MOST_ROWS + 1)
"""Fewest patches of a vision graph on a GPU: its products are of more rows than a block's."""


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """Everything that a package will hold, decided before anything is written."""

    target: TargetSource
    drafter: DrafterSource | None
    config: BuildConfig
    shape: GraphOptions
    chunks: tuple[int, ...]
    """Further sizes of a prefill step, rows."""
    capacity: int
    stop: tuple[int, ...]
    """Token ids that end an answer."""
    graphs: tuple[GraphBuilder, ...]
    programs: tuple[Program, ...]
    """The graphs as launch lists; none for ONNX Runtime, which runs the graphs."""
    weights: WeightFiles
    sources: tuple[WeightPlacement, ...]
    draft_ids: NDArray[np.int32] | None
    """Token ids of a reduced draft vocabulary; None for the whole vocabulary."""
    vision: VisionSource | None = None
    patches: tuple[int, ...] = ()
    """Sizes of the vision graph, patches."""


def build(
    target: Path,
    drafter: Path | Literal["mtp"] | None,
    out: Path,
    config: BuildConfig,
    progress: Progress,
) -> Manifest:
    """Write the package `out` from checkpoint directories. Drafter "mtp": the target's MTP layer.

    Raises:
        CheckpointError: a checkpoint is not supported, or the two do not fit together.
        ConfigError: an option does not fit the checkpoints.
        PackageError: `out` cannot be written.
    """
    with progress.task("reading checkpoints"):
        plan = make_plan(
            read_target(target),
            _read_drafter(target, drafter, config),
            config,
            vision=read_vision(target, _vision_mode(config)),
        )
        described = describe(plan)
        by = engine_builder(config.tensorrt, progress) if config.engine == "tensorrt" else None
        planned = plan_engines(material(plan)) if by else None
    with AtomicPackage(out, _key(plan, by), progress) as stage:
        total = sum(plan.weights.nbytes(file) for file in plan.weights.files)
        with progress.task("writing weights", total, "bytes") as task:
            for file in plan.weights.files:
                kept = file in stage.files
                stage.write(file, partial(plan.weights.write, file, task.advance))
                task.advance(plan.weights.nbytes(file) * kept)
        if by and planned:
            write_engines(stage, planned, by, progress)
        for program in () if by else plan.programs:
            stage.write(f"{program.name}{ENDING}", partial(_write, render(program).encode()))
        for graph in () if plan.programs else plan.graphs:
            data = graph.proto().SerializeToString(deterministic=True)
            stage.write(f"{graph.name}.onnx", partial(_write, data))
        for name in tokenizer_files(target):
            stage.write(name, partial(_write, (target / name).read_bytes()))
        made = replace(described, files=stage.files)
        stage.finish(manifest.render(made))
    return made


def _read_drafter(
    target: Path, drafter: Path | Literal["mtp"] | None, config: BuildConfig
) -> DrafterSource | None:
    if drafter == "mtp":
        if config.engine == "tensorrt":
            # Its steps update one ring in turn, which a TensorRT engine cannot do in place.
            raise ConfigError("--drafter must be a directory for engine tensorrt (got mtp)")
        return read_mtp(target, config.drafts)
    return read_drafter(drafter) if drafter else None


def _vision_mode(config: BuildConfig) -> VisionMode:
    """Return whether to read a vision tower: for TensorRT there are no plugins of its operators."""
    if config.engine != "tensorrt":
        return config.vision
    if config.vision == "on":
        raise ConfigError("build.vision must be auto or off for engine tensorrt (got on)")
    return "off"


def _write(data: bytes, path: Path) -> None:
    path.write_bytes(data)


def make_plan(
    target: TargetSource,
    drafter: DrafterSource | None,
    config: BuildConfig,
    blocks: tuple[int, ...] = (),
    vision: VisionSource | None = None,
) -> BuildPlan:
    """Decide shapes, make the graphs, place the weights. Reads scales but no weight codes.

    For measurements: `blocks` are further block sizes to make verify graphs for, in rows.
    """
    if drafter is not None:
        check_pair(target.dims, drafter.dims)
    shape = _shape(target, drafter, config)
    capacity = _capacity(target, drafter, config, shape.block)  # refuses a block that is too long
    weights = WeightFiles()
    source = WeightPlacement(target, weights)
    scales = _kv_scales(target) if shape.kv is DType.FP8 else {}
    sources = [source]
    if drafter is not None:
        sources.append(WeightPlacement(drafter, weights, "drafter."))
    seen = vision.dims if vision is not None else None
    ids = _draft_ids(config, shape.vocab) if drafter is not None else None
    graphs: list[GraphBuilder] = []
    chunks = _chunks(target, config, shape.chunk)
    for block, chunk in product((shape.block, *config.widths), (shape.chunk, *chunks)):
        own = replace(shape, block=block, chunk=chunk)
        layers = TargetGraphs(target.dims, source, own, scales, seen)
        graphs += _steps(
            layers, _drafting(drafter, target.dims.tied, sources, own, ids), own, shape
        )
    for block in blocks:
        wide = replace(shape, block=block)
        graphs.append(TargetGraphs(target.dims, source, wide, scales, seen).verify())
        graphs[-1].name = manifest.graph_name(graphs[-1].name, block, 0)
    patches = _patches(seen, config) if seen else ()
    if vision is not None:
        sources.append(WeightPlacement(vision, weights, "vision."))
        graphs += _encoders(vision.dims, sources[-1], patches, shape.activations)
    programs: tuple[Program, ...] = ()
    if config.engine != "ort":
        packing = WeightPacker(weights)
        programs = tuple(lower(graph.proto(), packing) for graph in graphs)
        weights = packing.files
    return BuildPlan(
        target,
        drafter,
        config,
        shape,
        chunks,
        capacity,
        _stop(target, shape.vocab),
        tuple(graphs),
        programs,
        weights,
        tuple(sources),
        ids,
        vision,
        patches,
    )


def _kv_scales(target: TargetSource) -> dict[int, tuple[float, float]]:
    layers = range(len(target.dims.layers))
    return {i: pair for i in layers if (pair := target.kv_scales(i)) is not None}


def _drafting(
    drafter: DrafterSource | None,
    tied: bool,
    sources: Sequence[WeightPlacement],
    own: GraphOptions,
    ids: NDArray[np.int32] | None,
) -> DrafterGraphs | MtpGraphs | None:
    """The drafter's graphs. `sources`: of the target, then of the drafter."""
    if drafter is None:
        return None
    target, source = sources[:2]
    make = MtpGraphs if own.normed else DrafterGraphs
    return make(drafter.dims, source, target, tied, own, ids)


def _steps(
    layers: TargetGraphs,
    drafting: DrafterGraphs | MtpGraphs | None,
    own: GraphOptions,
    shape: GraphOptions,
) -> list[GraphBuilder]:
    """Return the graphs for this block and chunk, named as their files are. A graph that depends
    on only one of the two sizes is made once, with the package's main size of the other.
    """
    own_block, own_chunk = own.block == shape.block, own.chunk == shape.chunk
    steps = [layers.prefill()]
    if own_chunk:
        steps += [layers.verify(), layers.accept(False), layers.accept(True)]
        steps += [layers.accept(masked, sampled=True) for masked in (False, True)]
    if isinstance(drafting, MtpGraphs) and own_chunk:
        steps += [drafting.propose(), drafting.propose(sampled=True)]
    if isinstance(drafting, DrafterGraphs) and own_chunk:
        steps += [drafting.propose(), drafting.observe("observe", own.block)]
        steps.append(drafting.sample_drafts())
        if not drafting.wide:
            steps.append(drafting.sample_drafts_rejection())
            steps.append(layers.accept(True, sampled=True, candidates=drafting.candidates))
    if drafting is not None and own_block:
        steps.append(drafting.observe(manifest.CHUNKED, own.chunk))
    for graph in steps:
        graph.name = manifest.graph_name(
            graph.name, 0 if own_block else own.block, 0 if own_chunk else own.chunk
        )
    return steps


def _chunks(target: TargetSource, config: BuildConfig, own: int) -> tuple[int, ...]:
    """Return the further sizes of a prefill step, rows."""
    longest = target.dims.max_position
    if wrong := [rows for rows in config.chunks if rows > longest]:
        raise ConfigError(
            f"build.chunks must be <= {longest}, max_position_embeddings (got {wrong[0]})"
        )
    chunks = config.chunks or tuple(rows for rows in _CHUNKS[config.engine] if rows <= longest)
    return tuple(rows for rows in chunks if rows != own)


def _patches(vision: VisionDims, config: BuildConfig) -> tuple[int, ...]:
    """Return the sizes of the vision graph, ascending."""
    most = vision.longest // PATCH**2 // MERGED * MERGED
    sizes = config.image_patches or tuple(min(size, most) for size in PATCHES)
    low, unit = (FEWEST_ON_GPU, MERGED) if config.engine != "ort" else (MERGED, MERGED)
    if wrong := [size for size in sizes if size % unit or not low <= size <= most]:
        rule = f"multiples of {unit}, {low} to {most}, the most that the model resizes to"
        raise ConfigError(f"build.image_patches must be {rule} (got {wrong[0]})")
    return tuple(sorted(set(sizes)))


def _encoders(
    vision: VisionDims, source: WeightPlacement, sizes: tuple[int, ...], activations: DType
) -> list[GraphBuilder]:
    graphs = [VisionGraph(vision.tower, source, size, activations).encode() for size in sizes]
    for size, graph in zip(sizes, graphs, strict=True):
        graph.name = manifest.encoder_name(size)
    return graphs


def _draft_ids(config: BuildConfig, vocab: int) -> NDArray[np.int32] | None:
    if not config.draft_ids:
        return None
    ids = read_draft_ids(Path(config.draft_ids), vocab)
    check_ids(len(ids), config.engine)
    return ids


def _check_types(config: BuildConfig) -> None:
    """Refuse float32 for engines with our kernels, which have neither float32 rows nor caches."""
    for key, value, known in (
        ("kv", config.kv, "auto or bf16 or fp8"),
        ("activations", config.activations, "auto or bf16"),
    ):
        if config.engine != "ort" and value == "f32":
            raise ConfigError(f"build.{key} must be {known} for engine {config.engine} (got f32)")


def _shape(
    target: TargetSource, drafter: DrafterSource | None, config: BuildConfig
) -> GraphOptions:
    _check_types(config)
    block = config.block or (drafter.dims.block if drafter else BLOCK)
    if config.engine == "tensorrt" and drafter is not None and block > drafter.dims.block:
        raise ConfigError(
            f"build.block must be <= {drafter.dims.block}, the drafter's, for engine tensorrt "
            f"(got {block})"
        )
    check_target(target, config.engine, block)
    chunk, kv, activations = _AUTO[config.engine]
    chunk = config.chunk or min(chunk, target.dims.max_position)
    if chunk > target.dims.max_position:
        raise ConfigError(
            f"build.chunk must be <= {target.dims.max_position}, max_position_embeddings "
            f"(got {chunk})"
        )
    if any(width >= block for width in config.widths):
        raise ConfigError(
            f"build.widths must be below {block}, the block (got {list(config.widths)})"
        )
    ids = addressed_ids(target.directory) if tokenizer_files(target.directory) else 0
    if ids > target.dims.vocab:
        raise CheckpointError(
            f"{target.directory}: the tokenizer must address ids below vocab_size "
            f"{target.dims.vocab} (got {ids - 1})"
        )
    return GraphOptions(
        block=block,
        chunk=chunk,
        activations=_DTYPE.get(config.activations, activations),
        kv=_DTYPE.get(config.kv, kv),
        saves=config.saves,
        vocab=ids or target.dims.vocab,
        taps=drafter.dims.taps if drafter else (),
        normed=drafter is not None and drafter.dims.kind == MTP,
    )


def _capacity(
    target: TargetSource, drafter: DrafterSource | None, config: BuildConfig, block: int
) -> int:
    longest = longest_context(target.dims, drafter.dims if drafter else None)
    least = block + MIN_CONVERSATION
    if least > longest:
        raise ConfigError(
            f"build.block must be <= {longest - MIN_CONVERSATION}: max_position_embeddings is "
            f"{longest}, and a prompt and its answer need "
            f"{MIN_CONVERSATION} beside a block (got {block})"
        )
    capacity = config.capacity or min(CAPACITY, longest)
    if not least <= capacity <= longest:
        raise ConfigError(
            f"build.capacity must be {least} to {longest}, max_position_embeddings (got {capacity})"
        )
    return capacity


def _stop(target: TargetSource, vocab: int) -> tuple[int, ...]:
    stop = stop_tokens(target.directory)
    if wrong := [token for token in stop if token >= vocab]:
        raise CheckpointError(
            f"{target.directory}: eos_token_id must be below {vocab} (got {wrong[0]})"
        )
    if len(stop) > ID_SLOTS:
        raise CheckpointError(
            f"{target.directory}: eos_token_id must be at most {ID_SLOTS} ids (got {len(stop)})"
        )
    return stop


def _skipped(plan: BuildPlan) -> tuple[str, ...]:
    """Return the names of the target's tensors that no graph uses."""
    used = plan.vision.names if plan.vision else frozenset[str]()
    mtp = plan.shape.normed
    found = (name for name in plan.target.skipped if name not in used)
    return tuple(name for name in found if not (mtp and name.startswith(PREFIX)))


def describe(plan: BuildPlan) -> Manifest:
    """Return the manifest of a plan's package, without its files."""
    config, drafter = plan.config, plan.drafter
    found = [p for i in range(len(plan.target.dims.layers)) if (p := plan.target.kv_scales(i))]
    flat = [scale for pair in found for scale in pair] or [1.0]
    checkpoints = {"target": plan.target.directory}
    if drafter is not None:
        checkpoints["drafter"] = drafter.directory
    return Manifest(
        tool=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        name=config.name or None,
        engine=config.engine,
        block=plan.shape.block,
        widths=config.widths,
        chunk=plan.shape.chunk,
        chunks=plan.chunks,
        capacity=plan.capacity,
        kv=_NAMES[plan.shape.kv],
        activations="bf16" if plan.shape.activations is DType.BF16 else "f32",
        saves=config.saves,
        vocab_limit=plan.shape.vocab,
        stop_tokens=plan.stop,
        tokenizer=bool(tokenizer_files(plan.target.directory)),
        skipped=_skipped(plan),
        target=plan.target.dims,
        vision=plan.vision.dims if plan.vision else None,
        image_patches=plan.patches,
        drafter=drafter.dims if drafter else None,
        card=make_card(config.card, plan.target.dims.max_position),
        kv_scales=KvScales(layers=len(found), low=min(flat), high=max(flat)),
        quantisation={
            name: {
                kind: TensorTotals(count=count, bytes=size) for kind, (count, size) in kinds.items()
            }
            for source in plan.sources
            for name, kinds in source.census().items()
        },
        sources={
            name: manifest.CheckpointSource(
                directory=os.fsencode(path.resolve().name).decode(errors="replace"),
                config_sha256=hashlib.sha256((path / "config.json").read_bytes()).hexdigest(),
            )
            for name, path in checkpoints.items()
        },
        files={},
    )


def material(plan: BuildPlan) -> EngineSources:
    """Return what TensorRT engines are built from."""
    dims = plan.drafter.dims if plan.drafter else None
    rows = max(plan.shape.block, plan.shape.chunk, *plan.chunks)
    return EngineSources(
        plan.graphs,
        plan.programs,
        plan.sources[0].files,
        {name: scale for source in plan.sources for name, scale in source.input_scales.items()},
        session_ranges(plan.capacity, longest_context(plan.target.dims, dims), rows, dims),
        plan.config.tensorrt,
    )


def _key(plan: BuildPlan, by: TensorRTBuilder | None) -> str:
    read = [source.directory for source in (plan.target, plan.drafter) if source]
    return build_key(plan.config, read, plan.draft_ids, by)
