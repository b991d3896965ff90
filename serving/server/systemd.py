"""Reports to systemd the state of the service.

The only place that reads the environment: systemd passes the path of its notification socket in
NOTIFY_SOCKET, and there is no other way to learn it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress

Notify = Callable[[str], None]
ALIVE = "WATCHDOG=1"


def notifier() -> Notify:
    """Return a function that sends a state ("READY=1", "WATCHDOG=1", "STOPPING=1") to systemd, and
    does nothing outside systemd.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")  # noqa: TID251
    if not address.startswith(("/", "@")):
        return lambda state: None
    path = "\0" + address[1:] if address.startswith("@") else address

    def send(state: str) -> None:
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
        # A failure is ignored: systemd's watchdog notices a silent service.
        with suppress(OSError), socket.socket(socket.AF_UNIX, kind) as out:
            out.setblocking(False)
            out.sendto(state.encode(), path)

    return send
