"""A profile as aligned text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thor_dflash.core.progress import amount

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from thor_dflash.runtime.measure.profile import (
        CycleBreakdown,
        Power,
        Profile,
        ProfilePart,
        ProfilePhase,
        Spread,
        Stretch,
    )

BARS = " ▁▂▃▄▅▆▇█"
TITLES = {
    "ttft_ms": "to the first token, ms",
    "prefill_ms": "reading the prompt, ms",
    "cycle_ms": "a cycle, ms",
    "each_ms": "each cycle, ms",
    "e2e_ms": "whole answer, ms",
    "tok_s": "decoding, tokens/s",
}


def table(found: Profile, base: Profile | None = None) -> str:
    """The whole profile; with `base`, also the change of its medians."""
    spec = found.spec
    return "\n".join(
        [
            *head(found),
            "",
            *_times(found.times, base.times if base else {}),
            "",
            *_phases(found.phases),
            *(_inside(found.inside) if found.inside else ()),
            *_power(found.power, found.tokens),
            *_soak(found.soak),
            "",
            f"{amount(spec.cycles, 'cycles')} of {spec.accept_len:.2f} tokens; "
            f"{spec.accepted} of {spec.drafted} drafted tokens were right",
            *(
                f"  {source}: {one.accepted} of {one.drafted} in {amount(one.blocks, 'blocks')}"
                for source, one in spec.sources.items()
            ),
            *_histogram(spec.accept_hist),
            *(f"note: {text}" for text in found.warnings),
        ]
    )


def head(found: Profile) -> tuple[str, str]:
    """Two lines: what was measured, and how often."""
    subject = found.subject
    return (
        f"{subject.engine} on {subject.device}; thor-dflash {subject.version}, "
        f"package {subject.package[:12]}",
        f"prompt of {subject.prompt_tokens} tokens, answer of {found.tokens}, ended by "
        f"{found.finish}; {amount(found.runs, 'runs')} after {found.warmup} to warm up",
    )


def _times(times: Mapping[str, Spread], before: Mapping[str, Spread]) -> list[str]:
    heads = "".join(f"{title:>10}" for title in ("median", "least", "90 %", "99 %", "most"))
    lines = [f"{'an answer':<24}{heads}"]
    for name, title in TITLES.items():
        s = times[name]
        numbers = "".join(f"{x:10.2f}" for x in (s.median, s.low, s.p90, s.p99, s.high))
        lines.append(f"  {title:<22}{numbers}   {change(s, before.get(name))}".rstrip())
    return lines


def _phases(phases: Mapping[str, ProfilePhase]) -> list[str]:
    wide = max(22, *(len(name) for name in phases))  # graphs that run as one have one long name
    lines = [f"{'where its time goes':<{wide + 2}}{'ms':>10}{'a cycle':>10}{'share':>10}"]
    for name, phase in phases.items():
        cycle = f"{phase.cycle_ms:10.3f}" if phase.cycle_ms else " " * 10
        bar = "█" * round(20 * phase.share)
        lines.append(f"  {name:<{wide}}{phase.ms:10.2f}{cycle}{phase.share:10.1%}  {bar}".rstrip())
    return lines


def _inside(inside: CycleBreakdown) -> Iterator[str]:
    names = {part: part.graph if not part.name else f"  {part.name}" for part in inside.parts}
    wide = max(22, *map(len, names.values()))
    title = f"a cycle at {inside.context} tokens, taken apart"
    rate = f"{'of read rate':>14}" if inside.read_rate else ""
    yield ""
    yield f"{title:<{wide + 2}}{'ms':>10}{'share':>10}{'MB':>10}{'GB/s':>10}{rate}"
    for part, name in names.items():
        share = part.ms / inside.cycle_ms
        yield f"  {name:<{wide}}{part.ms:10.3f}{share:10.1%}{_stream(part, inside.read_rate)}"
    together = sum(part.ms for part in inside.parts if not part.name)
    note = f"the cycle as one graph takes {inside.cycle_ms:.3f} ms, its graphs {together:.3f}"
    if inside.read_rate:
        note += f"; this device reads {inside.read_rate / 1e9:.0f} GB/s"
    yield f"  {note}"


def _stream(part: ProfilePart, read_rate: float) -> str:
    """The bytes that a part moves, and how fast."""
    if not part.nbytes:
        return ""
    rate = part.nbytes / part.ms * 1e3
    share = f"{rate / read_rate:14.0%}" if read_rate else ""
    return f"{part.nbytes / 1e6:10.1f}{rate / 1e9:10.0f}{share}"


def _power(power: Power, tokens: int) -> Iterator[str]:
    if power.rails:
        yield ""
        yield f"{'power':<24}{'idle, W':>10}{'mean, W':>10}{'J':>10}{'J/token':>10}"
    for rail in power.rails:
        numbers = (rail.idle_w, rail.mean_w, rail.joules, rail.joules / max(1, tokens))
        yield f"  {rail.name:<22}" + "".join(f"{x:10.2f}" for x in numbers)
    if power.hottest_c is not None:
        yield f"  junction at most {power.hottest_c:.1f} °C"


def course(soak: Sequence[Stretch]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A soak's numbers over time: titles, and a row for each stretch."""
    rails = list(soak[0].watts)
    hot = any(s.hottest_c is not None for s in soak)
    titles = ("runs", "cycle, ms", "tokens/s", *(f"{rail}, W" for rail in rails))
    rows = [
        (
            span_of(s),
            str(s.runs),
            f"{s.cycle_ms:.2f}",
            f"{s.tok_s:.2f}",
            *(f"{s.watts[rail]:.2f}" for rail in rails),
            *([_degrees(s.hottest_c)] if hot else []),
        )
        for s in soak
    ]
    return ("over time", *titles, *(["junction, °C"] if hot else [])), rows


def span_of(stretch: Stretch) -> str:
    """Start and end of a stretch."""
    return f"{stretch.start_s:.1f} to {stretch.end_s:.1f} s"


def _degrees(celsius: float | None) -> str:
    return "" if celsius is None else f"{celsius:.1f}"


def _soak(soak: Sequence[Stretch]) -> Iterator[str]:
    if not soak:
        return
    (title, *titles), rows = course(soak)
    wide = [max(10, len(name) + 2) for name in titles]
    yield ""
    yield f"{title:<24}" + "".join(f"{n:>{w}}" for n, w in zip(titles, wide, strict=True))
    for first, *cells in rows:
        yield f"  {first:<22}" + "".join(f"{c:>{w}}" for c, w in zip(cells, wide, strict=True))


def change(now: Spread, before: Spread | None) -> str:
    """The change of a median; empty if there is no earlier one."""
    return f"{now.median / before.median:.3f}x of {before.median:.2f}" if before else ""


def _histogram(counts: Sequence[int]) -> list[str]:
    most = max(counts, default=0)
    if not most:
        return []
    bars = "".join(BARS[-(-8 * count // most)] for count in counts)
    return [f"  committed tokens a cycle, 1 to {len(counts)}:  |{bars}|"]
