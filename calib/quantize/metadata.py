"""The JSON files of a quantised checkpoint, as modelopt and compressed-tensors write them.

Sources: NVIDIA/Model-Optimizer modelopt/torch/export/convert_hf_config.py; compressed-tensors
quantization/quant_config.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import thor_dflash
from thor_dflash.builders.checkpoint.quantized_matrix import WeightFormat
from thor_dflash.builders.checkpoint.shards import INDEX
from thor_dflash.calib.quantize.plan import QuantizePlan
from thor_dflash.core.errors import CheckpointError
from thor_dflash.plugins.numpy_math import NVFP4_GROUP

CONFIG, QUANT_CONFIG, REPORT = "config.json", "hf_quant_config.json", "quantization_report.json"
WRITTEN = (CONFIG, QUANT_CONFIG, REPORT, INDEX)
"""Files that are made here and not copied."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
LARGEST_FILE = 1 << 26
"""Largest of the small files, bytes; a tokenizer.json has 20 MB."""
QUANTISED = (WeightFormat.NVFP4, WeightFormat.FP8)
PRODUCER = {"name": "thor-dflash", "version": thor_dflash.__version__}
OUTSIDE = ("mtp*", "model.visual*")
"""Modules of other models in a target's checkpoint, which stay as they are."""
FP8_CACHE = {"dynamic": False, "num_bits": 8, "type": "float"}

Json = dict[str, Any]


def metadata(plan: QuantizePlan, config: Mapping[str, object]) -> dict[str, bytes]:
    """Return config.json, and with modelopt hf_quant_config.json, and the index of several shards.

    config: the source's config.json.
    """
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    files: dict[str, Json] = {CONFIG: dict(kept)}
    if any(kind in QUANTISED for kind in plan.kinds.values()):
        if plan.config.dialect == "modelopt":
            own = _modelopt(plan)
            files[QUANT_CONFIG] = {"producer": PRODUCER, "quantization": own}
            files[CONFIG]["quantization_config"] = _modelopt_config(plan, own)
        else:
            files[CONFIG]["quantization_config"] = _compressed_tensors(plan)
    if len(plan.files) > 1:
        places = {name: file.name for file in plan.files for name in file.begins}
        total = sum(file.size - len(file.header) for file in plan.files)
        ordered = dict(sorted(places.items()))
        files[INDEX] = {"metadata": {"total_size": total}, "weight_map": ordered}
    return {
        name: (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()
        for name, table in files.items()
    }


def small_files(directory: Path) -> Iterator[Path]:
    """Yield the files beside the weights that go along: tokenizer, template, licence.

    Raises: CheckpointError for one that is too large to be one of these.
    """
    for path in sorted(directory.iterdir()):
        if path.name in WRITTEN or path.name.startswith(".") or path.suffix in WEIGHTS:
            continue
        if not path.is_file():
            continue  # a folder, or a link to nothing
        if path.stat().st_size > LARGEST_FILE:
            raise CheckpointError(
                f"{path} must have at most {LARGEST_FILE} bytes to be copied beside the weights "
                f"(got {path.stat().st_size})"
            )
        yield path


def _named(plan: QuantizePlan, *kinds: WeightFormat) -> list[str]:
    """The stored names of the linears of some formats, sorted."""
    return sorted(plan.stem(name) for name, kind in plan.kinds.items() if kind in kinds)


def _excluded(plan: QuantizePlan) -> list[str]:
    """The stored names of all modules that are not quantised, besides norms."""
    quantised = set(_named(plan, *QUANTISED))
    modules = {plan.stem(name) for name in plan.kinds} - quantised
    ends = (".embed_tokens", ".conv1d")
    stems = {name.removesuffix(".weight") for name in plan.source.shards}
    modules |= {stem for stem in stems if stem.endswith(ends)}
    inside = [stem for stem in modules if not stem.startswith(("mtp", "model.visual"))]
    return [*sorted(inside), *OUTSIDE]


def _modelopt(plan: QuantizePlan) -> Json:
    cache = None if plan.config.kv == "none" else "FP8"
    found = [kind for kind in QUANTISED if _named(plan, kind)]
    if len(found) == 1:
        group = {"group_size": NVFP4_GROUP} if found[0] is WeightFormat.NVFP4 else {}
        return {
            "quant_algo": _algorithm(plan, found[0]),
            "kv_cache_quant_algo": cache,
            **group,
            "exclude_modules": _excluded(plan),
        }
    layers: Json = {stem: _layer(plan, kind) for kind in QUANTISED for stem in _named(plan, kind)}
    return {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": cache,
        "quantized_layers": dict(sorted(layers.items())),
    }


def _layer(plan: QuantizePlan, kind: WeightFormat) -> Json:
    group = {"group_size": NVFP4_GROUP} if kind is WeightFormat.NVFP4 else {}
    return {"quant_algo": _algorithm(plan, kind), **group}


def _algorithm(plan: QuantizePlan, kind: WeightFormat) -> str:
    if kind is WeightFormat.FP8:
        return "FP8"
    return "NVFP4" if kind in plan.calibrated else "W4A16_NVFP4"


def _modelopt_config(plan: QuantizePlan, own: Json) -> Json:
    nvfp4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_GROUP}
    fp8 = {"dynamic": False, "num_bits": 8, "type": "float"}
    mixed = "quantized_layers" in own
    groups: list[Json] = []
    for kind, weights in ((WeightFormat.NVFP4, nvfp4), (WeightFormat.FP8, fp8)):
        names = _named(plan, kind)
        if names:
            of_rows = kind is WeightFormat.FP8 or kind in plan.calibrated
            rows = {"input_activations": weights} if of_rows else {}
            groups.append({**rows, "weights": weights, "targets": names if mixed else ["Linear"]})
    out: Json = {
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": own.get("exclude_modules", list(OUTSIDE)),
        "quant_algo": own["quant_algo"],
        "producer": PRODUCER,
        "quant_method": "modelopt",
    }
    if mixed:
        out["quantized_layers"] = own["quantized_layers"]
    if own["kv_cache_quant_algo"]:
        out["kv_cache_scheme"] = FP8_CACHE
    return out


