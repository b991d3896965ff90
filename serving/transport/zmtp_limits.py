"""Follows the frames of a ZMTP 3 connection without encryption, to refuse what libzmq would collect
without bound: it keeps the frames of a message (64 bytes for each, however short) until the last
has come, and limits neither their number nor their sum.

Source: rfc.zeromq.org, 23/ZMTP.
"""

from __future__ import annotations

MAX_FRAMES = 16
"""Most frames of a message; more than any that is answered (handlers.MAX_ENVELOPE and the body)."""
MAX_ADDRESS = 256
"""Most bytes that the frames before the body may have on average; a routing id has at most 255."""
MAX_COMMAND = 2048
"""Longest command of a peer, bytes. READY holds the name of a socket type and a routing id."""
_GREETING = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


class FrameLimits:
    """The state of one connection."""

    def __init__(self, longest: int) -> None:
        """`longest`: bytes of a message."""
        self._most = longest + MAX_FRAMES * MAX_ADDRESS
        self._head = b""
        """The beginning of a greeting or of a frame's header, of which the rest has yet to come."""
        self._skip = 0
        """Bytes of the frame that have yet to come."""
        self._greeted = False
        self._frames = self._bytes = 0
        """Of the message that has begun."""
        self._last = True
        """Its last frame has begun."""

    @property
    def under_way(self) -> int:
        """Bytes of a message of which a part has come, as far as its frames have begun."""
        return self._bytes if self._skip or not self._last else 0

    def allows(self, data: bytes) -> bool:
        """Whether a connection may go on after it has sent this, too."""
        if self._skip >= len(data):
            self._skip -= len(data)
            return True
        data, self._skip, self._head = self._head + data[self._skip :], 0, b""
        if self._greeted:
            return self._allows_frames(data, 0)
        if not _begins_well(data):
            return False
        if len(data) < _GREETING:
            self._head = data
            return True
        self._greeted = True
        return self._allows_frames(data, _GREETING)

    def _allows_frames(self, data: bytes, at: int) -> bool:
        end = len(data)
        while at < end:
            flags = data[at]
            start = at + (9 if flags & _LONG else 2)
            if start > end:
                self._head = data[at:]
                return True
            size = int.from_bytes(data[at + 1 : start], "big")
            if not self._allows_frame(flags, size):
                return False
            at = start + size
        self._skip = at - end
        return True

    def _allows_frame(self, flags: int, size: int) -> bool:
        if flags & _COMMAND:
            return size <= MAX_COMMAND
        if self._last:
            self._frames = self._bytes = 0
        self._frames += 1
        self._bytes += size
        self._last = not flags & _MORE
        return self._frames <= MAX_FRAMES and self._bytes <= self._most


def _begins_well(greeting: bytes) -> bool:
    """Whether this begins a greeting of version 3, which libzmq has sent since 4.0 of 2013."""
    known = greeting[:1] in (b"", b"\xff") and (len(greeting) < 10 or greeting[9] & 1)
    return bool(known) and (len(greeting) < 11 or greeting[10] >= 3)
