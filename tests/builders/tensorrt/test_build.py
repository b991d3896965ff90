"""The TensorRT builder from end to end, with the recorder in TensorRT's place: what it asks for,
node by node, and what the package holds.

The recorder is our own; only a device can show that TensorRT accepts all this.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from stand_ins import trt_recorder as recorder
from support.checkpoints import DrafterGeometry, write_drafter, write_target
from support.samples import verify
from support.trt_builds import (
    CAPACITY,
    HYBRID,
    NANO,
    Recorded,
    options,
    record,
    record_hybrid,
)

from thor_dflash.builders.build import make_plan
from thor_dflash.builders.checkpoint.drafter import read_drafter
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.builders.tensorrt import package
from thor_dflash.config.build import BuildConfig
from thor_dflash.core.model_dims import MIN_CONVERSATION
from thor_dflash.core.tensors import DType
from thor_dflash.package import manifest
from thor_dflash.package.launch_program import Program
from thor_dflash.plugins.contract import DOMAIN, NEXT
from thor_dflash.plugins.registry import KERNELS
from thor_dflash.plugins.tensorrt.node import fingerprint, parse
from thor_dflash.runtime.decoding.model_runner import cache_rows, ring_rows

KINDS = {DType.F32: recorder.DataType.FLOAT, DType.BF16: recorder.DataType.BF16,
         DType.FP8: recorder.DataType.FP8, DType.I32: recorder.DataType.INT32}  # fmt: skip
LINEAR = 1 << int(recorder.TensorFormat.LINEAR)


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    tmp = tmp_path_factory.mktemp("trt")
    return record(tmp / "package", NANO / "target", NANO / "drafter", options(tmp))


def programs(target: Path, drafter: Path | None, config: BuildConfig) -> dict[str, Program]:
    read = read_drafter(drafter) if drafter else None
    return {p.name: p for p in make_plan(read_target(target), read, config).programs}


def test_the_package_holds_engines_and_their_descriptions(nano: Recorded) -> None:
    out, built = nano.out, nano.engines
    found = manifest.read(out)
    verify(out, found)
    assert (found.engine, found.kv, found.activations) == ("tensorrt", "fp8", "bf16")
    steps = {"verify", "accept", "accept_masked", "accept_sampled", "accept_sampled_masked",
             "propose", "sample_drafts", "observe", "observe_chunk", "observe_chunk.chunk64",
             "prefill", "prefill.chunk64"}  # fmt: skip
    assert built.keys() == steps
    for step in steps:
        description = nano.description(step)
        assert (description.name, description.file, description.profile) == (
            step,
            f"{step}.plan",
            0,
        )
        assert description.sha256 == found.files[description.file].sha256
    assert package.LOG in found.files
    assert not [n for n in found.files if n.endswith((".onnx", ".program.json"))]
    assert not list(out.rglob("*constants.bin.*"))


def test_every_step_is_one_plugin_in_order_reading_and_writing_what_the_program_says(
    nano: Recorded, tmp_path: Path
) -> None:
    hold_plugins(nano, programs(NANO / "target", NANO / "drafter", options(tmp_path)))


def test_a_dflash2_drafter_becomes_plugins_too(tmp_path: Path) -> None:
    target, drafter = write_target(tmp_path / "target", HYBRID, 1), tmp_path / "drafter"
    write_drafter(drafter, HYBRID, DrafterGeometry(second=True, block=8), 2)
    made = record(tmp_path / "package", target, drafter, options(tmp_path))
    wanted = programs(target, drafter, options(tmp_path))
    hold_plugins(made, wanted)
    ops = [step.op for step in wanted["propose"].steps]
    assert (ops.count("draft_conv"), ops.count("selector")) == (8, 1)


def hold_plugins(made: Recorded, wanted: dict[str, Program]) -> None:
    """Every step must be one plugin, with the step's ports as its tensors."""
    for name, program in wanted.items():
        layers = made.engines[name].network.layers
        assert [layer.name for layer in layers] == [step.name for step in program.steps]
        for layer, step in zip(layers, program.steps, strict=True):
            node = layer.plugin.node
            assert layer.kind == KERNELS[step.op].op.type == layer.plugin.plugin_name
            tensors = dict(zip((*node.inputs, *node.outputs), (*layer.inputs, *layer.outputs),
                               strict=True))  # fmt: skip
            assert tensors.keys() == step.ports.keys() - {"kinds", "next_packed"}
            for port, tensor in tensors.items():
                assert tensor.name == step.ports[port]
                assert (tensor.dtype, tensor.shape) == expected(program, tensor.name)


