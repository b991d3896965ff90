"""Decides everything before the first byte is written: formats, units of work, files, sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from thor_dflash.builders.checkpoint.drafter import DrafterCheckpoint
from thor_dflash.builders.checkpoint.linear_weights import Linear
from thor_dflash.builders.checkpoint.quantized_matrix import WeightFormat
from thor_dflash.builders.checkpoint.shards import SINGLE, Shards
from thor_dflash.builders.checkpoint.target import EMBEDDING, TargetCheckpoint
from thor_dflash.calib.quantize.cache_scales import CacheScales, cache_scales
from thor_dflash.calib.quantize.classes import DRAFTER_PRESETS, formats
from thor_dflash.calib.quantize.staged_checkpoint import ShardFile, shard_file
from thor_dflash.calib.quantize.statistics import Statistics, input_of
from thor_dflash.calib.quantize.tensors import TYPE_NAMES, OutputTensor, quantised
from thor_dflash.config.quantize import QuantizeConfig
from thor_dflash.core.errors import CheckpointError, ConfigError
from thor_dflash.plugins.numpy_math import NVFP4_GROUP

SHARD_BYTES = 5_000_000_000
"""Largest shard, unless one unit of work is larger."""
COPY_BYTES = 1 << 28
"""Bytes after which a unit of copied tensors ends."""


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """Tensors that are written together."""

    label: str
    kind: WeightFormat | None
    """None: copied as they are stored."""
    linears: tuple[str, ...]
    """Names as in the checkpoint's layout; none of copied tensors."""
    tensors: tuple[OutputTensor, ...]
    """Those of each linear in turn, or the copied ones."""
    reads: int
    """Bytes of the source."""


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """All that a run will write."""

    source: TargetCheckpoint | DrafterCheckpoint
    config: QuantizeConfig
    """Without any `auto`."""
    kinds: Mapping[str, WeightFormat | None]
    """Linear -> what it becomes; None: copied."""
    units: tuple[WorkUnit, ...]
    files: tuple[ShardFile, ...]
    dropped: tuple[str, ...]
    """Stored scales that are not written."""
    twice: tuple[str, ...]
    """Linears that are quantised in the source, too."""
    statistics: Statistics | None = None
    cache: tuple[CacheScales, ...] = ()
    """Calibrated scales of the KV cache; none unless `config.kv` is scales."""
    scalars: Mapping[str, float] = field(default_factory=dict[str, float])
    """Tensors of one number each that are computed, not copied."""

    @property
    def nbytes(self) -> int:
        """Size of all shards, bytes."""
        return sum(file.size for file in self.files)

    @property
    def calibrated(self) -> frozenset[WeightFormat]:
        """Formats whose linears have a calibrated scale for their rows."""
        return _calibrated(self.config, self.statistics)

    def stem(self, name: str) -> str:
        """Return the stored name of a linear, without `.weight`."""
        return _stem(self.source.linears[name])


def make_plan(
    source: TargetCheckpoint | DrafterCheckpoint,
    config: QuantizeConfig,
    *,
    from_quantised: bool,
    statistics: Statistics | None = None,
) -> QuantizePlan:
    """Plan the quantisation of a target or a drafter. Reads no weights.

    Raises:
        CheckpointError: the checkpoint is quantised already, without `from_quantised`, a matrix
            cannot have the format, or the statistics are of another model.
        ConfigError: a setting does not fit the model.
    """
    shards = source.shards
    linears = {n: one for n, one in source.linears.items() if not one.codes.endswith(EMBEDDING)}
    config = _settle(config, statistics, drafter=isinstance(source, DrafterCheckpoint))
    twice = _quantised_already(source, linears, from_quantised)
    kinds = formats(linears, config.preset, config.classes)
    kinds |= {name: WeightFormat.BF16 for name in twice if kinds[name] is None}
    if config.dialect == "auto":
        theirs = WeightFormat.FP8 in kinds.values()
        config = replace(config, dialect="compressed-tensors" if theirs else "modelopt")
    _check_columns(shards, linears, kinds)
    if statistics is not None and isinstance(source, TargetCheckpoint):
        changed = (n for n, kind in kinds.items() if kind and kind is not WeightFormat.BF16)
        statistics.check(source, {input_of(n): linears[n].shape(shards)[1] for n in changed})
    cache, scalars = cache_scales(source, config, statistics)
    parts = {part for name, one in linears.items() if kinds[name] for part in one.parts}
    codes = {one.codes for one in linears.values()}
    dropped = (parts - codes) | {n for n in shards if "self_attn" in n and n.endswith("_scale")}
    copied = [name for name in shards if name not in parts | dropped]
    units = [
        *_quantised_units(shards, linears, kinds, config, _calibrated(config, statistics)),
        *_copied_units(shards, copied),
    ]
    if scalars:
        shape = (1,) if config.dialect == "compressed-tensors" else ()
        made = tuple(OutputTensor(name, "F32", shape) for name in scalars)
        units.append(WorkUnit("scales of the cache", None, (), made, 0))
    units.sort(key=lambda unit: unit.label)
    return QuantizePlan(
        source,
        config,
        kinds,
        tuple(units),
        _files(units),
        tuple(sorted(dropped)),
        twice,
        statistics,
        cache,
        scalars,
    )


