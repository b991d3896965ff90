"""/metrics, read by Prometheus' own parser, and what benchmarks find in an answer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from thor_dflash.core.results import DraftCounts, Speculation, Timings
from thor_dflash.serving.gateway.metrics import SHARED, ServerStats, render
from thor_dflash.serving.gateway.openai_answers import ResponseHeader, completion, counted
from thor_dflash.serving.protocol.messages import Result
from thor_dflash.serving.server.stats import Stats

SPEC = Speculation(
    cycles=4, drafted=9, accepted=5, forced=2, accept_hist=(1, 1, 1, 1), accept_len=2.5,
    sources={"session": DraftCounts(3, 7, 5), "drafter": DraftCounts(1, 2, 0)},
)  # fmt: skip


def stats() -> dict[str, Any]:
    """What a server reports of two plans, after its wire format."""
    kept = Stats()
    times = Timings(queue_ms=500, ttft_ms=1500, e2e_ms=2500, energy_j={"VDD_GPU": 60.0})
    kept.result(Result(finish_reason="stop", timings=times, spec=SPEC))
    late = Timings(queue_ms=0, ttft_ms=1500.5, e2e_ms=9e9)
    kept.result(Result(finish_reason="deadline", timings=late))
    table: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(kept.show()))
    return {**table, "running": 1, "waiting": 2}


def families(*servers: ServerStats) -> dict[str, Metric]:
    return {
        family.name: family for family in text_string_to_metric_families(render(servers).decode())
    }


def test_a_histogram_is_cumulative_and_its_bounds_hold_what_equals_them() -> None:
    found = families(ServerStats("tcp://a", "27b", stats()))
    for prefix, labels in (("thor_dflash", {}), ("vllm", {"model_name": "27b"})):
        family = found[f"{prefix}:time_to_first_token_seconds"]
        at = {s.labels["le"]: s.value for s in family.samples if "le" in s.labels}
        assert (at["1"], at["1.5"], at["2"], at["+Inf"]) == (0, 1, 2, 2)
        rest = {s.name.rpartition("_")[2]: s for s in family.samples if "le" not in s.labels}
        assert (rest["count"].value, rest["sum"].value) == (2, pytest.approx(3.0005))
        assert rest["count"].labels == {"server": "tcp://a", **labels}
    assert found["vllm:e2e_request_latency_seconds"].type == "histogram"


def test_drafts_are_counted_by_source() -> None:
    found = families(ServerStats("tcp://a", "27b", stats()))
    for name, want in (("num_drafts", 3), ("num_draft_tokens", 7), ("num_accepted_tokens", 5)):
        samples = found[f"thor_dflash:spec_decode_{name}_by_source"].samples
        assert {s.labels["source"]: s.value for s in samples}["session"] == want


def test_what_vllm_counts_otherwise_is_counted_so_under_its_name() -> None:
    table = stats() | {
        "tokens": {"output": 7, "thinking": 3},
        "finished": {"stop": 2, "tool_calls": 1, "preempted": 4, "deadline": 5, "length": 6},
    }
    found = families(ServerStats("tcp://a", "27b", table))
    ours, theirs = (found[f"{prefix}:generation_tokens"] for prefix in ("thor_dflash", "vllm"))
    assert ([s.value for s in ours.samples], [s.value for s in theirs.samples]) == ([7], [10])
    reasons = found["vllm:request_success"].samples
    assert {s.labels["finished_reason"]: s.value for s in reasons} == {
        "stop": 3, "abort": 4, "length": 11,
    }  # fmt: skip
    assert {f"vllm:{name}" for name in SHARED} <= found.keys()


def test_a_server_that_is_down_or_older_is_shown() -> None:
    """A server of 0.1.0 has none of the parts that are newer."""
    old = {name: stats()[name] for name in ("finished", "refused", "tokens", "spec", "percentiles")}
    found = families(ServerStats("tcp://a", "", None), ServerStats("tcp://b", "", old))
    assert [s.value for s in found["thor_dflash:up"].samples] == [0, 1]
    drafts = found["vllm:spec_decode_num_drafts"].samples
    assert [(s.labels["server"], s.value) for s in drafts] == [("tcp://b", 4)]
    assert not found["thor_dflash:time_to_first_token_seconds"].samples


@pytest.mark.parametrize("spec", [SPEC, Speculation(accept_hist=(0, 0)), None, Speculation()])
def test_the_acceptance_of_an_answer_is_what_aiperf_takes(spec: Speculation | None) -> None:
    """Its record demands: the histogram holds every step and every accepted token, and no more
    tokens are accepted than drafted.
    """
    result = Result(finish_reason="stop", spec=spec)
    whole = completion(ResponseHeader("m"), result)
    assert counted(ResponseHeader("m"), result).get("metrics") == whole.get("metrics")
    if spec is None or len(spec.accept_hist) < 2:
        assert "metrics" not in whole  # without a drafter there is nothing to accept
        return
    found = whole["metrics"]["speculative_decoding"]
    histogram = found["acceptance_histogram"]
    assert len(histogram) == found["num_spec_tokens"] + 1
    assert sum(histogram) == found["num_spec_steps"] == spec.cycles
    accepted = sum(count * steps for count, steps in enumerate(histogram))
    assert accepted == found["num_accepted_draft_tokens"] <= found["num_draft_tokens"]
    assert found["mean_acceptance_length"] == (spec.accept_len or 1.0)
    rate = found["draft_acceptance_rate"] * found["num_draft_tokens"]
    assert rate == pytest.approx(accepted)
