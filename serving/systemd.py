"""Telling systemd how the service is.

The one place that reads the environment: NOTIFY_SOCKET and WATCHDOG_USEC are how systemd names its
socket to a service, and there is no other way to learn them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress

Notify = Callable[[str], None]
ALIVE = "WATCHDOG=1"
WAIT_S = 1.0
"""For a reader that is slow to make room, where the word comes once only."""


def notifier() -> Notify:
    """Sends a state ("READY=1", "WATCHDOG=1", "STOPPING=1"); does nothing outside systemd."""
    address = os.environ.get("NOTIFY_SOCKET", "")  # noqa: TID251
    if not address.startswith(("/", "@")):
        return lambda state: None
    path = "\0" + address[1:] if address.startswith("@") else address

    def send(state: str) -> None:
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
        # A failure needs no word: systemd notices a silent service by itself.
        with suppress(OSError), socket.socket(socket.AF_UNIX, kind) as out:
            # The next sign of life comes in a second, and nothing is answered meanwhile.
            out.settimeout(0.0 if state == ALIVE else WAIT_S)
            out.sendto(state.encode(), path)

    return send
