"""What an endpoint names: its port, and whether only this machine reaches it."""

from __future__ import annotations

import ipaddress
import re


def has_port(endpoint: str) -> bool:
    """Whether an endpoint ends in a port of 1 to 65535. libzmq takes any number, modulo 65536, and
    ignores other characters after it.
    """
    port = endpoint.rpartition(":")[2]
    return re.fullmatch("[0-9]{1,5}", port) is not None and 1 <= int(port) <= 65535


def is_local(endpoint: str) -> bool:
    """Whether only this machine can reach an endpoint."""
    if endpoint.startswith("ipc://"):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a host name, an interface or *: not known to be loopback
