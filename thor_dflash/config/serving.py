"""The configuration sections of the plan server and the HTTP gateway."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from thor_dflash.config.bounds import DAY_S, LARGEST, Count, Positive
from thor_dflash.config.decode import Drafter
from thor_dflash.core.errors import ConfigError

DayMs = Annotated[int, Meta(ge=0, le=DAY_S * 1000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """How plans are served ([serving](../guide/serving.md), [wire protocol](protocol.md)). With
    `--mock`, `cancel_ms`, `drafter`, `prefix_mb`, `recent_answers` and `yield_us` have no effect.
    """

    bind: tuple[str, ...] = ("tcp://127.0.0.1:5571",)
    """Endpoints to listen on, tcp://HOST:PORT or ipc://PATH. HOST is an address, an interface such
    as eth0 (its IPv4 address when the server starts) or *. Loopback by default, because a planner
    moves a robot. GR00T servers use 5555."""
    curve: str = ""
    """Directory made by `thor-dflash keygen`, to encrypt and admit only known clients; "": no
    encryption."""
    insecure: bool = False
    """Let other machines connect without CURVE."""
    token_file: str = ""
    """File with a secret that every request must carry; "": none is required."""
    allow_admin: bool = False
    """Accept `drain` and `shutdown` requests, on ipc and CURVE endpoints only."""
    max_queue: Positive = 4
    """Plans that may wait, over all sessions; more are `busy`. A robot prefers a refusal to a long
    wait."""
    max_message: Annotated[int, Meta(ge=1024, le=LARGEST)] = 1 << 20
    """Largest request, bytes beside its images, which may have 16 MiB more. A peer that sends a
    longer message than both together is disconnected."""
    max_tokens: Positive = 512
    """Default length limit of an answer, thinking not counted, tokens; it must fit the context."""
    thinking: Literal["on", "off", "auto"] = "auto"
    """Default for requests; auto: think if the deadline leaves time."""
    thinking_budget: Count = 1024
    """Default length limit of thinking, tokens."""
    tools: Literal["off", "frame", "schema"] = "frame"
    """What is enforced of tool calls that are neither demanded nor `strict`: nothing, their frame
    (declared functions and parameters, the required ones present), or their values too."""
    allow_forced: bool = False
    """Accept requests that bring their answer (`forced_answer`), to replay recorded conversations.
    Such an answer is not the model's."""
    reuse: Literal["off", "session", "client", "all"] = "client"
    """Whose turns reuse each other's state: nobody's, those of one session of a client, of one
    client, or of all clients. Reuse shows in times and in `cached_tokens`."""
    reuse_mb: Count = 2048
    """Memory for the states of earlier turns, MiB, on the device; 0: no reuse. A boundary of the
    27B takes 190, a thousand tokens of a conversation that another one displaces 37."""
    reuse_idle_s: Annotated[float, Meta(ge=0, le=DAY_S)] = 0.0
    """What no turn of a conversation has used for so long is dropped, s; 0: kept until the memory
    is needed. `session.drop` drops it at once."""
    idle_prefill: bool = False
    """Read an answer with tool calls while the engine is idle, so that the next turn reads only the
    results. For agents that return answers unchanged and whose tools take a while; a request that
    arrives meanwhile waits for the end of a prefill step."""
    image_mb: Count = 256
    """Memory for what the vision tower made of images, MiB: 80 images of 640 x 480 of the 27B."""
    image_pixels: Positive = 1 << 20
    """Most pixels of an image after resizing; the model's own limit and the sizes of the package's
    vision graphs may be lower. Each 1024 pixels are a token of the prompt."""
    max_images: Positive = 8
    """Most images of a request."""
    watchdog_s: Annotated[float, Meta(gt=0, le=DAY_S)] = 10.0
    """A step that takes longer means a dead device: the process ends, for systemd to restart it. A
    server whose slowest prefill step takes so long does not start."""
    drain_s: Annotated[float, Meta(ge=0, le=DAY_S)] = 30.0
    """Time that accepted plans get to finish after SIGTERM. A plan of the 27B takes 10 to 20 s."""
    drafter: Drafter = "auto"
    """Proposer of drafts, as `decode.drafter`."""
    recent_answers: Annotated[int, Meta(ge=0, le=64)] = 4
    """Newest answers of a session that drafts are searched in, kept in memory for requests of the
    same scope as `reuse`; 0: none, as with `reuse` off."""
    prefix_mb: Count = 1024
    """Memory for pinned prefixes, MiB: about four of 2000 tokens of the 27B (FP8 cache)."""
    prefix_dir: str = ""
    """Directory, used by this server alone, for prefixes that clients persist; "": such
    requests are refused. The files hold the prompts unencrypted."""
    cancel_ms: Annotated[int, Meta(ge=1, le=DAY_S * 1000)] = 250
    """Target for the time of a prefill step, and so for the delay of a cancel during one, ms. The
    largest of the package's sizes that meets it is used. Two to three verify cycles on a Thor."""
    yield_us: Annotated[int, Meta(ge=0, le=DAY_S * 1_000_000)] = 0
    """Idle time before each step, us, for other users of the device; below `watchdog_s`. Slows
    plans down."""
    events: str = ""
    """File that gets one JSON line per event, without prompts; "": none."""
    trace_slow_ms: DayMs = 0
    """A plan that takes longer leaves a trace of its steps in `trace_dir`, ms; 0: none."""
    trace_dir: str = "traces"
    """Directory of the traces, made if `trace_slow_ms` is set. Perfetto and Chrome read them."""
    log_prompts: bool = False
    """Write prompts to the log."""

    def __post_init__(self) -> None:
        if not self.bind:
            raise ConfigError("serve.bind must have at least one endpoint (got none)")
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
    """Address to answer HTTP on, HOST:PORT. Loopback, as for the plan socket, unless there are API
    keys or `insecure` is set; the port is the usual one of such servers."""
    api_key_file: str = ""
    """File with the API keys of clients, one a line, which only its owner may read; "": none is
    needed. With keys, other machines may connect. They cross the network unencrypted unless a
    reverse proxy adds TLS."""
    hosts: tuple[str, ...] = ()
    """Host names that clients may use for the gateway, beside those of loopback and, with API keys,
    any IP address."""
    max_body: Annotated[int, Meta(ge=1024, le=LARGEST)] = 1 << 20
    """Largest body of a request, bytes beside its images, as `serve.max_message` of a server. They
    may have 16 MiB more, as base64: a third longer than their files."""
    image_dir: str = ""
    """Directory of images that requests may name as `file:` URLs, all below it and without links;
    "": none may. Images are never fetched from elsewhere."""
    insecure: bool = False
    """Let other machines connect without API keys, and under any host name."""
    keys: str = ""
    """Directory of the client's CURVE keys; "": the servers use no encryption."""
    token_file: str = ""
    """File with the servers' secret, as their `serve.token_file`; "": they have none."""
    plan_timeout_s: Annotated[float, Meta(gt=0)] = 1800.0
    """Longest silence, s, about a plan without `deadline_ms`: until its answer or, if streamed, its
    next piece. Then it is cancelled and the answer is 408 (`deadline`). A lost server is noticed
    sooner, by its connection. About six plans (this one, one running, four waiting) of at most 1536
    tokens, the default, at 5 tokens/s (27B in 16 bits on a slow board)."""

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConfigError("gateway.servers must have at least one endpoint (got none)")
        if twice := [name for name, n in Counter(self.servers).items() if n > 1]:
            raise ConfigError(f"gateway.servers must name each server once (got {twice[0]} again)")
