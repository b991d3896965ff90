"""The replies to control operations, as typed structs: what `schemas.py` describes. Those to a plan
are in messages.py.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

from thor_dflash.core.results import DraftCounts
from thor_dflash.serving.protocol import messages


class ControlReply(Struct, frozen=True, kw_only=True):
    """The fields of every reply to a control operation."""

    v: int
    id: str
    type: Literal["result"]
    seq: int


class PingReply(ControlReply, frozen=True):
    """The reply to `ping`."""

    status: Literal["ok"]
    message: str


class ServerName(Struct, frozen=True, kw_only=True):
    """Which program answers."""

    name: str
    version: str


class ModelReply(Struct, frozen=True, kw_only=True):
    """The model of a server."""

    model: str
    engine: str
    quantisation: dict[str, Any]
    package_sha256: str | None
    tokenizer_sha256: str | None
    golden_sha256: str | None
    """Hash of the self-test's tokens: equal on two machines that give the same plans."""
    max_context: int
    block: int
    prefill_chunk: int
    """Prompt tokens of a prefill step, the longest step that a cancel has to wait for."""
    features: tuple[str, ...]


class ServerLimits(Struct, frozen=True, kw_only=True):
    """The limits of a server: bytes, tokens, ms."""

    max_message: int
    max_queue: int
    max_context: int | None
    max_schema: int
    max_metadata: int
    max_depth: int
    max_images: int
    max_image_bytes: int
    max_image_pixels: int
    prefill_chunk: int | None
    cancel_bound_ms: float | None


class ServerDefaults(Struct, frozen=True, kw_only=True):
    """What holds for a plan that does not say otherwise."""

    max_tokens: int
    thinking: Literal["on", "off", "auto"]
    thinking_budget: int


class PrefixInfo(Struct, frozen=True, kw_only=True):
    """A pinned prefix."""

    prefix_id: str
    tokens: int
    held: int
    bytes: int
    build_ms: float
    persisted: bool


class HostInfo(Struct, frozen=True, kw_only=True):
    """The machine of a server."""

    name: str | None
    engine: str
    cores: int | None
    memory_mb: int | None


class HelloReply(ControlReply, frozen=True):
    """The reply to `hello`."""

    server: ServerName
    versions: tuple[int, ...]
    model: ModelReply | None
    features: tuple[str, ...]
    limits: ServerLimits
    defaults: ServerDefaults
    prefixes: tuple[PrefixInfo, ...]
    device: HostInfo
    admin: bool


class HealthReply(ControlReply, frozen=True):
    """The reply to `health`."""

    state: messages.State
    ready: bool
    level: Literal["OK", "WARN", "ERROR"]
    error: str | None
    watchdog_age_s: float
    uptime_s: float
    ready_after_s: float | None
    running: int
    waiting: int


class TokenCounts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens since the start."""

    prompt: int = 0
    cached: int = 0
    thinking: int = 0
    output: int = 0


class SpeculationCounts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Speculation since the start."""

    accepted_per_position: tuple[int, ...]
    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    forced: int = 0
    sources: dict[str, DraftCounts] = field(default_factory=dict[str, DraftCounts])
    """Where the drafts came from."""


class Percentiles(Struct, frozen=True, kw_only=True):
    """Of the last plans."""

    p50: float
    p90: float
    p99: float


class Latencies(Struct, frozen=True, kw_only=True):
    """Percentiles of times, ms; null before there are any."""

    queue_ms: Percentiles | None
    ttft_ms: Percentiles | None
    ttfa_ms: Percentiles | None
    e2e_ms: Percentiles | None


class PlanTimes(Struct, frozen=True, kw_only=True):
    """One of the last plans."""

    finish_reason: messages.Finish
    queue_ms: float
    ttft_ms: float
    ttfa_ms: float | None
    e2e_ms: float
    tok_s: float
    accept_len: float | None
    """Tokens per cycle; null without a drafter."""
    watts: dict[str, float] | None
    """Mean power of each rail; null without sensors."""


