"""Detection of peers that vanish silently: by TCP keepalive, not by ZMTP heartbeats.

With heartbeats on, libzmq 4.3 aborts the process if a peer leaves while RCVHWM messages wait to be
read: the heartbeat timer writes to a connection that has failed (`Assertion failed: !_io_error`).
Heartbeats would also disconnect a reader that is only slow, since its answers to them wait behind
the messages it has not read. Source: zeromq/libzmq issues 3937, 4364, 4767.
"""

from __future__ import annotations

import zmq

SILENT_S = 5
"""A machine that does not answer for this long is treated as gone."""
UNREAD_MS = 30_000
"""A peer that takes none of the data sent to it for this long is disconnected."""
KEEPALIVE_EVERY_S = 1

KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: KEEPALIVE_EVERY_S,
    zmq.TCP_KEEPALIVE_INTVL: KEEPALIVE_EVERY_S,
    zmq.TCP_KEEPALIVE_CNT: SILENT_S - 1,
    zmq.TCP_MAXRT: UNREAD_MS,
}
"""Socket options for tcp. For ipc the kernel reports a lost peer by itself."""
