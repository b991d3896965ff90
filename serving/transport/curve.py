"""Access control: which endpoints a server may listen on, CURVE keys, and the shared secret."""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import stat
import struct
from contextlib import ExitStack
from pathlib import Path
from shlex import quote

import zmq
from zmq.utils import z85

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.serving.transport.endpoints import has_port

SERVER, CLIENT = "server", "client"
SECRET, PUBLIC = ".secret", ".public"
CLIENTS = "clients"
"""Subdirectory with the public keys of the clients that may connect."""


def check(config: ServeConfig) -> None:
    """Refuse a configuration that lets unauthorised clients control the robot.

    Raises:
        ConfigError: naming the endpoint or option.
    """
    for endpoint in config.bind:
        if not endpoint.startswith(("tcp://", "ipc://")):
            raise ConfigError(f"serve.bind must be tcp:// or ipc:// endpoints (got {endpoint})")
        if endpoint.startswith("ipc://@"):
            raise ConfigError(
                "serve.bind must be an ipc path in a directory: a name that begins with @ is in "
                f"none, and everybody on this machine may connect (got {endpoint})"
            )
        if not (endpoint.startswith("ipc://") or endpoint.endswith(":*") or has_port(endpoint)):
            raise ConfigError(
                "serve.bind must end in a port of 1 to 65535, or * for any that is free "
                f"(got {endpoint})"
            )
        if not (is_local(endpoint) or config.curve or config.insecure):
            raise ConfigError(
                f"serve.bind must be loopback or ipc, or have serve.curve keys (thor-dflash "
                f"keygen), or serve.insecure (got {endpoint})"
            )
    exposed = [e for e in config.bind if not is_local(e)]
    if config.token_file and exposed and not config.curve:
        raise ConfigError(
            "serve.token_file must go with loopback, ipc or CURVE endpoints: a secret sent in "
            f"the clear is none (got {exposed[0]})"
        )
    open_ = [e for e in config.bind if not e.startswith("ipc://")]
    if config.allow_admin and open_ and not config.curve:
        raise ConfigError(
            f"serve.allow_admin must go with ipc or CURVE endpoints only (got {open_[0]})"
        )


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


def read_token(path: str) -> str | None:
    """Return the shared secret, or None if no file is configured.

    Raises:
        ConfigError: the file is missing, empty, not ASCII, or accessible to other users.
    """
    return _private(Path(path)).strip() or _fail(path) if path else None


def _fail(path: str) -> str:
    raise ConfigError(f"{path} must hold a secret (got an empty file)")


def _private(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"{path} must be readable by its owner alone (got mode {stat.S_IMODE(mode):04o}); "
                f"chmod 600 {quote(str(path))}"
            )
        return path.read_text(encoding="ascii")
    except OSError as e:
        raise ConfigError(f"{path} must be a readable file (got: {e.strerror})") from e
    except ValueError as e:
        raise ConfigError(f"{path} must be ASCII text (got: {e})") from e


def token_fits(token: str | None, given: object) -> bool:
    """Whether `given` is the secret, in constant time. Any value fits a `token` of None."""
    if token is None:
        return True
    text = given if isinstance(given, str) else ""
    return hmac.compare_digest(token.encode(), text.encode())


def keygen(directory: Path) -> None:
    """Make CURVE keys for a server and for one client, and allow that client to connect. On failure
    no key is left behind.

    Raises:
        ConfigError: keys exist already, or the directory cannot be written.
    """
    with ExitStack() as failed:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            clients = directory / CLIENTS
            clients.mkdir(mode=0o700, exist_ok=True)
            for name in (SERVER, CLIENT):
                public, secret = (key.decode() for key in zmq.curve_keypair())
                _write(directory / f"{name}{SECRET}", secret, failed)
                _write(directory / f"{name}{PUBLIC}", public, failed)
                if name == CLIENT:
                    _write(clients / f"{name}{PUBLIC}", public, failed)
        except OSError as e:
            raise ConfigError(
                f"{directory} must be a directory without keys, in which they can be written "
                f"(got: {e.strerror}: {e.filename or directory})"
            ) from e
        failed.pop_all()


def _write(path: Path, key: str, failed: ExitStack) -> None:
    # Created with its final mode, so that other users can never read it.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    failed.callback(path.unlink)
    with os.fdopen(fd, "w") as file:
        file.write(key + "\n")


def public_key(path: Path) -> bytes:
    """Read a public key from its file.

    Raises:
        ConfigError: the file cannot be read or holds no key.
    """
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
    return _z85(path, _private(path).strip().encode())


def _z85(path: Path, key: bytes) -> bytes:
    if len(key) != 40:
        raise ConfigError(f"{path} must hold a key of 40 letters (got {len(key)})")
    try:
        z85.decode(key)
    except (KeyError, struct.error) as e:  # not a Z85 character, or five that exceed 32 bits
        # No part of the key is shown: it may be secret.
        raise ConfigError(f"{path} must hold a key in Z85 (got 40 other letters)") from e
    return key


def allowed(directory: Path) -> frozenset[bytes]:
    """Return the public keys of the clients that may connect.

    Raises:
        ConfigError: a damaged key, or no key at all.
    """
    keys = frozenset(public_key(p) for p in sorted((directory / CLIENTS).glob(f"*{PUBLIC}")))
    if not keys:
        raise ConfigError(
            f"{directory / CLIENTS} must hold public keys of clients (got none); "
            f"thor-dflash keygen makes such a directory"
        )
    return keys


def check_free(endpoint: str) -> None:
    """Refuse an ipc path where a server listens or another file lies: zmq would silently delete it.

    Raises:
        ConfigError: a server answers there, or the file is not a socket.
    """
    path = endpoint.removeprefix("ipc://")
    if endpoint == path or not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ConfigError(
            f"serve.bind must be a path where there is no other file (got {endpoint})"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return  # left over from a server that ended; zmq replaces it
    raise ConfigError(f"serve.bind must be free (got {endpoint}, where a server answers)")
