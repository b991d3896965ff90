"""What a server counts."""

from __future__ import annotations

from thor_dflash.core.errors import Code, PlanError
from thor_dflash.core.results import DraftCounts, Speculation, Timings
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.server.stats import WINDOW, Stats


def test_percentiles_are_values_of_the_newest_plans() -> None:
    stats = Stats()
    for number in range(WINDOW + 100, 0, -1):
        times = Timings(queue_ms=number, e2e_ms=2.0 * number)
        stats.result(messages.Result(finish_reason="stop", timings=times))
    shown = stats.show()["percentiles"]
    # Of 1 to 256, sorted: the value at index 256 * p // 100.
    assert shown["queue_ms"] == {"p50": 129, "p90": 231, "p99": 254}
    assert shown["e2e_ms"] == {"p50": 258, "p90": 462, "p99": 508}
    assert shown["ttfa_ms"] is None
    one = Stats()
    one.result(messages.Result(finish_reason="stop", timings=Timings(queue_ms=7)))
    assert one.show()["percentiles"]["queue_ms"] == {"p50": 7, "p90": 7, "p99": 7}


def test_speculation_is_summed() -> None:
    stats = Stats()
    for accepted in ((2, 1), (3, 0, 1)):
        spec = Speculation(
            cycles=5, drafted=20, accepted=7, forced=1, accepted_per_position=accepted,
            sources={"session": DraftCounts(2, 15, 6), "drafter": DraftCounts(3, 5, 1)},
        )  # fmt: skip
        stats.result(messages.Result(finish_reason="stop", spec=spec))
    stats.result(messages.Result(finish_reason="stop"))
    assert stats.show()["spec"] == {
        "cycles": 10, "drafted": 40, "accepted": 14, "forced": 2,
        "accepted_per_position": [5, 1, 1],
        "sources": {
            "session": {"blocks": 4, "drafted": 30, "accepted": 12},
            "drafter": {"blocks": 6, "drafted": 10, "accepted": 2},
        },
    }  # fmt: skip
    assert stats.show()["finished"] == {"stop": 3}


def test_plans_with_images_are_counted_apart() -> None:
    stats = Stats()
    spec = Speculation(cycles=5, drafted=20, accepted=7)
    one = {"sha256": "", "width": 64, "height": 64, "tokens": 4}
    images = (
        messages.ImageResult(id="a", encode_ms=2.5, **one),
        messages.ImageResult(id="b", cached=True, **one),
    )
    for shown in (images, images[:1], None):
        stats.result(messages.Result(finish_reason="stop", spec=spec, images=shown))
    assert stats.show()["images"] == {
        "plans": 2, "images": 3, "cached": 1, "tokens": 12, "tower_ms": 5.0,
        "cycles": 10, "drafted": 40, "accepted": 14,
    }  # fmt: skip
    assert stats.show()["spec"]["cycles"] == 15


def test_a_deadline_is_met_only_by_a_plan_that_was_not_cut_and_came_in_time() -> None:
    stats = Stats()
    whole = messages.Result(finish_reason="stop")
    stats.deadline(whole, late=False)
    stats.deadline(whole, late=True)
    stats.deadline(messages.Result(finish_reason="deadline"), late=False)
    codes: tuple[Code, ...] = ("deadline", "deadline_infeasible", "busy", "preempted")
    for code in codes:
        stats.deadline(PlanError(code, "no"), late=False)
    assert stats.show()["deadlines"] == {"met": 1, "missed": 3, "refused": 1}
