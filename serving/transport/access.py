"""Who may connect: the endpoints a server may listen on, and the shared secret of requests. The
keys of clients are in curve.py.
"""

from __future__ import annotations

import hmac
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from shlex import quote

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.serving.transport.endpoints import has_port, is_local


def check_bind(config: ServeConfig) -> None:
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


def check_free(endpoint: str) -> None:
    """Refuse an ipc path where a server listens or another file lies: libzmq would delete it.

    Raises:
        ConfigError: a server answers there, or the file is not a socket.
    """
    path = endpoint.removeprefix("ipc://")
    if endpoint == path:
        return
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(
            f"serve.bind must be a path where there is no other file (got {endpoint})"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return  # left over from a server that ended; libzmq replaces it
    raise ConfigError(f"serve.bind must be free (got {endpoint}, where a server answers)")


def read_token(path: str) -> str | None:
    """Return the shared secret, or None if no file is configured.

    Raises:
        ConfigError: the file is missing, empty, not ASCII, or accessible to other users.
    """
    if not path:
        return None
    if not (token := read_private(Path(path)).strip()):
        raise ConfigError(f"{path} must hold a secret (got an empty file)")
    return token


def check_owned(path: Path) -> None:
    """Refuse a file or directory that other users may write: who writes keys decides who connects.
    Accepts one on a read-only file system, such as the secrets of a container, whatever its mode;
    and what cannot be examined, for its reader to report.

    Raises:
        ConfigError: its group or everybody may write it.
    """
    with suppress(OSError):
        mode = path.stat().st_mode
        fixed = os.statvfs(path).f_flag & os.ST_RDONLY
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not fixed:
            raise ConfigError(
                f"{path} must be writable by its owner alone (got mode {stat.S_IMODE(mode):04o}); "
                f"chmod go-w {quote(str(path))}"
            )


def read_private(path: Path) -> str:
    """Read an ASCII file that no other user may read.

    Raises:
        ConfigError: it is missing, a device, not ASCII, or accessible to other users.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISCHR(mode):  # no advice to change the mode of /dev/null
            raise ConfigError(f"{path} must be a file (got a device)")
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


def token_matches(token: str | None, given: object) -> bool:
    """Whether `given` is the secret, in constant time. Any value matches a `token` of None."""
    if token is None:
        return True
    text = given if isinstance(given, str) else ""
    return hmac.compare_digest(token.encode(), text.encode())
