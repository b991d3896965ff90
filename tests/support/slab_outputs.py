"""Calls that also leave their rows in slabs, the order in which the next linear reads them."""

from __future__ import annotations

from dataclasses import replace

from support.kernel_runner import Call, shaped, slabs

from thor_dflash.plugins.launch import CallSite


def leaving(call: Call, rows: str) -> Call:
    """Returns the call with one more output wanted: its output `rows` in slabs."""
    left = slabs(call.want[rows])
    ports = {**call.site.ports, "y0_slabs": shaped(left)}
    site = CallSite(call.site.op, call.site.attributes, ports)
    return replace(call, site=site, want={**call.want, "y0_slabs": left})
