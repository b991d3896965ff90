"""The options of both clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from thor_dflash.core.errors import ConfigError
from thor_dflash.serving.protocol.codec import MSGPACK, Codec, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a client."""

    timeout_s: float = 5.0
    """Longest wait for a control operation, and for a connection."""
    plan_timeout_s: float = 120.0
    """Longest wait for a plan without a deadline, for the next piece of its stream, or for a
    prefix."""
    retries: int = 3
    """How often a request is sent again after `busy` or a lost connection. With 0 the client does
    not wait for a server that is warming up, either."""
    session: str | None = None
    """The session of requests that name none: the newer plan of a session displaces the older. None
    gives each call a session of its own, so that plans do not displace each other."""
    token: str | None = None
    """The secret for requests that carry none."""
    keys: str = ""
    """Directory with client.secret, client.public and server.public; "" for no encryption."""
    codec: Codec = MSGPACK
    max_message: int = 1 << 20
    """Longest request, bytes beside its images: the server's `limits.max_message`. A longer one
    would close the connection, and thereby cancel every other plan on it."""

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            ConfigError: naming the option.
        """
        for name in ("timeout_s", "plan_timeout_s"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            self._check(name, "a number >= 0", number and value >= 0)
        for name, least in (("retries", 0), ("max_message", 1)):
            value = getattr(self, name)
            self._check(name, f"an integer >= {least}", type(value) is int and value >= least)
        named = isinstance(self.session, str) and 1 <= len(self.session) <= 64
        rule = "a text of 1 to 64 characters, or None"
        self._check("session", rule, named or self.session is None)
        # As a caller without a type checker may have set them.
        token, keys, codec = cast("tuple[object, ...]", (self.token, self.keys, self.codec))
        self._check("token", "a text or None", token is None or isinstance(token, str))
        self._check("keys", "the path of a directory as a text", isinstance(keys, str))
        self._check("codec", "JSON or MSGPACK", isinstance(codec, Codec))

    def _check(self, name: str, rule: str, fits: bool) -> None:
        if not fits:
            # The value of a token is not shown: it may be the secret.
            value = getattr(self, name)
            got = type(value).__name__ if name == "token" else shown(value)
            raise ConfigError(f"Options.{name} must be {rule} (got {got})")
