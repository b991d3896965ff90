"""gdn on a GPU: one launch for a verify, two for a prefill."""

from __future__ import annotations

from collections.abc import Mapping

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import Attribute
from thor_dflash.plugins.gdn import OP
from thor_dflash.plugins.launch import (
    ActiveClusters,
    BufferOffset,
    CallSite,
    Choice,
    Device,
    Int,
    Launch,
    OpKernels,
    Pointer,
    Real,
    Scratch,
    prefetch_next,
)
from thor_dflash.plugins.linear.decode_launch import head_squares

TOLERANCE = 2.0**-7
"""Largest error, relative to the largest value of the output: o is bf16, and a value between two
bf16 numbers may be rounded to the other one. The other outputs are float32, with errors of about
1e-6."""

DIM = 128
"""Key and value dimension of a head."""
TAPS = 4
MOST_ROWS = 32
"""Most rows of a verify call, and most records."""
SLAB = 16
"""Columns of each value head that one thread block of a verify computes."""
VERIFY_THREADS = 256
"""Threads of a block in a verify launch."""
THREADS = 128
"""Threads of a block in a prefill launch."""
MOST_HEADS = 3
"""Most value heads of a thread block in a verify launch."""
GATES = 8
"""Floats that hold a row's gates in shared memory."""
BARRIERS = 256
"""Bytes for the barriers of a verify block."""

CHUNK = 32
"""Rows of a prefill's chunk; this and the following sizes must agree with chunk.cuh, prefill.cu."""
WALK_SLAB = 64
"""Columns of a thread block in the walk over the chunks."""
KEY_BYTES = 4 * CHUNK * DIM * 2
"""Bytes of K and Q of a chunk and key head, each value a pair of bf16."""
MATRIX_BYTES = 4 * CHUNK * CHUNK * 2 + 2 * CHUNK * 4
"""Bytes of T and P of a chunk and value head, each value a pair of bf16, and of two float32 per
row."""

_RECORDS = ("record_qkv", "record_k", "record_d", "record_decay", "states")
_NEXT_RECORDS = tuple(f"next_{name}" for name in _RECORDS)
_PORTS = (
    *("qkv", "b", "a", "conv_weight", "a_log", "dt_bias", "accepted", "state", "tail", *_RECORDS),
    *("o", "next_state", "next_tail", *_NEXT_RECORDS),
    *("next_gate", "next_norm_weight", "y0_slabs", "y0_squares"),
)
_OFFSETS = (
    BufferOffset(("tail", "next_tail")),
    BufferOffset((*_RECORDS, *_NEXT_RECORDS)),
)
"""Not every call has all of these ports."""
_PLAIN = ("conv_weight", "a_log", "dt_bias")
_NORMS = (DType.BF16, DType.F32)
_CHUNK_PORTS = (
    *("qkv", "b", "a", *_PLAIN, "accepted", "valid", "tail", "record_qkv", "next_tail"),
)
_WALK_PORTS = (
    *("qkv", "conv_weight", "accepted", "valid", "state", "tail", "record_qkv"),
    *("record_k", "record_d", "record_decay", "states"),
)


def refuse(site: CallSite) -> str:
    """Returns why the kernels cannot run this call, or an empty string if they can."""
    return _refuse_types(site) or _refuse_sizes(site) or _refuse_left(site)


def _refuse_types(site: CallSite) -> str:
    for name in ("qkv", "b", "a", "tail", "record_qkv"):
        if (dtype := site.ports[name].dtype) is not DType.BF16:
            return f"gdn.{name} must be bfloat16 (got {dtype.value})"
    for name in _PLAIN:
        if (dtype := site.ports[name].dtype) not in (DType.BF16, DType.F32):
            return f"gdn.{name} must be bfloat16 or float32 (got {dtype.value})"
    return ""


def _refuse_sizes(site: CallSite) -> str:
    a = site.attributes
    for name, size in (("key_dim", DIM), ("value_dim", DIM), ("conv_kernel", TAPS)):
        if (value := a.integer(name)) != size:
            return f"gdn.{name} must be {size} (got {value})"
    if (heads := a.integer("value_heads")) % a.integer("key_heads"):
        return f"gdn.value_heads must be a multiple of key_heads (got {heads})"
    if a.word("mode") == "prefill":
        return ""
    for name in ("qkv", "record_qkv"):
        if (rows := site.size(name, 0)) > MOST_ROWS:
            return f"gdn.{name} must be at most {MOST_ROWS} rows (got {rows})"
    return ""