def expected(program: Program, name: str) -> tuple[recorder.DataType, tuple[int, ...]]:
    """Returns the type and shape that a value of a program must have in TensorRT."""
    tables = (program.weights, program.values, program.inputs, program.outputs)
    value = next(table[name] for table in tables if name in table)
    shape = tuple(-1 if isinstance(n, str) else n for n in value.shape)
    dtype = DType(value.dtype)
    if dtype is DType.U8:
        return recorder.DataType.INT32, (shape[0] // 4,)
    return KINDS[dtype], shape


def test_every_plugin_is_asked_for_by_name_version_and_namespace_and_finds_its_fields(
    nano: Recorded,
) -> None:
    for name, one in nano.engines.items():
        nodes = {node.name: node for node in nano.description(name).nodes}
        assert len(nodes) == len(one.network.layers)
        for layer in one.network.layers:
            fields = dict(layer.fields)
            assert fields.pop("plugin_namespace") == DOMAIN.encode()
            assert fields.pop("plugin_version") == b"1"
            description = nodes[layer.name]
            assert parse(description.op, description.fields) == layer.plugin.node
            assert {k: v.decode() if isinstance(v, bytes) else pytest.approx(v)
                    for k, v in fields.items()} == description.fields  # fmt: skip


def test_inputs_and_outputs_are_the_program_s_and_the_weights_in_linear_format(
    nano: Recorded, tmp_path: Path
) -> None:
    for name, program in programs(NANO / "target", NANO / "drafter", options(tmp_path)).items():
        network, description = nano.engines[name].network, nano.description(name)
        read = {n for step in program.steps for p, n in step.ports.items() if p != "kinds"}
        weights = program.weights.keys() & read
        assert {t.name for t in network.inputs} == program.inputs.keys() | weights
        assert [t.name for t in network.outputs] == list(program.outputs)
        assert {t.allowed_formats for t in (*network.inputs, *network.outputs)} == {LINEAR}
        assert description.weights == {n: program.weights[n] for n in weights}
        assert (description.inputs, description.outputs) == (program.inputs, program.outputs)
        assert not network.initializers


def test_what_is_written_in_place_is_read_by_its_writer_alone(nano: Recorded) -> None:
    kept: set[str] = set()
    for name, one in nano.engines.items():
        description = nano.description(name)
        meant: set[str] = set()
        for layer in one.network.layers:
            names = [t.name for t in layer.outputs]
            ports = dict(zip(layer.plugin.node.outputs, names, strict=True))
            in_place = KERNELS[layer.plugin.node.op].in_place
            mine = {n for port, n in ports.items() if port in in_place and n.startswith(NEXT)}
            for state in (output.removeprefix(NEXT) for output in mine):
                readers = [x for x in one.network.layers if state in {t.name for t in x.inputs}]
                assert readers == [layer]
            meant |= mine
        assert set(description.in_place) == meant
        kept |= meant
    assert {n.rpartition(".")[2] for n in kept} == {"state", "k", "v"}


def test_profiles_hold_every_size_a_session_may_ask_for(nano: Recorded) -> None:
    found = manifest.read(nano.out)
    assert found.drafter
    longest = found.target.max_position
    symbols: set[str] = set()
    for name, one in nano.engines.items():
        description = nano.description(name)
        free = {
            tensor: value.shape
            for tensor, value in description.inputs.items()
            if any(isinstance(size, str) for size in value.shape)
        }
        if not free:
            assert not one.config.profiles
            continue
        [profile] = one.config.profiles
        assert profile.shapes.keys() == free.keys()
        for tensor, shape in free.items():
            for axis, symbol in enumerate(shape):
                least, best, most = (size[axis] for size in profile.shapes[tensor])
                if not isinstance(symbol, str):
                    assert least == best == most == symbol
                    continue
                symbols.add(symbol)
                for capacity in (found.block + MIN_CONVERSATION, CAPACITY, longest):
                    assert least <= needed(found, symbol, capacity) <= most
                fits = needed(found, symbol, CAPACITY)
                assert least <= best <= most
                assert fits <= best <= fits + found.block
    assert symbols == {"cache_rows", *(f"ring_rows.{i}" for i in range(len(found.drafter.layers)))}


def needed(found: manifest.Manifest, symbol: str, capacity: int) -> int:
    """Returns the rows of a cache or ring (`symbol`) that a session of a capacity needs."""
    if symbol == "cache_rows":
        return cache_rows(capacity, found.block, found.widest_chunk)
    assert found.drafter
    window = found.drafter.layers[int(symbol.partition(".")[2])].window
    return ring_rows(window, capacity, found.block, found.widest_chunk)


def test_the_builder_is_given_these_settings_and_no_others_by_default(nano: Recorded) -> None:
    for one in nano.engines.values():
        assert one.network.flags == 1 << int(recorder.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        config = one.config
        assert config.flags == {recorder.BuilderFlag.DIRECT_IO, recorder.BuilderFlag.MONITOR_MEMORY}
        assert config.pools == {recorder.MemoryPoolType.WORKSPACE: 4096 << 20}
        assert config.profiling_verbosity == recorder.ProfilingVerbosity.DETAILED
        assert (config.builder_optimization_level, config.max_aux_streams) == (3, 0)
        assert config.ignore_mismatch is False


def test_the_timing_cache_is_kept_by_version_device_and_kernels(tmp_path: Path) -> None:
    """The recorder adds a byte to it for each engine."""
    first = record_hybrid(tmp_path, "bf16").engines
    [file] = (tmp_path / "timings").iterdir()
    assert file.name == f"{recorder.__version__}-sm_110-20-{fingerprint()[:16]}.timing"
    assert file.read_bytes() == b"+" * len(first)
    again = record_hybrid(tmp_path, "bf16").engines
    given = [one.config.cache.data for one in again.values() if one.config.cache]
    assert given == [b"+" * (len(first) + i) for i in range(len(again))]
