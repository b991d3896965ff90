"""`stats` of every server as Prometheus metrics: all as `thor_dflash:NAME`, and those that mean the
same in vLLM also as `vllm:NAME`, for the dashboards and benchmarks that look for these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

PREFIX, VLLM = "thor_dflash:", "vllm:"
COUNTERS = (
    ("spec_decode_num_drafts", "Verify cycles.", "spec", "cycles"),
    ("spec_decode_num_draft_tokens", "Tokens drafted.", "spec", "drafted"),
    ("spec_decode_num_accepted_tokens", "Drafts accepted.", "spec", "accepted"),
    ("spec_decode_num_forced_tokens", "Tokens forced by a grammar or a budget.", "spec", "forced"),
    ("prompt_tokens", "Prompt tokens.", "tokens", "prompt"),
    ("prompt_tokens_cached", "Prompt tokens that were not read again.", "tokens", "cached"),
    ("prefix_cache_queries", "Prompt tokens looked up in earlier turns.", "reuse", "queries"),
    ("prefix_cache_hits", "Prompt tokens continued from earlier turns.", "reuse", "hits"),
    ("prefix_cache_expirations", "Boundaries that no turn used for long.", "reuse", "expired"),
    ("prefix_cache_idle_tokens", "Tokens read while the engine was idle.", "reuse", "ahead"),
    ("prefix_cache_swap_ms", "Host time of copying states, ms.", "reuse", "swap_ms"),
    ("prefix_cache_swapped_out_bytes", "Bytes of states kept.", "reuse", "swapped_out"),
    ("prefix_cache_swapped_in_bytes", "Bytes of states taken back.", "reuse", "swapped_in"),
    ("generation_tokens", "Answer tokens.", "tokens", "output"),
    ("thinking_tokens", "Thinking tokens.", "tokens", "thinking"),
    ("images", "Images that prompts showed.", "images", "images"),
    ("images_cached", "Those whose rows of the vision tower were kept.", "images", "cached"),
    ("image_tokens", "Prompt tokens of images.", "images", "tokens"),
    ("image_encode_ms", "Time of the vision tower, ms.", "images", "tower_ms"),
    ("image_plans", "Plans that showed images.", "images", "plans"),
    ("image_spec_decode_num_drafts", "Verify cycles of those plans.", "images", "cycles"),
    ("image_spec_decode_num_accepted_tokens", "Drafts accepted in them.", "images", "accepted"),
    ("energy_seconds", "Time over which the energy was measured.", "energy", "seconds"),
)
SOURCES = (
    ("spec_decode_num_drafts_by_source", "Verify cycles, by where drafts came from.", "blocks"),
    ("spec_decode_num_draft_tokens_by_source", "Tokens drafted, by source.", "drafted"),
    ("spec_decode_num_accepted_tokens_by_source", "Drafts accepted, by source.", "accepted"),
)
LABELLED = (
    ("request_success", "Plans by finish reason.", ("finished",), "finished_reason"),
    ("request_refused", "Error answers by code.", ("refused",), "code"),
    ("request_deadlines", "Plans with a deadline, by outcome.", ("deadlines",), "outcome"),
    ("energy_joules", "Energy of the plans by power rail.", ("energy", "joules"), "rail"),
    ("prefix_cache_evictions", "Boundaries evicted.", ("reuse", "evicted"), "kind"),
)
GAUGES = (
    ("num_requests_running", "Plans that run.", "running"),
    ("num_requests_waiting", "Plans that wait.", "waiting"),
    ("prefix_cache_bytes", "Memory of earlier turns.", "bytes"),
    ("prefix_cache_boundaries", "Places where a prompt may continue.", "boundaries"),
)
LATENCIES = (
    ("time_to_first_token", "ttft_ms"),
    ("time_to_first_answer_token", "ttfa_ms"),
    ("e2e_request_latency", "e2e_ms"),
    ("request_queue_time", "queue_ms"),
)
"""Name without unit: `_ms` is a gauge of quantiles, `_seconds` a histogram."""
SHARED = frozenset(
    (
        "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos", "prompt_tokens", "prefix_cache_queries",
        "prefix_cache_hits", "num_requests_running", "num_requests_waiting",
        "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    )
)  # fmt: skip
"""What vLLM has, too, with the same meaning."""
VLLM_REASONS = {"stop": "stop", "tool_calls": "stop", "cancelled": "abort", "preempted": "abort"}
"""vLLM's finish reason for ours; all others become `length`, as in an answer over HTTP."""

Stats = Mapping[str, Any]
Sample = tuple[tuple[str, ...], float | dict[str, Any]]
"""Values of the labels beside those of the server, and the value; of a histogram its parts."""


@dataclass(frozen=True, slots=True)
class ServerStats:
    """What one server reported."""

    endpoint: str
    model: str
    """"" before it has named one."""
    stats: Stats | None
    """None: it did not answer."""