def _refuse_left(site: CallSite) -> str:
    """Why a call cannot leave its rows for the next product."""
    if "y0_slabs" not in site:
        return ""
    if site.attributes.word("mode") == "prefill":
        return "gdn.y0_slabs must be of a verify (got mode prefill)"
    for name, kinds in (("next_gate", (DType.BF16,)), ("next_norm_weight", _NORMS)):
        got = site.ports[name].dtype if name in site else None
        if got not in kinds:
            rule = " or ".join(kind.value for kind in kinds)
            return f"gdn.{name} must be {rule} with y0_slabs (got {got.value if got else 'none'})"
    shapes = {
        "next_norm_weight": (DIM,),
        "y0_squares": head_squares(site.attributes.integer("value_heads")),
    }
    for name, shape in shapes.items():
        found = site.ports[name].shape if name in site else None
        if found != shape:
            return f"gdn.{name} must be {shape} with y0_slabs (got {found or 'none'})"
    return ""


def heads(site: CallSite) -> int:
    """Returns the value heads of a thread block: the largest number, up to MOST_HEADS, that divides
    the value heads of a key head.
    """
    return max(_divisors(site))


def _divisors(site: CallSite) -> list[int]:
    a = site.attributes
    ratio = a.integer("value_heads") // a.integer("key_heads")
    return [n for n in range(1, MOST_HEADS + 1) if ratio % n == 0]


