"""Who may use the gateway: where it listens, host names, API keys."""

from __future__ import annotations

import hmac
import ipaddress
import re
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from thor_dflash.config.serving import GatewayConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.message_text import cut, visible
from thor_dflash.serving.gateway import replies
from thor_dflash.serving.protocol.errors import bad_request
from thor_dflash.serving.transport.access import read_private
from thor_dflash.serving.transport.endpoints import is_local

OPEN = ("/health",)
"""Paths that need no key: probes of containers have none."""


def listen_at(config: GatewayConfig) -> tuple[str, int]:
    """Return the host and port to listen on.

    Raises:
        ConfigError: malformed, or other machines reach it and there is neither a key nor
            gateway.insecure.
    """
    host, _, port = config.listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"gateway.listen must be HOST:PORT (got {config.listen})")
    if not (is_local(f"tcp://{host}:{port}") or config.api_key_file or config.insecure):
        raise ConfigError(
            "gateway.listen must be loopback, or have gateway.api_key_file or gateway.insecure "
            f"(got {config.listen})"
        )
    return host.strip("[]"), int(port)


def middleware(config: GatewayConfig) -> list[Middleware]:
    """Return the checks before every request.

    Raises:
        ConfigError: a malformed host name, or a file of keys that holds none or that others may
            read.
    """
    for name in config.hosts:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise ConfigError(f"gateway.hosts must be host names without a port (got {name})")
    found = [] if config.insecure else [Middleware(AllowedHosts, config=config)]
    if config.api_key_file:
        keys = read_private(Path(config.api_key_file)).split()
        if not keys:
            raise ConfigError(f"{config.api_key_file} must hold a key (got an empty file)")
        found.append(Middleware(ApiKeys, keys=[key.encode() for key in keys]))
    return found


class AllowedHosts:
    """Refuses requests for other hosts than this machine's loopback and gateway.hosts. A web page
    may let its own name resolve to this machine; to the browser the gateway then belongs to that
    page (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, config: GatewayConfig) -> None:
        self._app = app
        self._names = {name.lower() for name in config.hosts}
        self._addresses = bool(config.api_key_file)
        """Whether any IP address is allowed. No page can have one that is this machine's."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with status 421."""
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host")
            if host is not None and not self._allows(host):  # a browser always names one
                rule = "the host must be a loopback name or one of gateway.hosts"
                text = f"{rule} (got {visible(cut(host)) or 'none'})"
                await replies.refused(bad_request(text), status=421)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _allows(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self._names or is_local(f"tcp://{name}:0") or self._is_address(name)

    def _is_address(self, name: str) -> bool:
        try:
            return self._addresses and bool(ipaddress.ip_address(name))
        except ValueError:
            return False


class ApiKeys:
    """Refuses requests without one of the keys as `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: list[bytes]) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with status 401."""
        if scope["type"] == "http" and scope["path"] not in OPEN:
            header = Headers(scope=scope).get("authorization", "")
            if not self._admits(header):
                await replies.no_key(given=bool(header))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admits(self, header: str) -> bool:
        given = api_key(header)
        # Each is compared, in constant time: how long it takes tells nothing about a key.
        found = [hmac.compare_digest(key, given or b"") for key in self._keys]
        return given is not None and any(found)


def api_key(header: str) -> bytes | None:
    """Return the API key in an Authorization header; None if it holds none."""
    scheme, _, key = header.partition(" ")
    return key.strip().encode() if scheme.lower() == "bearer" else None