@dataclass(frozen=True, slots=True)
class _Family:
    """A metric of every server."""

    kind: Callable[..., Any]
    name: str
    text: str
    samples: Callable[[Stats], Iterable[Sample]]
    labels: tuple[str, ...] = ()
    only: str = ""
    """The one prefix that it has; "": that of `SHARED`."""

    def collect(self, prefix: str, servers: Iterable[tuple[ServerStats, Stats]]) -> Metric:
        """Return the metric under a prefix. vLLM's dashboards ask for the label `model_name`."""
        named = prefix == VLLM
        labels = [*(["model_name"] * named), "server", *self.labels]
        family = self.kind(prefix + self.name, self.text, labels=labels)
        for server, stats in servers:
            for values, value in self.samples(stats):
                head = [*([server.model] * named), server.endpoint]
                given = value if isinstance(value, dict) else {"value": value}
                family.add_metric([*head, *values], **given)
        metric: Metric = family
        return metric


def render(servers: Iterable[ServerStats]) -> bytes:
    """Return the text of /metrics; a server without `stats` is shown as down."""
    registry = CollectorRegistry()
    registry.register(_Collector(tuple(servers)))
    return generate_latest(registry)


class _Collector:
    def __init__(self, servers: tuple[ServerStats, ...]) -> None:
        self._servers = servers

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily(f"{PREFIX}up", "Whether the server answers.", labels=["server"])
        for server in self._servers:
            up.add_metric([server.endpoint], server.stats is not None)
        yield up
        there = [(server, server.stats) for server in self._servers if server.stats is not None]
        for family in FAMILIES:
            both = (PREFIX, VLLM) if family.name in SHARED else (PREFIX,)
            for prefix in (family.only,) if family.only else both:
                yield family.collect(prefix, there)


def _at(stats: Stats, *path: str) -> Any:
    """A part of `stats`; empty if the server is of a release that has no such part."""
    found: Any = stats
    for key in path:
        found = found.get(key) or {}
    return found


def _families() -> Iterator[_Family]:
    for name, text, section, key in COUNTERS:
        one = partial(_one, section, key)
        yield _Family(CounterMetricFamily, name, text, one)
    for name, text, path, label in LABELLED:
        yield _Family(CounterMetricFamily, name, text, partial(_each, path), (label,))
    yield _Family(
        CounterMetricFamily, "spec_decode_num_accepted_tokens_per_pos",
        "Drafts accepted, by place in the block.", _positions, ("position",),
    )  # fmt: skip
    for name, text, key in SOURCES:
        yield _Family(CounterMetricFamily, name, text, partial(_sources, key), ("source",))
    for name, text, key in GAUGES:
        yield _Family(GaugeMetricFamily, name, text, partial(_now, key))
    for name, key in LATENCIES:
        quantiles = partial(_quantiles, key)
        text = "Over the last plans, ms."
        yield _Family(GaugeMetricFamily, f"{name}_ms", text, quantiles, ("quantile",))
        text, histogram = "Since the start, s.", partial(_histogram, key)
        yield _Family(HistogramMetricFamily, f"{name}_seconds", text, histogram)
    yield _Family(
        CounterMetricFamily, "generation_tokens", "Tokens of thinking and answer.", _generated,
        only=VLLM,
    )  # fmt: skip
    yield _Family(
        CounterMetricFamily, "request_success", "Plans by finish reason.", _reasons,
        ("finished_reason",), only=VLLM,
    )  # fmt: skip


def _one(section: str, key: str, stats: Stats) -> Iterable[Sample]:
    yield (), _at(stats, section).get(key, 0)


def _each(path: tuple[str, ...], stats: Stats) -> Iterable[Sample]:
    counts: dict[str, float] = _at(stats, *path)
    return (((value,), count) for value, count in counts.items())


def _positions(stats: Stats) -> Iterable[Sample]:
    counts: list[int] = _at(stats, "spec", "accepted_per_position")
    return (((str(position),), count) for position, count in enumerate(counts))


def _sources(key: str, stats: Stats) -> Iterable[Sample]:
    found: dict[str, dict[str, int]] = _at(stats, "spec", "sources")
    return (((source,), counts[key]) for source, counts in found.items())


def _now(key: str, stats: Stats) -> Iterable[Sample]:
    yield (), {**_at(stats, "reuse"), **stats}.get(key, 0)


def _quantiles(key: str, stats: Stats) -> Iterable[Sample]:
    found: dict[str, float] = _at(stats, "percentiles", key)
    return (((f"0.{name.removeprefix('p')}",), value) for name, value in found.items())


def _histogram(key: str, stats: Stats) -> Iterable[Sample]:
    if not (times := _at(stats, "histograms", key)):
        return
    counts: list[int] = times["buckets"]
    bounds = [*(f"{ms / 1e3:g}" for ms in stats["histograms"]["bounds_ms"]), "+Inf"]
    buckets = list(zip(bounds, accumulate(counts), strict=True))
    yield (), {"buckets": buckets, "sum_value": times["sum_ms"] / 1e3}


def _generated(stats: Stats) -> Iterable[Sample]:
    tokens = _at(stats, "tokens")
    yield (), tokens.get("output", 0) + tokens.get("thinking", 0)


def _reasons(stats: Stats) -> Iterable[Sample]:
    found: Counter[str] = Counter()
    counts: dict[str, int] = _at(stats, "finished")
    for reason, count in counts.items():
        found[VLLM_REASONS.get(reason, "length")] += count
    return (((reason,), count) for reason, count in found.items())


FAMILIES = tuple(_families())
