"""The sections of the configuration that say how plans are served."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from thor_dflash.errors import ConfigError

DAY_S = 86_400
"""Longest time of a server, s, as of a request's deadline. Far longer ones are none to a system."""
MOST = (1 << 31) - 1
"""Largest size and count. The wire's numbers and libzmq's have 64 bits, some with shifts."""


def _within(key: str, value: float, low: int, high: int = MOST) -> None:
    if not low <= value <= high:  # nor is NaN
        raise ConfigError(f"{key} must be {low} to {high} (got {value})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """How plans are served. The wire protocol is in docs/protocol.md."""

    bind: tuple[str, ...] = ("tcp://127.0.0.1:5571",)
    """Endpoints. Loopback: a planner moves a robot. 5555 would be a GR00T server's."""
    curve: str = ""
    """Directory of `thor-dflash keygen`; "" serves without encryption."""
    insecure: bool = False
    """Allow other machines to connect without CURVE."""
    token_file: str = ""
    """File holding a secret that every request must name; "" asks for none."""
    allow_admin: bool = False
    """Answer drain and shutdown. On ipc and CURVE endpoints only."""
    max_queue: int = 4
    """Plans waiting, over all sessions. A robot would rather hear no than wait for its turn."""
    max_message: int = 1 << 20
    """Largest frame, bytes; a peer that sends a larger one is disconnected."""
    max_tokens: int = 512
    """Longest answer where a request does not say, thinking not counted, tokens."""
    thinking: Literal["on", "off", "auto"] = "auto"
    """Where a request does not say; auto thinks wherever the deadline leaves room."""
    thinking_budget: int = 1024
    """Longest thinking where a request does not say, tokens."""
    watchdog_s: float = 10.0
    """A step that takes longer means a dead device: the process ends, for systemd to restart."""
    drain_s: float = 30.0
    """How long SIGTERM lets accepted plans finish. A plan of the 27B takes 10 to 20 s."""
    prefix_mb: int = 1024
    """Memory for pinned prefixes, MB: about six of the 27B."""
    prefix_dir: str = ""
    """Directory, of this server alone, for the prefixes that a client wants to persist; "" refuses
    such wishes. A file holds its prompt in the clear."""
    cancel_ms: int = 250
    """Longest a prefill step should take, and with it a cancel that meets one, ms. Of the sizes a
    package has, the largest that keeps to it is used. Two to three verify cycles of a Thor."""
    yield_us: int = 0
    """Idle time before each step, us: left to others that share the device. Slows plans down."""
    events: str = ""
    """File that gets a line of JSON for each thing that happens; "" for none. No prompts."""
    trace_slow_ms: int = 0
    """A plan that takes longer leaves a trace of its steps in `trace_dir`; 0 for none."""
    trace_dir: str = "traces"
    """Directory of the traces, made where `trace_slow_ms` asks for any. Perfetto and Chrome read
    them."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """OpenAI's HTTP in front of plan servers."""

    servers: tuple[str, ...] = ("tcp://127.0.0.1:5571",)
    """Plan servers; the least busy one that is ready gets the next request."""
    listen: str = "127.0.0.1:8000"
    """HTTP address. Loopback, as for the plan socket; the port is the custom of such servers."""
    insecure: bool = False
    """Allow other machines to connect: HTTP here has neither encryption nor names."""
    keys: str = ""
    """Directory of the client's CURVE keys; "" for servers without encryption."""
    token_file: str = ""
    """File holding the servers' secret, as their `serve.token_file`; "" for servers without one."""
    plan_timeout_s: float = 1800.0
    """Longest silence about a plan without a deadline: until it is answered, or its stream goes on.
    A server that is gone is noticed sooner, by its connection. Six plans (one runs, four wait) of
    the usual 1536 tokens at most, at the 5 a second of a 27B in 16 bits on a slow board."""

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError("gateway.servers must have at least one endpoint (got none)")
        if twice := [name for name, n in Counter(self.servers).items() if n > 1]:
            raise ConfigError(f"gateway.servers must name each server once (got {twice[0]} again)")
        if not self.plan_timeout_s > 0:
            raise ConfigError(f"gateway.plan_timeout_s must be > 0 (got {self.plan_timeout_s})")
