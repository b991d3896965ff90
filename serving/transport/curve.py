"""CURVE keys of a server and its clients: made, read and checked.

A key file holds the 40 characters (Z85) of one key, as docs/protocol.md promises to clients in any
language; the certificates of `zmq.auth` are of another format.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import zmq
from zmq.utils import z85

from thor_dflash.core.errors import ConfigError
from thor_dflash.serving.transport.access import check_owned, read_private

SERVER, CLIENT = "server", "client"
SECRET, PUBLIC = ".secret", ".public"
CLIENTS = "clients"
"""Subdirectory with the public keys of the clients that may connect."""


def keygen(directory: Path) -> None:
    """Make CURVE keys for a server and for one client, and allow that client to connect.

    Raises:
        ConfigError: keys exist already, or the directory cannot be written.
    """
    clients = directory / CLIENTS
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        clients.mkdir(mode=0o700, exist_ok=True)
        for name, folders in ((SERVER, (directory,)), (CLIENT, (directory, clients))):
            public, secret = (key.decode() for key in zmq.curve_keypair())
            _write(directory / f"{name}{SECRET}", secret)
            for folder in folders:
                _write(folder / f"{name}{PUBLIC}", public)
    except OSError as e:
        raise ConfigError(
            f"{directory} must be a directory without keys, in which they can be written "
            f"(got: {e.strerror}: {e.filename or directory})"
        ) from e


def _write(path: Path, key: str) -> None:
    # Created with its final mode, so that other users can never read it.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(key + "\n")


def public_key(path: Path) -> bytes:
    """Read a public key from its file.

    Raises:
        ConfigError: the file cannot be read, holds no key, or other users may replace it.
    """
    check_owned(path.parent)
    check_owned(path)
    try:
        key = path.read_text(encoding="ascii").strip().encode()
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} must be a public key of `thor-dflash keygen` (got: {e})") from e
    return _z85(path, key)


def secret_key(path: Path) -> bytes:
    """Read a secret key from its file.

    Raises:
        ConfigError: the file cannot be read, holds no key, or is accessible to other users.
    """
    check_owned(path.parent)
    return _z85(path, read_private(path).strip().encode())


def _z85(path: Path, key: bytes) -> bytes:
    if len(key) != 40:
        raise ConfigError(f"{path} must hold a key of 40 characters (got {len(key)})")
    try:
        z85.decode(key)
    except (KeyError, struct.error) as e:  # not a Z85 character, or five that exceed 32 bits
        # No part of the key is shown: it may be secret.
        raise ConfigError(f"{path} must hold a key in Z85 (got 40 others)") from e
    return key


def client_keys(directory: Path) -> frozenset[bytes]:
    """Return the public keys of the clients that may connect.

    Raises:
        ConfigError: a damaged key, no key at all, or other users may add or replace one.
    """
    keys = frozenset(public_key(p) for p in sorted((directory / CLIENTS).glob(f"*{PUBLIC}")))
    if not keys:
        raise ConfigError(
            f"{directory / CLIENTS} must hold public keys of clients (got none); "
            f"thor-dflash keygen makes such a directory"
        )
    return keys
