"""The port of a tcp endpoint, for servers and clients."""

from __future__ import annotations

import re


def has_port(endpoint: str) -> bool:
    """Whether an endpoint ends in a port of 1 to 65535. libzmq takes any number, modulo 65536, and
    ignores letters after it.
    """
    port = endpoint.rpartition(":")[2]
    return re.fullmatch("[0-9]{1,5}", port) is not None and 1 <= int(port) <= 65535
