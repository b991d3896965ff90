"""A profile as text and as an HTML page: both show what was measured, and drawings are to scale."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from thor_dflash.cli.commands.profile import trace
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
    Stretch,
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
    return [float(bar.attrib["width"]) for bar in drawing.iter("rect")]


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
    prompt, first, second = timeline.iter("rect")
    assert "prompt, 20.00 ms from 0.0" in (prompt[0].text or "")
    assert "4 tokens, 40.00 ms from 20.0" in (first[0].text or "")
    ratio = (float(second.attrib["width"]) + 1) / (float(prompt.attrib["width"]) + 1)
    assert ratio == pytest.approx(2, rel=0.01)


def test_a_mark_is_at_the_time_in_which_a_part_s_bytes_can_be_read() -> None:
    inside = drawings(page(FOUND))[3]
    bars = list(inside.iter("rect"))
    marks = [float(line.attrib["x1"]) for line in inside.iter("line")]
    scale = float(bars[1].attrib["width"]) / 7.0  # width of 1 ms
    start = float(bars[1].attrib["x"])
    assert marks == pytest.approx([start + 5.0 * scale, start + 2.0 * scale], abs=0.2)


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


def test_the_text_shows_what_an_answer_costs() -> None:
    lines = table(FOUND).splitlines()
    (rail,) = (line for line in lines if "VDD" in line)
    assert rail.split() == ["VDD", "<GPU>", "4.00", "60.00", "30.00", "3.00"]
    assert "  junction at most 61.2 °C" in lines
    cells = "".join(f"<td>{number}</td>" for number in ("4.00", "60.00", "30.00", "3.000"))
    assert f"<td>VDD &lt;GPU&gt;</td>{cells}" in page(FOUND)


def test_bars_of_the_text_are_as_long_as_their_numbers_and_none_is_lost() -> None:
    phases = {name: ProfilePhase(1.0, 1.0, share) for name, share in (("all", 1.0), ("half", 0.5))}
    spec = replace(FOUND.spec, accept_hist=(1000, 500, 1, 0))
    lines = table(replace(FOUND, phases=phases, spec=spec)).splitlines()
    bars = {line.split()[0]: line.count("█") for line in lines if line.endswith("█")}
    assert bars == {"all": 20, "half": 10}
    (drawn,) = (line for line in lines if line.startswith("  committed tokens a cycle"))
    assert drawn.endswith("1 to 4:  |█▄▁ |"), "one of a thousand is seen"


SOAK = (
    Stretch(0.0, 50.0, 40, 10.0, 130.0, {"VDD_CPU_SOC_MSS": 7.5, "VIN": 60.0}, 50.0),
    Stretch(50.5, 100.0, 41, 12.5, 100.0, {"VDD_CPU_SOC_MSS": 6.0, "VIN": 45.0}, 75.0),
)


def test_a_soak_is_a_line_for_each_stretch() -> None:
    lines = table(replace(FOUND, soak=SOAK)).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("over time"))
    assert [line.split() for line in lines[at : at + 4]] == [
        "over time runs cycle, ms tokens/s VDD_CPU_SOC_MSS, W VIN, W junction, °C".split(),
        "0.0 to 50.0 s 40 10.00 130.00 7.50 60.00 50.0".split(),
        "50.5 to 100.0 s 41 12.50 100.00 6.00 45.00 75.0".split(),
        [],
    ]
    assert len({len(line) for line in lines[at : at + 3]}) == 1  # columns are aligned
    assert "over time" not in table(FOUND)


def test_a_soak_is_drawn_number_by_number() -> None:
    text = page(replace(FOUND, soak=SOAK))
    assert [
        t for t in re.findall("<h2>(.*?)</h2>", text) if t.startswith("Over time: ")
    ] == [
        f"Over time: {name}" for name in ("a cycle, ms", "VDD_CPU_SOC_MSS, W", "VIN, W",
                                          "junction, °C")
    ]  # fmt: skip
    cycle, _, vin, heat = drawings(text)[4:8]
    for drawing, ratio in ((cycle, 10 / 12.5), (vin, 60 / 45), (heat, 50 / 75)):
        first, second = (float(bar.attrib["height"]) for bar in drawing.iter("rect"))
        assert first / second == pytest.approx(ratio, abs=0.01)
    first, second = cycle.iter("rect")
    assert float(second.attrib["x"]) - float(first.attrib["x"]) == pytest.approx(
        (float(second.attrib["width"]) + 1) * 50.5 / 49.5, abs=0.05
    )
    assert first[0].text == "10.00, 0.0 to 50.0 s"


def test_a_junction_that_was_not_read_throughout_is_not_drawn() -> None:
    soak = (SOAK[0], replace(SOAK[1], hottest_c=None))
    text = page(replace(FOUND, soak=soak))
    assert "Over time: junction" not in text
    assert "<td>50.0</td>" in text


def test_a_page_beside_an_earlier_one_shows_what_became_of_its_medians() -> None:
    before = replace(FOUND, times={name: spread([22.0]) for name in TITLES})
    text = page(FOUND, before)
    assert text.count("<td>0.477x of 22.00</td>") == len(TITLES)
    assert "<th>before</th>" in text
    assert "x of" not in page(FOUND)
    assert "<th>before</th>" not in page(FOUND)


def test_the_last_step_of_a_dead_end_is_not_drawn_as_the_prompt() -> None:
    ended = replace(FOUND, finish="grammar_dead_end", timeline=(*FOUND.timeline, StepEnd(130.0, 0)))
    for found, names in ((FOUND, []), (ended, ["dead end"])):
        expected = ["prompt", "cycle", "cycle", *names]
        events = trace(found)["traceEvents"]
        assert [event["name"] for event in events if event["ph"] == "X"] == expected
        assert page(found).count("dead end, 30.00 ms") == len(names)
        assert page(found).count("<title>prompt, ") == 1
