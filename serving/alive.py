"""How a peer that goes without a word is found out: TCP asks, and no heartbeats of ZMTP.

libzmq 4.3 ends the process where heartbeats are on, RCVHWM messages wait to be read and the peer
goes: the timer of the heartbeat writes to what has already failed (`Assertion failed: !_io_error`).
A reader that is only slow would lose its connection by them, too, since their answers wait behind
what it has not read. Source: zeromq/libzmq issues 3937, 4364, 4767.
"""

from __future__ import annotations

import zmq

SILENT_S = 5
"""A machine that does not answer for so long is gone."""
UNREAD_MS = 30_000
"""A peer that takes nothing of what it is sent for so long is gone, or of no use."""
_EVERY_S = 1

KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: _EVERY_S,
    zmq.TCP_KEEPALIVE_INTVL: _EVERY_S,
    zmq.TCP_KEEPALIVE_CNT: SILENT_S - 1,
    zmq.TCP_MAXRT: UNREAD_MS,
}
"""Options of a socket. Of ipc the kernel knows who is there."""
