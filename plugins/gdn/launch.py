"""gdn on a GPU: one launch; a block works on some columns of one key head's value heads."""

from __future__ import annotations

from thor_dflash.plugins.launch import At, Device, Int, Launch, Site
from thor_dflash.tensors import DType

IN_PLACE: frozenset[str] = frozenset({"next_state"})
"""Outputs written over their input."""

TOLERANCE = 2.0**-7
"""Largest error, relative to the largest value of the output: o is bf16, and a value between two of
its numbers may go to the other one. Everything else is float32 and some 1e-6 off."""

DIM = 128
"""Key and value dimension of a head."""
TAPS = 4
MOST_ROWS = 32
"""Of a block to verify, and of the records of one."""
PIECE = 32
"""Rows of a prefill that are in shared memory at a time."""
COLUMNS = 4
"""Of a warp; must agree with kernel.cu, as must MOST_HEADS."""
MOST_HEADS = 2
WARPS = (4, 8, 12, 16)
"""Of a block: whole multiples of the 128 threads that take the key head's channels in pairs."""
PROLOGUE_WARPS = 2.5
"""What convolution and norms of a block cost, in warps of the recurrence."""

_PORTS = (
    "qkv",
    "b",
    "a",
    "conv_weight",
    "a_log",
    "dt_bias",
    "accepted",
    "valid",
    "state",
    "tail",
    "record_qkv",
    "record_k",
    "record_d",
    "record_decay",
    "states",
    "o",
    "next_state",
    "next_tail",
    "next_record_qkv",
    "next_record_k",
    "next_record_d",
    "next_record_decay",
    "next_states",
)


def refuse(site: Site) -> str:
    """Why the kernels do not take this call; empty where they do."""
    a = site.attributes
    for name in ("qkv", "b", "a", "tail", "record_qkv"):
        if (dtype := site.ports[name].dtype) is not DType.BF16:
            return f"gdn.{name} must be bfloat16 (got {dtype.value})"
    for name in ("conv_weight", "a_log", "dt_bias"):
        if (dtype := site.ports[name].dtype) not in (DType.BF16, DType.F32):
            return f"gdn.{name} must be bfloat16 or float32 (got {dtype.value})"
    for name, size in (("key_dim", DIM), ("value_dim", DIM), ("conv_kernel", TAPS)):
        if (value := a.integer(name)) != size:
            return f"gdn.{name} must be {size} (got {value})"
    if (heads := a.integer("value_heads")) % a.integer("key_heads"):
        return f"gdn.value_heads must be a multiple of key_heads (got {heads})"
    if (held := site.size("record_qkv", 0)) > MOST_ROWS:
        return f"gdn.record_qkv must be at most {MOST_ROWS} rows (got {held})"
    rows = site.size("qkv", 0)
    if a.word("mode") == "verify" and rows > MOST_ROWS:
        return f"gdn.qkv must be at most {MOST_ROWS} rows in verify mode (got {rows})"
    return ""


def warps(site: Site, device: Device) -> int:
    """Warps of a block: the number with the shortest work of the busiest multiprocessor."""

    def cost(count: int) -> float:
        blocks = site.attributes.integer("key_heads") * slabs(site, count)
        return -(-blocks // device.multiprocessors) * (count + PROLOGUE_WARPS)

    return min(WARPS, key=cost)


def slabs(site: Site, count: int) -> int:
    """Blocks of `count` warps that cover the columns of a key head's value heads."""
    a = site.attributes
    columns = a.integer("value_heads") // a.integer("key_heads") * DIM
    return -(-columns // (count * COLUMNS))


def shared_bytes(rows: int, count: int) -> int:
    """q, k and v of the rows, their gates and k . q, float32."""
    return rows * 4 * (2 * DIM + count * COLUMNS + 2 * MOST_HEADS + 1)


def launches(site: Site, device: Device) -> tuple[Launch, ...]:
    """One launch: x key heads, y slabs of their columns."""
    a = site.attributes
    rows, held = site.size("qkv", 0), site.size("record_qkv", 0)
    prefill = a.word("mode") == "prefill"
    piece = max(PIECE if prefill else rows, held)
    count = warps(site, device)
    plain = (
        Int(int(site.ports[name].dtype is DType.F32)) for name in ("conv_weight", "a_log", "dt_bias")
    )
    return (
        Launch(
            kernel="gdn_rows",
            grid=(a.integer("key_heads"), slabs(site, count), 1),
            threads=32 * count,
            arguments=(
                *(At(port) for port in _PORTS),
                Int(rows),
                Int(piece),
                Int(a.integer("key_heads")),
                Int(a.integer("value_heads")),
                *plain,
            ),
            shared=shared_bytes(piece, count),
            defines={"PREFILL": int(prefill), "SAVES_STATES": int(a.word("saves") == "states")},
        ),
    )
