"""What the kernels of each operator refuse: a message that names the port or attribute, as
`operator.port must rule (got value)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest
from support.kernel_cases import cases_of
from support.kernel_runner import in_kernel_types, rule_of, shaped, site_of

from thor_dflash.core.tensors import DType
from thor_dflash.plugins import (
    ACCEPT,
    CONTEXT_KV,
    DRAFT_ATTENTION,
    DRAFT_CONV,
    GDN,
    HEAD,
    LINEAR,
    SELECTOR,
    VERIFY_ATTENTION,
    Op,
)
from thor_dflash.plugins.launch import CallSite, Shaped

F16, F32, BF16, FP8 = DType.F16, DType.F32, DType.BF16, DType.FP8
Change = DType | int | str | Callable[[tuple[int, ...]], tuple[int, ...]]
"""Another type or another shape of a port, or another value of an attribute."""


def rows(count: int) -> Change:
    return lambda shape: (count, *shape[1:])


def columns(count: int) -> Change:
    return lambda shape: (*shape[:-1], count)


def site_with(op: Op, name: str, changes: Mapping[str, Change]) -> CallSite:
    """The call of a case with some ports and attributes changed."""
    case = in_kernel_types(op, cases_of(op)[name])
    site = site_of(op, case.attributes, {n: shaped(x) for n, x in case.inputs.items()})
    ports, attributes = dict(site.ports), dict(case.attributes)
    for key, change in changes.items():
        if isinstance(change, DType):
            ports[key] = Shaped(change, ports[key].shape)
        elif isinstance(change, int | str):
            attributes[key] = change
        else:
            ports[key] = Shaped(ports[key].dtype, change(ports[key].shape))
    return CallSite(op, op.complete(attributes), ports)


def each(names: str, change: Change) -> list[tuple[dict[str, Change], str]]:
    return [({name: change}, name) for name in names.split()]


RESIDUAL, SWIGLU = "more_residual_bfloat16_16_of_640", "more_gates_of_128_16"
GATED, NORMED = "more_gated_16_of_640", "more_norm_16_of_640"
VERIFY = "more_1_rows_at_120_4x2x256_float8_e4m3fn"
ROWS = "more_verify_1_rows_fold_1_of_1_records_bfloat16"
DRAFT = "more_16_rows_causal_1_window_100_at_0"
Refused = list[tuple[dict[str, Change], str]]
"""Changes, and the port or attribute that the message names."""
REFUSED: list[tuple[Op, str, Refused]] = [
    (LINEAR, RESIDUAL, [
        *each("x residual", F32), ({"x": columns(24)}, "x"), ({"y0": columns(199)}, "y0"),
        ({"weight0": F16}, "weight0"), ({"weight0": rows(199)}, "weight0"),
        ({"segments": 17}, "segments"),
    ]),
    (LINEAR, NORMED, [
        ({"norm_weight": F16}, "norm_weight"),
        *(({"head_dim": n}, "head_dim") for n in (4, 24, 512)),
    ]),
    (LINEAR, GATED, [({"gate": F32}, "gate")]),
    (LINEAR, SWIGLU, [({"weight1": rows(8)}, "weight1"), ({"weight1": FP8}, "weight1")]),
    (HEAD, "more_bfloat16_16_rows", [
        ({"x": rows(33), "logits": rows(33)}, "x"), ({"x": columns(24)}, "x"), ({"x": F16}, "x"),
        ({"logits": columns(97)}, "logits"), *each("norm_weight weight0", F16),
    ]),
    (VERIFY_ATTENTION, VERIFY, [
        *each("q k v k_norm", F16), ({"q_norm": F16, "k_norm": F16}, "q_norm"),
        ({"heads": 3}, "heads / kv_heads"), ({"rotary_dim": 48}, "rotary_dim"),
        ({"tile": 32}, "tile"), ({"head_dim": 128}, "head_dim"),
        ({"cache_k": F32, "cache_v": F32}, "cache_k"),
        ({"cache_v": BF16}, "cache_v"),
    ]),
    (DRAFT_ATTENTION, DRAFT, [
        ({"q": F32}, "q"), *each("ring_k ring_v", F16), ({"q": rows(33)}, "q"),
        ({"k_norm": F16}, "k_norm"), ({"head_dim": 96}, "head_dim"), ({"heads": 3}, "heads"),
        *(({"rotary_dim": n}, "rotary_dim") for n in (66, 132)),
        # Kernels compute addresses from the attributes, so the shapes must be theirs.
        ({"heads": 4}, "q"), ({"kv_heads": 4}, "k"), ({"head_dim": 256}, "q"),
        *each("v q_norm k_norm", columns(64)), ({"k": rows(15)}, "k"),
        *each("ring_k ring_v", rows(1)),
    ]),
    (DRAFT_CONV, "bfloat16", [
        *each("x dynamic residual", F32), *each("norm_weight base", F16), ({"x": rows(33)}, "x"),
        ({"taps": 5}, "taps"), ({"taps": 1}, "dynamic"), ({"group": 12}, "group"),
        ({"group": 48}, "group"), ({"group": 32}, "dynamic"), ({"base": columns(32)}, "base"),
    ]),
    (SELECTOR, "bfloat16", [
        *each("hidden predecessors successors", F32), *each("logits", rows(33)),
        ({"logits": rows(1)}, "logits"), ({"logits": columns(262_145)}, "logits"),
        *(({"top_k": n}, "top_k") for n in (0, 33)), ({"successors": columns(20)}, "successors"),
        ({"successors": columns(520)}, "successors"), ({"predecessors": rows(7)}, "predecessors"),
    ]),
    (CONTEXT_KV, "more_16_rows_at_0_2x128", [
        ({"k_norm1": BF16, "k_norm0": F32}, "k_norm1"),
        *each("k0 v0 k_norm0", columns(64)), *each("ring_k0 ring_v0", rows(1)),
    ]),
    (GDN, ROWS, [
        *each("qkv b a tail record_qkv", F32), *each("conv_weight a_log dt_bias", F16),
        *each("qkv record_qkv", rows(33)), *each("key_dim value_dim", 64),
        ({"conv_kernel": 3}, "conv_kernel"), ({"value_heads": 5, "key_heads": 2}, "value_heads"),
    ]),
    (ACCEPT, "mask", [({"logits": rows(33)}, "logits"), ({"mask": columns(1)}, "mask")]),
]  # fmt: skip


@pytest.mark.parametrize(("op", "name", "refused"), REFUSED, ids=lambda x: getattr(x, "name", ""))
def test_what_kernels_cannot_compute_is_refused(op: Op, name: str, refused: Refused) -> None:
    refuse = rule_of(op).refuse
    assert refuse(site_with(op, name, {})) == ""
    for changes, port in refused:
        message = refuse(site_with(op, name, changes))
        assert re.fullmatch(rf"{op.name}\.{port} must .+ \(got .+\)", message), (changes, message)
