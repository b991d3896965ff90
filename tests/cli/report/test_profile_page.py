"""A profile as text and as an HTML page: both show what was measured, and drawings are to scale."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from thor_dflash.cli.report.drawing import ticks
from thor_dflash.cli.report.profile_page import page
from thor_dflash.cli.report.profile_text import TITLES, table
from thor_dflash.core.results import Speculation
from thor_dflash.runtime.measure.profile import (
    CycleBreakdown,
    Power,
    Profile,
    ProfilePart,
    ProfilePhase,
    ProfileSubject,
    Rail,
    StepEnd,
    spread,
)

PARTS = (
    ProfilePart("propose", "", 1.0, 0),
    ProfilePart("verify", "", 7.0, 15_000_000_000),
    ProfilePart("verify", "layers.*.mlp.gate_up", 2.0, 6_000_000_000),
    ProfilePart("verify", "embed, concat", 0.5, 0),
)
FOUND = Profile(
    ProfileSubject(
        "1", "p" * 64, "cuda", "a <GPU> & more", "q" * 64, 5, {"decode.gate": "off"}, {}
    ),
    runs=4,
    warmup=1,
    tokens=10,
    finish="stop",
    times={name: spread([10.0, 12.0, 11.0, 10.5]) for name in TITLES},
    phases={
        "prefill": ProfilePhase(20.0, 0.0, 0.2),
        "propose+verify+accept+observe": ProfilePhase(75.0, 7.5, 0.75),
        "host": ProfilePhase(5.0, 0.0, 0.05),
    },
    spec=Speculation(
        cycles=4,
        drafted=60,
        accepted=6,
        accept_len=2.5,
        accept_hist=(2, 1, 0, 1),
        accepted_per_position=(3, 2, 1),
    ),
    timeline=(StepEnd(0.0, 0), StepEnd(20.0, 0), StepEnd(60.0, 4), StepEnd(100.0, 1)),
    power=Power((Rail("VDD <GPU>", 4.0, 60.0, 30.0),), 61.25),
    warnings=("a <cycle> varies",),
    inside=CycleBreakdown(38, 8.0, 3e12, PARTS),
)


def drawings(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall("<svg.*?</svg>", text, re.DOTALL)]


def widths(drawing: ElementTree.Element) -> list[float]:
    return [float(bar.attrib["width"].removesuffix("%")) for bar in drawing.iter("rect")]


def test_a_page_is_one_well_formed_file_that_asks_nobody() -> None:
    text = page(FOUND)
    body = text.removeprefix("<!doctype html>\n").replace('<meta charset="utf-8">', "")
    ElementTree.fromstring(body.replace('<meta name="viewport" content="width=device-width">', ""))
    for word in ("http", "src=", "<script", "@import", "url("):
        assert word not in text, word
    assert "a &lt;GPU&gt; &amp; more" in text
    assert "a &lt;cycle&gt; varies" in text


def test_bars_are_as_long_as_their_numbers() -> None:
    runs, timeline, phases, inside, committed, right = drawings(page(FOUND))
    assert len(list(runs.iter("circle"))) == 4
    long = widths(phases)
    assert [x / long[1] for x in long] == pytest.approx([20 / 75, 1, 5 / 75], abs=0.01)
    long = widths(inside)
    assert [x / long[1] for x in long] == pytest.approx([1 / 7, 1, 2 / 7, 0.5 / 7], abs=0.01)
    heights = [float(bar.attrib["height"]) for bar in committed.iter("rect")]
    assert [x / heights[0] for x in heights] == pytest.approx([1, 0.5, 0, 0.5], abs=0.01)
    top = min(float(line.attrib["y1"]) for line in committed.iter("line"))
    assert min(float(bar.attrib["y"]) for bar in committed.iter("rect")) == top
    heights = [float(bar.attrib["height"]) for bar in right.iter("rect")]
    assert [x / heights[0] for x in heights] == pytest.approx([1, 2 / 3, 1 / 3], abs=0.02)
    prompt, first, _ = timeline.iter("rect")
    assert "prompt, 20.00 ms from 0.0" in (prompt[0].text or "")
    assert "4 tokens, 40.00 ms from 20.0" in (first[0].text or "")
    assert widths(timeline) == pytest.approx([20, 40, 40])


def test_a_page_is_as_wide_as_its_window() -> None:
    for drawing in drawings(page(FOUND)):
        assert "viewBox" not in drawing.attrib, "it would scale the text, too"
        for shape in drawing.iter():
            for name in ("x", "x1", "x2", "cx", "width"):
                assert shape.attrib.get(name, "%").endswith("%"), ElementTree.tostring(shape)


def test_axes_have_round_values_and_say_what_they_show() -> None:
    runs, timeline, _, _, committed, right = drawings(page(FOUND))

    def texts(drawing: ElementTree.Element, kind: str) -> list[str | None]:
        return [one.text for one in drawing.iter("text") if one.attrib["class"] == kind]

    assert texts(runs, "left") == ["0", "5", "10", "15"]
    assert texts(timeline, "left") == ["0", "1", "2", "3", "4"]
    assert texts(timeline, "middle") == ["0", "50", "100"]
    assert texts(right, "left") == ["0", "50", "100"]
    assert texts(committed, "middle") == ["1", "2", "3", "4"]
    for drawing in (runs, timeline, committed, right):
        assert all((*texts(drawing, "start"), *texts(drawing, "end")))


@pytest.mark.parametrize("top", [1e-3, 0.3, 1.0, 1.01, 9.0, 16.0, 89.0, 100.0, 4647.31, 999_999.0])
def test_the_values_of_an_axis_reach_the_largest(top: float) -> None:
    found = ticks(top)
    assert found[0] == 0
    assert found[-2] < top <= found[-1] * (1 + 1e-9)
    assert 3 <= len(found) <= 6
    assert all(value == int(value) for value in ticks(top, whole=True))


def test_what_was_not_measured_is_not_there() -> None:
    bare = replace(FOUND, inside=None, power=Power(), spec=replace(FOUND.spec, accept_hist=(),
                   accepted_per_position=()))  # fmt: skip
    assert len(drawings(page(bare))) == 3
    for text in (page(bare), table(bare)):
        for word in ("taken apart", "Power", "Junction", "junction", "J/token"):
            assert word not in text, word


def test_the_text_shows_what_a_part_reads_and_how_fast() -> None:
    lines = table(FOUND).splitlines()
    at = next(i for i, line in enumerate(lines) if "at 38 tokens, taken apart" in line)
    head, propose, verify, gate_up, others, note = lines[at : at + 6]
    assert head.split()[-5:] == ["MB", "GB/s", "of", "read", "rate"]
    assert propose.split() == ["propose", "1.000", "12.5%"]
    assert verify.split() == ["verify", "7.000", "87.5%", "15000.0", "2143", "71%"]
    assert gate_up.split() == ["layers.*.mlp.gate_up", "2.000", "25.0%", "6000.0", "3000", "100%"]
    assert gate_up.startswith("    layers")
    assert others.split() == ["embed,", "concat", "0.500", "6.2%"]
    expected = "takes 8.000 ms, its graphs 8.000; this device reads 3000 GB/s"
    assert note.strip() == f"the cycle as one graph {expected}"