def _compressed_tensors(plan: QuantizePlan) -> Json:
    nvfp4: Json = {
        "format": "nvfp4-pack-quantized",
        "weights": _weights(4, "tensor_group", NVFP4_GROUP),
        "input_activations": None,
    }
    if WeightFormat.NVFP4 in plan.calibrated:
        nvfp4["input_activations"] = {**nvfp4["weights"], "dynamic": "local"}
    fp8: Json = {
        "format": "float-quantized",
        "weights": _weights(8, "channel", None),
        "input_activations": {**_weights(8, "token", None), "dynamic": True, "observer": None},
    }
    groups = [
        {**group, "output_activations": None, "targets": names}
        for kind, group in ((WeightFormat.NVFP4, nvfp4), (WeightFormat.FP8, fp8))
        if (names := list(_patterns(_named(plan, kind))))
    ]
    out: Json = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": groups[0]["format"] if len(groups) == 1 else "mixed-precision",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": [
            *(stem for stem in _excluded(plan) if stem not in OUTSIDE),
            r"re:^mtp.*",
            r"re:.*visual.*",
        ],
        "kv_cache_scheme": None,
        "producer": PRODUCER,
    }
    if plan.config.kv != "none":
        out["kv_cache_scheme"] = {**_weights(8, "tensor", None), "dynamic": False}
    return out


def _weights(bits: int, strategy: str, group: int | None) -> Json:
    four = {"scale_dtype": "torch.float8_e4m3fn"} if bits == 4 else {}
    return {
        "num_bits": bits,
        "type": "float",
        "strategy": strategy,
        "group_size": group,
        "symmetric": True,
        "dynamic": False,
        **four,
    }


def _patterns(stems: Iterable[str]) -> Iterator[str]:
    """Yield regular expressions for linears of layers, one per kind of linear, which match under
    any prefix: readers rename modules. Names outside layers as they are.
    """
    layers: dict[str, list[int]] = {}
    for stem in stems:
        match = re.fullmatch(r"(?:.*\.)?layers\.(\d+)\.(.+)", stem)
        if match:
            layers.setdefault(match[2], []).append(int(match[1]))
        else:
            yield stem
    for part, numbers in layers.items():
        which = "|".join(map(str, sorted(numbers)))
        yield rf"re:.*layers\.({which})\.{re.escape(part)}$"
