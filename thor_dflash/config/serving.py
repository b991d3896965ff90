"""The configuration sections of the plan server and the HTTP gateway."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from thor_dflash.core.errors import ConfigError

DAY_S = 86_400
"""Longest time of a server, s, the same as of a request's deadline. Operating systems do not accept
much longer ones."""
MOST = (1 << 31) - 1
"""Largest size or count. Numbers of the wire protocol and of libzmq have 64 bits, and some are
shifted."""


def _within(key: str, value: float, low: int, high: int = MOST) -> None:
    if not low <= value <= high:  # true for NaN as well
        raise ConfigError(f"{key} must be {low} to {high} (got {value})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """How plans are served. The wire protocol is in docs/reference/protocol.md."""

    bind: tuple[str, ...] = ("tcp://127.0.0.1:5571",)
    """Endpoints. Loopback by default, because a planner moves a robot. GR00T servers use 5555."""
    curve: str = ""
    """Directory made by `thor-dflash keygen`; "": no encryption."""
    insecure: bool = False
    """Allow other machines to connect without CURVE."""
    token_file: str = ""
    """File with a secret that every request must carry; "": none is required."""
    allow_admin: bool = False
    """Accept drain and shutdown requests, on ipc and CURVE endpoints only."""
    max_queue: int = 4
    """Maximum waiting plans, over all sessions. A robot prefers a refusal to a long wait."""
    max_message: int = 1 << 20
    """Largest frame, bytes; a peer that sends a larger one is disconnected."""
    max_tokens: int = 512
    """Default length limit of an answer, thinking not counted, tokens."""
    thinking: Literal["on", "off", "auto"] = "auto"
    """Default for requests; auto: think if the deadline leaves time."""
    thinking_budget: int = 1024
    """Default length limit of thinking, tokens."""
    watchdog_s: float = 10.0
    """A step that takes longer means a dead device: the process ends, for systemd to restart it."""
    drain_s: float = 30.0
    """Time that accepted plans get to finish after SIGTERM. A plan of the 27B takes 10 to 20 s."""
    prefix_mb: int = 1024
    """Memory for pinned prefixes, MB: about four of 2000 tokens of the 27B."""
    prefix_dir: str = ""
    """Directory, used by this server alone, for prefixes that clients ask to persist; "": such
    requests are refused. The files hold the prompts unencrypted."""
    cancel_ms: int = 250
    """Target for the time of a prefill step, and so for the delay of a cancel during one, ms. The
    largest of the package's sizes that meets it is used. Two to three verify cycles on a Thor."""
    yield_us: int = 0
    """Idle time before each step, us, for other users of the device. Slows plans down."""
    events: str = ""
    """File that gets one JSON line per event, without prompts; "": none."""
    trace_slow_ms: int = 0
    """A plan that takes longer leaves a trace of its steps in `trace_dir`; 0: none."""
    trace_dir: str = "traces"
    """Directory of the traces, made if `trace_slow_ms` is set. Perfetto and Chrome read them."""
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not self.bind:
            raise ConfigError("serve.bind must have at least one endpoint (got none)")
        _within("serve.max_queue", self.max_queue, 1)
        _within("serve.max_message", self.max_message, 1024)
        _within("serve.max_tokens", self.max_tokens, 1)
        _within("serve.thinking_budget", self.thinking_budget, 0)
        _within("serve.prefix_mb", self.prefix_mb, 0)
        _within("serve.cancel_ms", self.cancel_ms, 1, DAY_S * 1000)
        _within("serve.yield_us", self.yield_us, 0, DAY_S * 1_000_000)
        _within("serve.trace_slow_ms", self.trace_slow_ms, 0, DAY_S * 1000)
        _within("serve.drain_s", self.drain_s, 0, DAY_S)
        if not 0 < self.watchdog_s <= DAY_S:
            raise ConfigError(
                f"serve.watchdog_s must be above 0 and at most {DAY_S} (got {self.watchdog_s})"
            )
        if 1e-6 * self.yield_us >= self.watchdog_s:  # it is part of every step
            raise ConfigError(
                f"serve.yield_us must be below serve.watchdog_s, {self.watchdog_s:g} s "
                f"(got {self.yield_us})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """OpenAI's HTTP API in front of plan servers."""

    servers: tuple[str, ...] = ("tcp://127.0.0.1:5571",)
    """Plan servers; the least busy one that is ready gets the next request."""
    listen: str = "127.0.0.1:8000"
    """HTTP address. Loopback, as for the plan socket; the port is the usual one of such servers."""
    insecure: bool = False
    """Allow other machines to connect: this HTTP has neither encryption nor authentication."""
    keys: str = ""
    """Directory of the client's CURVE keys; "": the servers use no encryption."""
    token_file: str = ""
    """File with the servers' secret, as their `serve.token_file`; "": they have none."""
    plan_timeout_s: float = 1800.0
    """Longest wait for the answer, or the next streamed piece, of a plan without a deadline. A lost
    server is noticed sooner, by its connection. About six plans (this one, one running, four
    waiting) of at most 1536 tokens, the default, at 5 tokens/s (27B in 16 bits on a slow board)."""

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError("gateway.servers must have at least one endpoint (got none)")
        if twice := [name for name, n in Counter(self.servers).items() if n > 1]:
            raise ConfigError(f"gateway.servers must name each server once (got {twice[0]} again)")
        if not self.plan_timeout_s > 0:
            raise ConfigError(f"gateway.plan_timeout_s must be > 0 (got {self.plan_timeout_s})")
