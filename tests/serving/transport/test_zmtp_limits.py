"""The frames of a connection: whatever libzmq sends is allowed, in pieces of any size; messages of
too many frames or bytes are refused at the frame that is too much.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.flood_peers import HELLO

from thor_dflash.serving.transport.zmtp_limits import (
    MAX_ADDRESS,
    MAX_COMMAND,
    MAX_FRAMES,
    FrameLimits,
)

MOST = 10_000
PING = b"\x04\x09\x04PING\x00\x00ab"


def frame(body: bytes, flags: int) -> bytes:
    if len(body) > 255:
        return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


def message(*bodies: bytes) -> bytes:
    return b"".join(frame(body, int(i + 1 < len(bodies))) for i, body in enumerate(bodies))


def allowed(stream: bytes, piece: int) -> int:
    """How many bytes pass, in pieces."""
    limits = FrameLimits(MOST)
    for at in range(0, len(stream), piece):
        if not limits.allows(stream[at : at + piece]):
            return at
    return len(stream)


BODIES = st.lists(st.binary(max_size=600), min_size=1, max_size=MAX_FRAMES)


@given(st.lists(BODIES | st.none(), max_size=4), st.integers(1, 300))
def test_messages_pass_in_pieces_of_any_size(bodies: list[list[bytes] | None], piece: int) -> None:
    stream = HELLO + b"".join(PING if one is None else message(*one) for one in bodies)
    assert allowed(stream, piece) == len(stream)


@given(st.integers(1, 300))
def test_one_frame_too_many_is_refused(piece: int) -> None:
    begun = HELLO + PING + message(b"", b"{}") + b"\x01\x00" * MAX_FRAMES
    assert allowed(begun, piece) == len(begun)
    assert allowed(begun + b"\x00\x00", piece) < len(begun) + 2


def test_a_message_is_refused_at_the_header_that_makes_it_too_long() -> None:
    most = MOST + MAX_FRAMES * MAX_ADDRESS
    begun = HELLO + frame(b"x" * (most - 10), 1)
    assert allowed(begun + frame(b"y" * 10, 0), 997) == len(begun) + 12
    assert allowed(begun + b"\x00\x0b", len(begun)) == len(begun)


@pytest.mark.parametrize("begin", [b"\x01", b"GET / HTTP/1.1\r\n", HELLO[:10] + b"\x01\x00"])
def test_what_is_no_zmtp_3_is_refused_at_once(begin: bytes) -> None:
    assert allowed(begin, len(begin)) == 0


def test_long_commands_are_refused() -> None:
    fits = frame(b"\x04PING" + bytes(MAX_COMMAND - 5), 4)
    assert allowed(HELLO + fits + fits, 64) == len(HELLO + fits + fits)
    assert allowed(HELLO + frame(bytes(MAX_COMMAND + 1), 4), 64) < len(HELLO) + 64
