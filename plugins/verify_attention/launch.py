"""verify_attention on a GPU. For a block of rows, thread blocks process pieces of the cache in
parallel; for a prompt, each goes through the whole cache for 16 tokens.
"""

from __future__ import annotations

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.launch import (
    THOR,
    ActiveClusters,
    Argument,
    CallSite,
    Choice,
    Device,
    Int,
    Launch,
    OpKernels,
    Pointer,
    Real,
    Scratch,
    Table,
    always,
    prefetch_next,
)
from thor_dflash.plugins.numpy_math import inverse_frequency
from thor_dflash.plugins.verify_attention import OP

TOLERANCE = 1.2e-2
"""Output and reference are both rounded to bf16: near a tie they may differ by one unit in the last
place, at most 2^-7 = 7.8e-3 of the largest value. The other 4e-3 are for weights and piece results,
which are rounded before that: to f16 for FP8 caches, by at most 2^-11 of each, and to bf16 for bf16
caches, by at most 2^-8 of each, which averages out over the positions. Queries and keys are rounded
from float32 values and the reference's from float64, so about once in 10^5 elements a tie is broken
differently and one element of 256 changes by 2^-8 (bf16) or one code (FP8)."""

SPLIT_ROWS = 32
"""Calls of up to this many rows process pieces of the cache in parallel; longer calls have enough
rows to fill the device."""

TOKENS = 16
WIDTH = 256
GROUPS = (2, 4, 6)
THREADS = 256
CACHES = (DType.BF16, DType.FP8)
PLAIN = (DType.BF16, DType.F32)
PIECES, UNIT = 33, 128


