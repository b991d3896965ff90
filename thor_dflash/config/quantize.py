"""The configuration section of `thor-dflash quantize`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thor_dflash.config.bounds import Count


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig:
    """How `thor-dflash quantize` makes an NVFP4 and FP8 checkpoint of a BF16 one
    ([quantising](../guide/quantize.md)).
    """

    preset: Literal[
        "auto", "nvidia", "unsloth", "unsloth-3.8", "redhat", "berkerdooo", "all-nvfp4", "mlp",
        "fp8", "keep",
    ] = "auto"  # fmt: skip
    """Format of each class of linears; auto is nvidia for a target, all-nvfp4 for a drafter,
    keep for random values."""
    classes: tuple[str, ...] = ()
    """Format of one class in place of the preset's, as `gdn=fp8` or, for some layers,
    `mlp:56-63=fp8`. Classes: mlp, attention, gdn (or gdn_in, gdn_out), head, fc. Formats: nvfp4,
    fp8, keep. A later entry wins."""
    method: Literal["rtn", "mse", "act"] = "mse"
    """How NVFP4's block scales are found: mse has the smallest square error, rtn is what
    Model-Optimizer's default gives, byte for byte, and act, which needs `--statistics`, has the
    smallest square error of the outputs."""
    activations: Literal["none", "nvfp4"] = "none"
    """Whether NVFP4 linears also get a calibrated scale for their rows, from `--statistics`, and
    are declared W4A4. An engine with such products then quantises the rows: faster for many rows,
    less exact. Ours keep them, except TensorRT's own products in prefill."""
    dialect: Literal["auto", "modelopt", "compressed-tensors"] = "auto"
    """Names and scales of the stored tensors; auto is compressed-tensors where a linear is FP8,
    else modelopt. vLLM wants a calibrated input_scale for modelopt's FP8."""
    kv: Literal["auto", "scales", "cast", "none"] = "auto"
    """What the checkpoint declares of the KV cache: scales is FP8 with a calibrated scale for each
    layer, cast is FP8 with scale 1, none is nothing; auto is scales with `--statistics`, else cast
    for a target, none for a drafter."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where NVFP4 is encoded; the bytes are the same."""
    threads: Count = 0
    """CPU processes, or with a GPU threads; 0: one for each core, at most 16."""
