"""The launch of the head's second part: the best id of each row of logits."""

from __future__ import annotations

from thor_dflash.plugins.launch import CallSite, Device, Int, Launch, Pointer, Scratch

THREADS = 256
"""Threads of a block, which searches one slice of a row."""

SLICE = 8192
"""Logits in a slice; the same on every device."""

DEFINES = {"SLICE_THREADS": THREADS, "SLICE": SLICE}


def slices(width: int) -> int:
    """Returns the number of slices in a row of `width` logits."""
    return -(-width // SLICE)


def best_launches(site: CallSite, device: Device, logits_port: str) -> tuple[Launch, ...]:
    """Returns one launch that computes port `best`, int32 [T], from float32 logits [T, V] at port
    `logits_port`.
    """
    del device
    rows, width = site.ports[logits_port].shape
    limit = min(site.attributes.integer("vocab") or width, width)
    return (
        Launch(
            kernel="head_best",
            grid=(slices(limit), rows, 1),
            threads=THREADS,
            arguments=(
                Pointer(logits_port),
                Pointer("id_map"),
                Pointer("best"),
                Scratch("best_found", 8 * rows * slices(limit)),
                Scratch("best_arrivals", 4 * rows, zeroed=True),
                Int(width),
                Int(limit),
            ),
            source="argmax.cu",
            defines=DEFINES,
        ),
    )
