"""gdn on a GPU: a block to verify is one launch, a prefill two."""

from __future__ import annotations

from thor_dflash.plugins.launch import At, Device, Int, Launch, Scratch, Shift, Site, ahead
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
SLAB = 16
"""Columns of each of its value heads that a block of a verify has; as in block.cuh."""
VERIFY_THREADS = 256
"""Of a block of a verify."""
THREADS = 128
"""Of a block of a prefill."""
MOST_HEADS = 3
"""Value heads of such a block."""
GATES = 8
"""Floats of a row's gates."""
BARRIERS = 128
"""Bytes of the barriers of a block of a verify; as in block.cuh."""

CHUNK = 32
"""Rows of a prefill's chunk; this and what follows must agree with chunk.cuh."""
WALK_SLAB = 64
"""Columns of a block of the walk."""
KEY_BYTES = 4 * CHUNK * DIM * 2
"""K and Q of a chunk and key head, in bf16 pairs."""
MATRIX_BYTES = 4 * CHUNK * CHUNK * 2 + 2 * CHUNK * 4
"""T and P of a chunk and value head, in bf16 pairs, and two float32 a row."""

_PORTS = (
    "qkv",
    "b",
    "a",
    "conv_weight",
    "a_log",
    "dt_bias",
    "accepted",
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
_RECORDS = ("record_qkv", "record_k", "record_d", "record_decay", "states")
_SHIFTS = (
    Shift(("tail", "next_tail")),
    Shift((*_RECORDS, *(f"next_{name}" for name in _RECORDS))),
)
"""Not all of these ports are in every call."""
_PLAIN = ("conv_weight", "a_log", "dt_bias")
_CHUNK_PORTS = (
    *("qkv", "b", "a", *_PLAIN, "accepted", "valid", "tail", "record_qkv", "next_tail"),
)
_WALK_PORTS = (
    *("qkv", "conv_weight", "accepted", "valid", "state", "tail", "record_qkv"),
    *("record_k", "record_d", "record_decay", "states"),
)


def refuse(site: Site) -> str:
    """Why the kernels do not take this call; empty where they do."""
    return _refuse_types(site) or _refuse_sizes(site)


def _refuse_types(site: Site) -> str:
    for name in ("qkv", "b", "a", "tail", "record_qkv"):
        if (dtype := site.ports[name].dtype) is not DType.BF16:
            return f"gdn.{name} must be bfloat16 (got {dtype.value})"
    for name in _PLAIN:
        if (dtype := site.ports[name].dtype) not in (DType.BF16, DType.F32):
            return f"gdn.{name} must be bfloat16 or float32 (got {dtype.value})"
    return ""


def _refuse_sizes(site: Site) -> str:
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


def heads(site: Site) -> int:
    """Value heads of a block: the most that divide a key head's evenly."""
    a = site.attributes
    ratio = a.integer("value_heads") // a.integer("key_heads")
    return max(n for n in range(1, MOST_HEADS + 1) if ratio % n == 0)


def shared_bytes(rows: int, held: int, count: int) -> int:
    """The barriers. The state of a block's `count` heads; q, k, v and gates of the rows, as much
    but q of the records: float32. The rows before the convolution and the three before them: bf16.
    """
    record = -(-(DIM + count * SLAB + GATES) // 32) * 32
    wide = count * DIM * SLAB + rows * (record + DIM) + held * record
    return BARRIERS + 4 * wide + 2 * (rows + TAPS - 1) * (2 * DIM + count * SLAB)


def alone_bytes(device: Device) -> int:
    """Shared memory with which a block keeps others of its launch off its multiprocessor: two, and
    what the driver takes for each, do not fit. Two that share one end later, and a block goes
    wherever one of the launch before has left: some would share one while others stand empty. There
    is still room beside a block of a product, which may end later than its neighbour.
    """
    return device.shared // 2


def launches(site: Site, device: Device) -> tuple[Launch, ...]:
    """Verify: one launch. Prefill: the matrices of every chunk, then the walk over the chunks."""
    if site.attributes.word("mode") == "prefill":
        return _prefill(site)
    a = site.attributes
    rows, held, count = site.size("qkv", 0), site.size("record_qkv", 0), heads(site)
    blocks = a.integer("value_heads") // count * (DIM // SLAB)
    shared = shared_bytes(rows, held, count)
    if blocks <= device.multiprocessors:
        shared = max(shared, alone_bytes(device))
    return (
        Launch(
            kernel="gdn_rows",
            grid=(blocks, 1, 1),
            threads=VERIFY_THREADS,
            arguments=(
                *(At(port) for port in _PORTS),
                *_SHIFTS,
                *ahead(site, blocks),
                Int(rows),
                Int(held),
            ),
            shared=shared,
            defines={
                "SAVES_STATES": int(a.word("saves") == "states"),
                "KEY_HEADS": a.integer("key_heads"),
                "VALUE_HEADS": a.integer("value_heads"),
            }
            | {f"{name.upper()}_F32": _wide(site, name) for name in _PLAIN},
        ),
    )


def _sizes(site: Site) -> tuple[Int, ...]:
    """Heads and the types of the plain parameters."""
    a = site.attributes
    return (
        Int(a.integer("key_heads")),
        Int(a.integer("value_heads")),
        *(Int(_wide(site, name)) for name in _PLAIN),
    )


def _wide(site: Site, name: str) -> int:
    """1 where a plain parameter is float32."""
    return int(site.ports[name].dtype is DType.F32)


def _prefill(site: Site) -> tuple[Launch, ...]:
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
            arguments=(*(At(port) for port in _CHUNK_PORTS), *_SHIFTS, *scratch, *_sizes(site)),
            shared=KEY_BYTES + 2 * CHUNK * DIM * 4,
            source="chunks.cu",
        ),
        Launch(
            kernel="gdn_prefill",
            grid=(values, DIM // WALK_SLAB, 1),
            threads=THREADS,
            arguments=(
                *(At(port) for port in _WALK_PORTS),
                *_SHIFTS,
                *scratch,
                At("o"),
                At("next_state"),
                Int(rows),
                *_sizes(site)[:3],
            ),
            shared=2 * (KEY_BYTES + MATRIX_BYTES) + CHUNK * (WALK_SLAB + 4) * 4 + 16,
            source="prefill.cu",
        ),
    )