def slots(positions: int) -> int:
    """Returns for how many piece results there must be memory, if rows are at positions below
    `positions`; see split_kv.cuh.
    """
    return min(-(-positions // UNIT), PIECES) if positions <= PIECES * UNIT else 2 * PIECES


def refuse(site: CallSite) -> str:
    """Returns why the kernels cannot run this call, or an empty string if they can."""
    a, ports = site.attributes, site.ports
    group = a.integer("heads") / a.integer("kv_heads")
    rows, rotary, slabs = site.size("q", 0), a.integer("rotary_dim"), "y0_slabs" in site
    caches = (ports["cache_k"].dtype, ports["cache_v"].dtype)
    norms = (ports["q_norm"].dtype, ports["k_norm"].dtype)
    shared = _shared(site, rows if rows <= SPLIT_ROWS else 0)
    rules = (
        *((ports[n].dtype is DType.BF16, n, "bfloat16", ports[n].dtype.value) for n in "qkv"),
        (caches[0] in CACHES, "cache_k", "bfloat16 or FP8", caches[0].value),
        (caches[0] is caches[1], "cache_v", f"{caches[0].value}, as cache_k", caches[1].value),
        (norms[0] in PLAIN, "q_norm", "bfloat16 or float32", norms[0].value),
        (norms[0] is norms[1], "k_norm", f"{norms[0].value}, as q_norm", norms[1].value),
        (a.integer("head_dim") == WIDTH, "head_dim", str(WIDTH), a.integer("head_dim")),
        (group in GROUPS, "heads / kv_heads", "2, 4 or 6", group),
        (rotary in (16, 32, 64, 128, 256), "rotary_dim", "a power of two, 16 to 256", rotary),
        (a.integer("tile") % 128 == 0, "tile", "a multiple of 128", a.integer("tile")),
        ("shift" not in site or rows <= SPLIT_ROWS, "shift", f"of at most {SPLIT_ROWS} rows", rows),
        (not slabs or rows <= SPLIT_ROWS, "y0_slabs", f"of at most {SPLIT_ROWS} rows", rows),
        (not slabs or "next_gate" in site, "y0_slabs", "of gated rows", "no next_gate"),
        (site.size("cache_k", 1) % 128 == 0, "cache_k", "whole tiles", site.size("cache_k", 1)),
        (shared <= THOR.shared, "shared memory", f"at most {THOR.shared} bytes", shared),
    )
    for holds, what, rule, got in rules:
        if not holds:
            return f"verify_attention.{what} must be {rule} (got {got})"
    return ""


def launches(site: CallSite, device: Device) -> tuple[Launch, ...]:
    """Returns the two launches of a block of rows or of a prompt. Those of a block also write the
    output times sigmoid(`next_gate`) to `y0_slabs` if the call has these ports.
    """
    if site.size("q", 0) <= SPLIT_ROWS:
        return _split(site, device)
    return _dense(site)


def _defines(site: CallSite) -> dict[str, int]:
    a = site.attributes
    defines = {
        "GROUP": a.integer("heads") // a.integer("kv_heads"),
        "FP8": int(site.ports["cache_k"].dtype is DType.FP8),
        "NORM_F32": int(site.ports["q_norm"].dtype is DType.F32),
        "HALF": a.integer("rotary_dim") // 2,
    }
    if "shift" in site:
        defines["SHIFT"] = 1
    if "at" in site:
        height, width = a.integer("mrope_height"), a.integer("mrope_width")
        defines |= {"MROPE": 1, "MROPE_HEIGHT": height, "MROPE_WIDTH": width}
    return defines


def _turning(site: CallSite) -> tuple[Pointer, ...]:
    """The argument by which rows turn, if it is not their index alone."""
    return tuple(Pointer(port) for port in ("shift", "at") if port in site)


def _shared(site: CallSite, fresh: int) -> int:
    """Returns the shared memory of a block, bytes, as laid out in kv_tile.cuh; `fresh`: how many of
    the call's own rows are kept there.
    """
    query_rows = _defines(site)["GROUP"] * TOKENS
    row = WIDTH * site.ports["cache_k"].dtype.bytes
    positions = 128 * WIDTH // row
    angles = TOKENS * site.attributes.integer("rotary_dim") * 4
    weights = max(query_rows * positions * 2, angles)
    tiles = 2 * 2 * positions * row
    return query_rows * (WIDTH * 2 + 32) + weights + tiles + 256 + 2 * fresh * row


def _numbers(site: CallSite, *more: int) -> tuple[Argument, ...]:
    a = site.attributes
    counts = (site.size("q", 0), site.size("cache_k", 1), *more)
    return (*map(Int, counts), Real(a.real("norm_offset")), Real(a.real("norm_eps")))


def _frequency(site: CallSite) -> Table:
    a = site.attributes
    return Table(inverse_frequency(a.integer("rotary_dim"), a.real("rope_theta")))


def _split(site: CallSite, device: Device) -> tuple[Launch, ...]:
    rows, kv = site.size("q", 0), site.attributes.integer("kv_heads")
    defines = _defines(site)
    pieces = slots(site.size("cache_k", 1))
    blocks = -(-rows // TOKENS)
    groups = blocks * kv
    results = groups * pieces * defines["GROUP"] * TOKENS
    mixtures, stats = Scratch("mixtures", results * WIDTH * 2), Scratch("stats", results * 8)
    choice = device.choice(site) or {"sharers": max(1, device.multiprocessors // groups)}
    sharers = min(2 * min(pieces, PIECES), choice["sharers"])
    split = Launch(
        kernel="attend_split",
        grid=(kv, sharers, blocks),
        threads=THREADS,
        shared=_shared(site, rows),
        defines=defines,
        arguments=(
            *map(Pointer, ("q", "k", "v", "q_norm", "k_norm", "length")),
            *map(Pointer, ("next_cache_k", "next_cache_v", "scale_k", "scale_v")),
            _frequency(site),
            mixtures,
            stats,
            *prefetch_next(site, sharers * groups),
            *_numbers(site, pieces),
            *_turning(site),
        ),
    )
    combine = Launch(
        kernel="combine",
        grid=(rows * kv * defines["GROUP"], 1, 1),
        threads=WIDTH // 2,
        defines=defines,
        arguments=(
            mixtures,
            stats,
            *map(Pointer, ("length", "scale_v", "next_gate", "o", "y0_slabs")),
            *map(Int, (rows, kv, pieces)),
        ),
    )
    return split, combine


def candidates(site: CallSite, device: Device, active: ActiveClusters | None) -> tuple[Choice, ...]:
    """Returns the `Candidates` of a call: blocks among which the pieces of the cache are divided,
    for each group of rows and key/value head. A prompt has none.
    """
    if (rows := site.size("q", 0)) > SPLIT_ROWS:
        return ()
    groups = -(-rows // TOKENS) * site.attributes.integer("kv_heads")
    rule = max(1, device.multiprocessors // groups)
    counts = (rule, rule // 2, rule * 3 // 4, rule * 3 // 2, 2 * rule)
    kept = dict.fromkeys(min(max(1, count), 2 * PIECES) for count in counts)
    return tuple({"sharers": count} for count in kept)


def _dense(site: CallSite) -> tuple[Launch, ...]:
    kv, blocks = site.attributes.integer("kv_heads"), -(-site.size("q", 0) // TOKENS)
    caches = tuple(map(Pointer, ("next_cache_k", "next_cache_v", "scale_k", "scale_v")))
    write = Launch(
        kernel="write_rows",
        grid=(blocks, kv, 1),
        threads=THREADS,
        defines=_defines(site),
        arguments=(
            *map(Pointer, ("k", "v", "k_norm", "length")),
            *caches,
            _frequency(site),
            *_numbers(site),
            *_turning(site),
        ),
    )
    attend = Launch(
        kernel="attend_dense",
        grid=(kv, 1, blocks),
        threads=THREADS,
        shared=_shared(site, 0),
        defines=_defines(site),
        arguments=(
            *map(Pointer, ("q", "q_norm", "length")),
            *caches,
            _frequency(site),
            Pointer("o"),
            *_numbers(site),
            *_turning(site),
        ),
    )
    return write, attend


KERNELS = OpKernels(
    OP,
    launches,
    refuse,
    candidates,
    in_place=frozenset({"next_cache_k", "next_cache_v"}),
    prefetches=always,
    fuses_gate=always,
)