class DeadlineCounts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Plans with a deadline since the start."""

    met: int = 0
    missed: int = 0
    """Cut at the deadline, answered after it, or not answered at all."""
    refused: int = 0
    """`deadline_infeasible`."""


class EnergyCounts(Struct, frozen=True, kw_only=True):
    """Energy of the plans since the start."""

    joules: dict[str, float]
    """By power rail of the board, its idle draw included; empty without sensors."""
    seconds: float
    """Time of the runs that were measured."""


class TimeHistogram(Struct, frozen=True, kw_only=True):
    """Times since the start."""

    buckets: tuple[int, ...]
    """Plans in each bucket, one more than there are bounds."""
    sum_ms: float


class Histograms(Struct, frozen=True, kw_only=True):
    """Times since the start by buckets, each of which holds its upper bound."""

    bounds_ms: tuple[float, ...]
    queue_ms: TimeHistogram
    ttft_ms: TimeHistogram
    ttfa_ms: TimeHistogram
    e2e_ms: TimeHistogram


class HostState(Struct, frozen=True, kw_only=True):
    """Memory and clocks now."""

    memory_available_mb: int | None
    resident_mb: int | None
    gpu_mhz: int | None
    emc_mhz: int | None


class EvictionCounts(Struct, frozen=True, kw_only=True):
    """Boundaries by kind."""

    system: int = 0
    user: int = 0
    prompt: int = 0


class ReuseCounts(Struct, frozen=True, kw_only=True):
    """Automatic reuse since the start of a server, and the memory that it takes."""

    queries: int = 0
    """Prompt tokens looked up."""
    hits: int = 0
    """Of them, tokens that were not read."""
    evicted: EvictionCounts = EvictionCounts()
    """Boundaries dropped for lack of memory."""
    expired: int = 0
    """Boundaries dropped because no turn used them for `serve.reuse_idle_s`."""
    ahead: int = 0
    """Tokens read while the engine was idle."""
    swapped_out: int = 0
    """Bytes."""
    swapped_in: int = 0
    """Bytes."""
    swap_ms: float = 0.0
    """Host time of these copies, ms."""
    boundaries: int = 0
    """Kept now."""
    bytes: int = 0
    """In use now."""


class ImageCounts(Struct, frozen=True, kw_only=True):
    """Plans that showed images."""

    plans: int = 0
    images: int = 0
    cached: int = 0
    """Of these images: those for which the vision tower did not run."""
    tokens: int = 0
    """Of the prompts, for these images."""
    cycles: int = 0
    """Of these plans, like the next two: as in `spec`, where other plans count too."""
    drafted: int = 0
    accepted: int = 0
    tower_ms: float = 0.0
    """Time of the vision tower."""


class StatsReply(ControlReply, frozen=True):
    """The reply to `stats`."""

    requests: dict[str, int]
    finished: dict[str, int]
    refused: dict[str, int]
    tokens: TokenCounts
    spec: SpeculationCounts
    percentiles: Latencies
    last: tuple[PlanTimes, ...]
    images: ImageCounts
    deadlines: DeadlineCounts
    energy: EnergyCounts
    histograms: Histograms
    reuse: ReuseCounts
    running: int
    waiting: int
    device: HostState


class ValidateReply(ControlReply, frozen=True, omit_defaults=True):
    """The reply to `validate`."""

    max_context: int
    prompt_tokens: int = 0
    """Only if there was a prompt."""
    compile_ms: float = 0.0
    """This and the next only if there was a schema."""
    warnings: tuple[str, ...] = ()


class PrefixPutReply(ControlReply, frozen=True):
    """The reply to `prefix.put`."""

    prefix_id: str
    tokens: int
    held: int
    bytes: int
    build_ms: float
    persisted: bool


class PrefixListReply(ControlReply, frozen=True):
    """The reply to `prefix.list`."""

    prefixes: tuple[PrefixInfo, ...]
    skipped: tuple[str, ...]


class PrefixDropReply(ControlReply, frozen=True):
    """The reply to `prefix.drop`."""

    dropped: bool


class SessionDropReply(ControlReply, frozen=True):
    """The reply to `session.drop`."""

    boundaries: int
    """How many are forgotten."""


class AckReply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The reply to `cancel`, `drain` and `shutdown`: one of the last three fields."""

    v: int
    id: str
    type: Literal["ack"]
    seq: int
    cancelled: bool = False
    draining: bool = False
    stopping: bool = False