def _settle(
    config: QuantizeConfig, statistics: Statistics | None, *, drafter: bool
) -> QuantizeConfig:
    """Decide preset and cache where they are `auto`."""
    preset, kv = config.preset, config.kv
    if preset == "auto":
        preset = "all-nvfp4" if drafter else "nvidia"
    if kv == "auto":
        kv = "none" if drafter else "cast" if statistics is None else "scales"
    if drafter and preset not in DRAFTER_PRESETS:
        rule = f"{' or '.join(DRAFTER_PRESETS)} for a drafter"
        raise ConfigError(f"quantize.preset must be {rule} (got {preset})")
    if drafter and kv != "none":
        raise ConfigError(f"quantize.kv must be none for a drafter (got {kv})")
    if drafter and (statistics is not None or config.method == "act"):
        got = "act" if statistics is None else "--statistics"
        raise ConfigError(f"quantize.method must be rtn or mse for a drafter (got {got})")
    for key, value in (
        ("method", config.method),
        ("kv", kv),
        ("activations", config.activations),
    ):
        if value in ("act", "scales", "nvfp4") and statistics is None:
            raise ConfigError(f"quantize.{key} {value} must go with --statistics (got none)")
    return replace(config, preset=preset, kv=kv)


def _calibrated(config: QuantizeConfig, statistics: Statistics | None) -> frozenset[WeightFormat]:
    found = set[WeightFormat]()
    if statistics is not None and config.dialect == "modelopt":
        found.add(WeightFormat.FP8)
    if config.activations == "nvfp4":
        found.add(WeightFormat.NVFP4)
    return frozenset(found)


def _quantised_already(
    source: TargetCheckpoint | DrafterCheckpoint, linears: Mapping[str, Linear], allowed: bool
) -> tuple[str, ...]:
    if isinstance(source, DrafterCheckpoint) and source.int4:
        stem = next(iter(source.int4.values())).stem
        raise CheckpointError(
            f"{source.shards.placed(stem + '.weight_packed')} must be BF16, F16, F32, FP8 or NVFP4 "
            "(got INT4)"
        )
    found = tuple(name for name, one in linears.items() if one.scale)
    if found and not allowed:
        one = linears[found[0]]
        raise CheckpointError(
            f"{source.shards.placed(one.codes)} must be BF16, F16 or F32; --from-quantised rounds "
            f"a second time (got {source.shards.entry(one.codes)})"
        )
    return found


def _check_columns(
    shards: Shards, linears: Mapping[str, Linear], kinds: Mapping[str, WeightFormat | None]
) -> None:
    for name, one in linears.items():
        columns = one.shape(shards)[1]
        if kinds[name] is WeightFormat.NVFP4 and columns % NVFP4_GROUP:
            raise CheckpointError(
                f"{shards.placed(one.codes)} must have a multiple of {NVFP4_GROUP} columns for "
                f"nvfp4; fp8 and keep take any (got {columns})"
            )


def _stem(linear: Linear) -> str:
    return linear.codes.rpartition(".")[0]


def _place(shards: Shards, name: str) -> str:
    """Where a tensor is stored, as a text in whose order the disk is read."""
    entry = shards.entry(name)
    return f"{entry.file.name} {entry.begin:015} {name}"


def _size(shards: Shards, names: Iterator[str]) -> int:
    return sum(shards.entry(name).end - shards.entry(name).begin for name in names)


def _quantised_units(
    shards: Shards,
    linears: Mapping[str, Linear],
    kinds: Mapping[str, WeightFormat | None],
    config: QuantizeConfig,
    calibrated: frozenset[WeightFormat],
) -> Iterator[WorkUnit]:
    groups: dict[str, list[str]] = {}
    for name in linears:
        if kinds[name] is not None:
            groups.setdefault(input_of(name), []).append(name)
    for names in groups.values():
        # Classes never divide a group, so its members have one format.
        kind = kinds[names[0]]
        assert kind is not None
        tensors = [
            tensor
            for name in names
            for tensor in quantised(
                _stem(linears[name]),
                kind,
                linears[name].shape(shards),
                config.dialect,
                calibrated=kind in calibrated,
            )
        ]
        codes = [linears[name].codes for name in names]
        label = min(_place(shards, name) for name in codes)
        yield WorkUnit(label, kind, tuple(names), tuple(tensors), _size(shards, iter(codes)))


def _copied_units(shards: Shards, names: list[str]) -> Iterator[WorkUnit]:
    unit: list[OutputTensor] = []
    for name in sorted(names, key=lambda name: _place(shards, name)):
        entry = shards.entry(name)
        unit.append(OutputTensor(name, TYPE_NAMES[entry.dtype], entry.shape))
        if sum(tensor.nbytes for tensor in unit) >= COPY_BYTES:
            yield _copied_unit(shards, unit)
            unit = []
    if unit:
        yield _copied_unit(shards, unit)


def _copied_unit(shards: Shards, tensors: list[OutputTensor]) -> WorkUnit:
    size = sum(tensor.nbytes for tensor in tensors)
    return WorkUnit(_place(shards, tensors[0].name), None, (), tuple(tensors), size)


def _files(units: list[WorkUnit]) -> tuple[ShardFile, ...]:
    groups: list[list[OutputTensor]] = [[]]
    size = 0
    for unit in units:
        own = sum(tensor.nbytes for tensor in unit.tensors)
        if size and size + own > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1] += unit.tensors
        size += own
    count = len(groups)
    return tuple(
        shard_file(f"model-{i:05}-of-{count:05}.safetensors" if count > 1 else SINGLE, tensors)
        for i, tensors in enumerate(groups, 1)
    )