def shared_bytes(rows: int, held: int, count: int) -> int:
    """Returns the shared memory of a verify block, bytes: the barriers; in float32 the state of the
    block's `count` heads, q, k, v and gates of the rows, and k, d and decay of `held` records; in
    bf16 the rows before the convolution and the three rows before them.
    """
    record = -(-(DIM + count * SLAB + GATES) // 32) * 32
    wide = count * DIM * SLAB + rows * (record + DIM) + held * record
    return BARRIERS + 4 * wide + 2 * (rows + TAPS - 1) * (2 * DIM + count * SLAB)


def alone_bytes(device: Device) -> int:
    """Returns an amount of shared memory, bytes, of which two blocks do not fit on a multiprocessor
    together with what the driver reserves for each.

    A block starts wherever one of the previous launch has exited, so that without this some blocks
    would share a multiprocessor, and finish later, while other multiprocessors are empty. A block
    still fits beside one of the preceding product, which may run longer than its neighbours.
    """
    return device.shared // 2


def launches(site: CallSite, device: Device) -> tuple[Launch, ...]:
    """Returns the launches of a call. Verify: one launch, which also leaves the rows as the next
    product reads them, with the weight of its norm by head and the silu of its gate applied, if the
    call has `y0_slabs`. Prefill: one that computes the matrices of every chunk, then the walk over
    the chunks.
    """
    if site.attributes.word("mode") == "prefill":
        return _prefill(site)
    a = site.attributes
    choice = device.choice(site) or _rule(site, device)
    rows, held, count = site.size("qkv", 0), site.size("record_qkv", 0), choice["heads"]
    blocks = _blocks(site, count)
    states = a.word("saves") == "states"
    shared = _own_bytes(site, count)
    if choice["alone"]:
        shared = max(shared, alone_bytes(device))
    return (
        Launch(
            kernel="gdn_rows",
            grid=(blocks, 1, 1),
            threads=VERIFY_THREADS,
            arguments=(
                *(Pointer(port) for port in _PORTS),
                *_OFFSETS,
                *prefetch_next(site, blocks),
                Int(rows),
                Int(held),
                Real(_next_offset(site)),
            ),
            shared=shared,
            defines={
                "SAVES_STATES": int(states),
                "KEY_HEADS": a.integer("key_heads"),
                "VALUE_HEADS": a.integer("value_heads"),
                "NEXT": _next(site),
                "HEADS": count,
                "SLAB": SLAB,
                "THREADS": VERIFY_THREADS,
                "MOST_ROWS": MOST_ROWS,
                "GATES": GATES,
                "BARRIER_BYTES": BARRIERS,
            }
            | {f"{name.upper()}_F32": _wide(site, name) for name in _PLAIN},
            source="decode.cu",
        ),
    )


def _rule(site: CallSite, device: Device) -> Choice:
    """The choice for a verify: value heads of a block, and whether it is alone of its launch on a
    multiprocessor.
    """
    count = heads(site)
    return {"heads": count, "alone": int(_blocks(site, count) <= device.multiprocessors)}


def candidates(site: CallSite, device: Device, active: ActiveClusters | None) -> tuple[Choice, ...]:
    """Returns the `Candidates` of a call; a prefill has none."""
    if site.attributes.word("mode") == "prefill":
        return ()
    rule, least = _rule(site, device), alone_bytes(device)
    every = [
        {"heads": count, "alone": alone}
        for count in reversed(_divisors(site))
        for alone in (1, 0)
        if not alone or _own_bytes(site, count) < least
    ]
    return (rule, *(choice for choice in every if choice != rule))


def _blocks(site: CallSite, count: int) -> int:
    """Blocks of a verify launch with `count` value heads each."""
    return site.attributes.integer("value_heads") // count * (DIM // SLAB)


def _own_bytes(site: CallSite, count: int) -> int:
    """Shared memory that a verify block of `count` value heads uses, bytes."""
    held = 0 if site.attributes.word("saves") == "states" else site.size("record_qkv", 0)
    return shared_bytes(site.size("qkv", 0), held, count)


def _next(site: CallSite) -> int:
    """How the call leaves its rows for the next product, as NEXT in epilogue.cuh."""
    if "y0_slabs" not in site:
        return 0
    return 2 if site.ports["next_norm_weight"].dtype is DType.F32 else 1


def _next_offset(site: CallSite) -> float:
    return site.attributes.real("next_norm_offset") if "y0_slabs" in site else 0.0


def _sizes(site: CallSite) -> tuple[Int, ...]:
    """Returns arguments for the numbers of heads and the types of the plain parameters."""
    a = site.attributes
    return (
        Int(a.integer("key_heads")),
        Int(a.integer("value_heads")),
        *(Int(_wide(site, name)) for name in _PLAIN),
    )


def _wide(site: CallSite, name: str) -> int:
    """Returns 1 if a plain parameter is float32, else 0."""
    return int(site.ports[name].dtype is DType.F32)


def _prefill(site: CallSite) -> tuple[Launch, ...]:
    a = site.attributes
    keys, values, rows = a.integer("key_heads"), a.integer("value_heads"), site.size("qkv", 0)
    chunks = -(-rows // CHUNK)
    scratch = (
        Scratch("keys", chunks * keys * KEY_BYTES),
        Scratch("matrices", chunks * values * MATRIX_BYTES),
    )
    return (
        Launch(
            kernel="gdn_chunks",
            grid=(keys, chunks, 1),
            threads=THREADS,
            arguments=(
                *(Pointer(port) for port in _CHUNK_PORTS),
                *_OFFSETS,
                *scratch,
                *_sizes(site),
            ),
            shared=KEY_BYTES + 2 * CHUNK * DIM * 4,
            source="prefill_chunks.cu",
        ),
        Launch(
            kernel="gdn_prefill",
            grid=(values, DIM // WALK_SLAB, 1),
            threads=THREADS,
            arguments=(
                *(Pointer(port) for port in _WALK_PORTS),
                *_OFFSETS,
                *scratch,
                Pointer("o"),
                Pointer("next_state"),
                Int(rows),
                *_sizes(site)[:3],
            ),
            shared=2 * (KEY_BYTES + MATRIX_BYTES) + CHUNK * (WALK_SLAB + 4) * 4 + 16,
            source="prefill.cu",
        ),
    )


def _verifies(a: Mapping[str, Attribute]) -> bool:
    return a["mode"] == "verify"


KERNELS = OpKernels(
    OP,
    launches,
    refuse,
    candidates,
    in_place=frozenset({"next_state"}),
    prefetches=_verifies,
    fuses_head_norm=_verifies,
)
