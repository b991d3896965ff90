"""`stats` of every server as Prometheus metrics. Metrics that vLLM has, too, use vLLM's names;
latencies are reported by servers as quantiles, not histograms, so they have names of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

PREFIX = "thor_dflash:"
COUNTERS = (
    ("spec_decode_num_drafts", "Verify cycles.", "spec", "cycles"),
    ("spec_decode_num_draft_tokens", "Tokens drafted.", "spec", "drafted"),
    ("spec_decode_num_accepted_tokens", "Drafts accepted.", "spec", "accepted"),
    ("spec_decode_num_forced_tokens", "Tokens forced by a grammar or a budget.", "spec", "forced"),
    ("prompt_tokens", "Prompt tokens.", "tokens", "prompt"),
    ("prompt_tokens_cached", "Prompt tokens that were not read again.", "tokens", "cached"),
    ("prefix_cache_queries", "Prompt tokens looked up in earlier turns.", "reuse", "queries"),
    ("prefix_cache_hits", "Prompt tokens continued from earlier turns.", "reuse", "hits"),
    ("prefix_cache_evictions", "Turns forgotten for lack of memory.", "reuse", "evicted"),
    ("prefix_cache_swapped_out_bytes", "Bytes of states kept.", "reuse", "swapped_out"),
    ("prefix_cache_swapped_in_bytes", "Bytes of states taken back.", "reuse", "swapped_in"),
    ("generation_tokens", "Answer tokens.", "tokens", "output"),
    ("thinking_tokens", "Thinking tokens.", "tokens", "thinking"),
)
LABELLED = (
    ("request_success", "Plans by finish reason.", "finished", "finished_reason"),
    ("request_refused", "Error answers by code.", "refused", "code"),
)
GAUGES = (
    ("num_requests_running", "Plans that run.", "running"),
    ("num_requests_waiting", "Plans that wait.", "waiting"),
    ("prefix_cache_bytes", "Memory of earlier turns.", "bytes"),
    ("prefix_cache_boundaries", "Places where a prompt may continue.", "boundaries"),
)
LATENCIES = (
    ("time_to_first_token_ms", "ttft_ms"),
    ("time_to_first_answer_token_ms", "ttfa_ms"),
    ("e2e_request_latency_ms", "e2e_ms"),
    ("request_queue_time_ms", "queue_ms"),
)

Servers = list[tuple[str, dict[str, Any] | None]]


def render(servers: Servers) -> bytes:
    """Return the text of /metrics; a server without `stats` did not answer and is shown as down."""
    registry = CollectorRegistry()
    registry.register(_Collector(servers))
    return generate_latest(registry)


class _Collector:
    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily(f"{PREFIX}up", "Whether the server answers.", labels=["server"])
        for server, stats in self._servers:
            up.add_metric([server], stats is not None)
        yield up
        there = [(server, stats) for server, stats in self._servers if stats is not None]
        yield from _counters(there)
        yield from _gauges(there)


def _counters(there: list[tuple[str, dict[str, Any]]]) -> Iterable[Metric]:
    for name, text, section, key in COUNTERS:
        counter = CounterMetricFamily(PREFIX + name, text, labels=["server"])
        for server, stats in there:
            counter.add_metric([server], stats[section].get(key, 0))
        yield counter
    positions = CounterMetricFamily(
        f"{PREFIX}spec_decode_num_accepted_tokens_per_pos",
        "Drafts accepted, by place in the block.",
        labels=["server", "position"],
    )
    for server, stats in there:
        for position, count in enumerate(stats["spec"]["accepted_per_position"]):
            positions.add_metric([server, str(position)], count)
    yield positions
    for name, text, section, label in LABELLED:
        counter = CounterMetricFamily(PREFIX + name, text, labels=["server", label])
        for server, stats in there:
            for value, count in stats[section].items():
                counter.add_metric([server, value], count)
        yield counter


def _gauges(there: list[tuple[str, dict[str, Any]]]) -> Iterable[Metric]:
    for name, text, key in GAUGES:
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=["server"])
        for server, stats in there:
            gauge.add_metric([server], {**stats, **stats["reuse"]}[key])
        yield gauge
    for name, key in LATENCIES:
        gauge = GaugeMetricFamily(
            PREFIX + name, "Over the last plans, ms.", labels=["server", "quantile"]
        )
        for server, stats in there:
            found: dict[str, float] = stats["percentiles"][key] or {}
            for quantile, value in found.items():
                gauge.add_metric([server, f"0.{quantile.removeprefix('p')}"], value)
        yield gauge
