"""Writes the tables and figures of docs/performance from the raw results beside it.

    python docs/performance/generate.py            # rewrite the pages
    python docs/performance/generate.py --check    # exit 1 if a page would change

A page holds its text and, between `<!-- begin NAME -->` and `<!-- end -->`, what this writes.
record.py makes the results. Those that were copied from the measurement diary ("transcribed") are
shown only while there is no raw result of their kind.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
NOTHING = "*Not measured yet.*"
WIDTH = 40
"""Characters of the longest bar of a figure."""

UNNAMED = ("gpu", "cpu", "system")
"""Facts about a machine that need no name."""

Result = dict[str, Any]
Table = list[list[Any]]


def results(kind: str) -> list[Result]:
    """The results of a kind by name; transcribed ones only if there are no others."""
    pattern = re.compile(rf"{re.escape(kind)}(-[\w-]*)?\.json")
    paths = [path for path in sorted(RESULTS.glob("*.json")) if pattern.fullmatch(path.name)]
    found = [json.loads(path.read_text(encoding="utf-8")) | {"file": path.name} for path in paths]
    return [one for one in found if not one.get("transcribed")] or found


def number(value: object) -> str:
    """A cell: three significant digits or more."""
    if not isinstance(value, float):
        return str(value)
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def markdown(table: Table) -> str:
    """A table of Markdown; every column but the first is aligned to the right."""
    head, *rows = [[number(cell) for cell in row] for row in table]
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows)).replace(
        "| --- ", "|---"
    )


def bars(rows: Sequence[tuple[str, float]], unit: str) -> str:
    """A figure: one bar for each value, from 0."""
    wide, most = max(len(name) for name, _ in rows), max(value for _, value in rows)
    lines = [
        f"{name:<{wide}} {'█' * max(1, round(WIDTH * value / most))} {number(float(value))} {unit}"
        for name, value in rows
    ]
    return "\n".join(("```", *(line.rstrip() for line in lines), "```"))


# ---- the parts of pages --------------------------------------------------------------------------
def figures(kind: str, pattern: str) -> Callable[[], str]:
    """A table of the figures whose names match, one column for each result."""

    def write() -> str:
        found = results(kind)
        # Of rows with one name, the first: the measured one, before what it predicts for a Thor.
        named = [{row["name"]: row for row in reversed(one["data"])} for one in found]
        every = (row["name"] for one in found for row in one["data"])
        names = dict.fromkeys(name for name in every if re.search(pattern, name))
        if not names:
            return NOTHING
        columns = [f"{one['date']}, {i + 1}" for i, one in enumerate(found)]
        wanted = any(row.get("must") for rows in named for row in rows.values())
        table: Table = [["", "unit", *(["wanted"] if wanted else []), *columns]]
        for name in names:
            cells = [rows.get(name) for rows in named]
            first = next(cell for cell in cells if cell)
            must = [first.get("must") or ""] if wanted else []
            table.append([name, first["unit"], *must, *(c["value"] if c else "" for c in cells)])
        return markdown(table)

    return write


def device(result: Result) -> str:
    """The GPU of a result, and how many multiprocessors of it were tuned."""
    tuned = result["data"]["tuning"][1][0] if "tuning" in result["data"] else ""
    count = re.search(r", (\d+ SMs)", tuned)
    word: str = result["machine"]["gpu"].removeprefix("NVIDIA ").split()[0]
    return f"{word}, {count[1]}" if count else word


def beside(pattern: str, *kinds: str) -> Callable[[], str]:
    """A table of the figures of several kinds whose names match; of each the last result."""

    def write() -> str:
        found = [one[-1] for one in map(results, kinds) if one]
        if not found:
            return NOTHING
        named = [{row["name"]: row for row in reversed(one["data"])} for one in found]
        # The name of the first row, the read rate, is the device's.
        rates = [one["data"][0]["value"] for one in found]
        table: Table = [["", "unit", *map(device, found)], ["read rate", "GB/s", *rates]]
        for name, row in reversed(named[0].items()):
            if re.search(pattern, name):
                cells = [each[name]["value"] if name in each else "" for each in named]
                table.append([name, row["unit"], *cells])
        return markdown(table)

    return write


def section(kind: str, pattern: str, *, named: bool = False) -> Callable[[], str]:
    """A table of the figures of the sections that match, as they were recorded, with the names of
    the sections if wanted.
    """

    def write() -> str:
        rows = [row for one in results(kind) for row in one["data"]]
        found = [row for row in rows if re.search(pattern, row["section"])]
        if not found:
            return NOTHING
        noted = any(row["note"] for row in found)
        table: Table = [["", "", "unit", *([" "] if noted else [])]]
        for row in found:
            value = row["value"]
            cell = f"{value:,}" if isinstance(value, int) else value
            name = f"{row['section']}: {row['name']}" if named else row["name"]
            table.append([name, cell, row["unit"], *([row["note"]] if noted else [])])
        return markdown(table)

    return write


def section_bars(kind: str, pattern: str) -> Callable[[], str]:
    """A figure of a section whose values have one unit."""

    def write() -> str:
        for one in results(kind):
            if rows := [row for row in one["data"] if re.search(pattern, row["section"])]:
                return bars([(row["name"], row["value"]) for row in rows], rows[0]["unit"])
        return NOTHING

    return write


def figure_bars(kind: str, pattern: str) -> Callable[[], str]:
    """A figure of the values whose names match, of the last result that has them."""

    def write() -> str:
        for one in reversed(results(kind)):
            named = {row["name"]: row for row in reversed(one["data"])}  # as in `figures`
            rows = [named[name] for name in reversed(named) if re.search(pattern, name)]
            if rows:
                return bars([(row["name"], row["value"]) for row in rows], rows[0]["unit"])
        return NOTHING

    return write


def share_bars(kind: str, section: str) -> Callable[[], str]:
    """A figure of the shares of the read rate that the notes of a section give."""

    def write() -> str:
        for one in reversed(results(kind)):
            rows = [row for row in one["data"] if row["section"] == section]
            found = [(r["name"], re.search(r"(\d+)% of read rate", r["note"])) for r in rows]
            if found:
                return bars([(n, float(m[1])) for n, m in found if m], "% of read rate")
        return NOTHING

    return write


def table(kind: str, name: str) -> Callable[[], str]:
    """A table as it was recorded."""

    def write() -> str:
        found = [one["data"][name] for one in results(kind) if name in one["data"]]
        return "\n\n".join(markdown(each) for each in found) or NOTHING

    return write


def stacked(name: str, *kinds: str) -> Callable[[], str]:
    """The tables of several kinds as one, with the device in front if they do not name it."""

    def write() -> str:
        found = [one for kind in kinds for one in results(kind) if name in one["data"]]
        if not found:
            return NOTHING
        head = found[0]["data"][name][0]
        if head[0] == "device":
            return markdown([head, *(row for one in found for row in one["data"][name][1:])])
        rows = [[device(one), *row] for one in found for row in one["data"][name][1:]]
        return markdown([["device", *head], *rows])

    return write


def abreast(name: str, same: int, *kinds: str) -> Callable[[], str]:
    """The tables of several kinds side by side, joined by their first `same` columns."""

    def write() -> str:
        found = [one for kind in kinds for one in results(kind) if name in one["data"]]
        if not found:
            return NOTHING
        head = found[0]["data"][name][0]
        table: Table = [head[:same]]
        rows: dict[tuple[Any, ...], list[Any]] = {}
        for one in found:
            table[0] += [f"{device(one).partition(',')[0]}: {column}" for column in head[same:]]
            for row in one["data"][name][1:]:
                cells = rows.setdefault(tuple(row[:same]), row[:same])
                cells += [""] * (len(table[0]) - len(head) + same - len(cells)) + row[same:]
        return markdown(table + list(rows.values()))

    return write


def table_bars(kind: str, name: str, column: int, unit: str) -> Callable[[], str]:
    """A figure of one column of a recorded table."""

    def write() -> str:
        found = [one["data"][name] for one in results(kind) if name in one["data"]]
        if not found:
            return NOTHING
        return bars([(str(row[0]), float(row[column])) for row in found[-1][1:]], unit)

    return write


def row_bars(kind: str, name: str, row: str, unit: str) -> Callable[[], str]:
    """A figure of one row of a recorded table: a bar for each column."""

    def write() -> str:
        found = [one["data"][name] for one in results(kind) if name in one["data"]]
        if not found:
            return NOTHING
        head, *rows = found[-1]
        [cells] = [each[1:] for each in rows if each[0] == row]
        return bars([(str(n), float(x)) for n, x in zip(head[1:], cells, strict=True)], unit)

    return write


def sources(*kinds: str) -> Callable[[], str]:
    """Where the numbers of a page come from."""

    def write() -> str:
        lines: list[str] = []
        for one in (one for kind in kinds for one in results(kind)):
            parts = [one["date"]]
            for name, value in (*one["machine"].items(), *one["versions"].items()):
                parts += [value if name in UNNAMED else f"{name} {value}"]
            parts += [f"commit {one['commit']}"] if one["commit"] else []
            if one.get("transcribed"):
                parts += [f"copied from `{one['page']}` of the diary"]
            parts += [one["note"]] if "note" in one else []
            path = f"[{one['file']}](results/{one['file']})"
            lines += [f"* {path}: `{one['command']}`; {'; '.join(parts)}."]
        return "\n".join(lines) or NOTHING

    return write


TWO = (
    r"^(linears of a verify, share|the same linears|verify: (linear|head)|gdn of a verify|"
    r"verify at|cycle at|prefill of|host time)"
)
TUNED = ("tune", "planted", "part", "h200-tune", "h200-planted", "h200-part")
KINDS = r"^(layers\.|in_proj|out_proj|gate_up|down_proj|qkv|o_proj|head)"
PARTS: dict[str, Callable[[], str]] = {
    "verify": figures("bench", r"^(verify at|cycle at|plain step)"),
    "verify devices": beside(TWO, "bench", "h200-bench-1", "h200-bench-2"),
    "verify figure": figure_bars("bench", r": (verify|cycle)$"),
    "dflash2": table("dflash2", "cycles"),
    "dflash2 figure": row_bars("dflash2", "cycles", "propose", "ms"),
    "dflash2 mtp loop": table("mtp", "loop"),
    "dflash2 sources": sources("dflash2", "mtp"),
    "images": table("images", "images"),
    "images unchanged": table("images", "unchanged"),
    "images sources": sources("images"),
    "sampling": table("sampling", "sampled cycles"),
    "sampling lengths": table("sampling", "accept lengths"),
    "sampling sources": sources("sampling"),
    "linear": figures("bench", r"^(linears of a verify, share|the same linears)"),
    "linear launches": figures("bench", KINDS),
    "linear figure": share_bars("bench", "linears of a verify, one by one"),
    "gdn": figures("bench", r"^(gdn of a verify|verify: gdn)"),
    "gdn figure": figure_bars("bench", r"^(states instead of records: verify|verify at 2048)$"),
    "attention": figures("bench", r"^(growth from|verify: verify_attention)"),
    "contexts": table("contexts", "contexts"),
    "attention figure": table_bars("contexts", "contexts", 1, "ms"),
    "prefill": figures("bench", r"^prefill of"),
    "prompts": table("prompts", "prompts"),
    "prefill figure": table_bars("prompts", "steps", 1, "ms"),
    "host": figures("bench", r"^host time"),
    "schema cycles": table("schema-cycles", "cycles"),
    "host figure": table_bars("host-processors", "processors", 1, "us"),
    "tensorrt": table("tensorrt", "builds"),
    "tensorrt engines": table("tensorrt", "engines"),
    "tensorrt figure": table_bars("tensorrt", "builds", 3, "MiB"),
    "tensorrt sources": sources("tensorrt"),
    "startup": figures("startup", r"^(reading the package|from process start to ready)"),
    "startup figure": figure_bars("startup", r"^(reading the package|from process start)"),
    "flood": table("flood", "flood"),
    "serving": table("serving", "serving"),
    "ros2": table("ros2", "ros2"),
    "first plan": table("first-plan", "first plan"),
    "light client": table("light-client", "light client"),
    "http floods": table("http-floods", "http floods"),
    "heldout": table("heldout", "heldout"),
    "heldout figure": table_bars("heldout", "tokens per cycle", 1, "cycles"),
    "drafters": table("drafters", "drafters"),
    "pictures": table("pictures", "pictures"),
    "pictures pairs": table("pictures", "pairs"),
    "pictures transformers": table("pictures", "transformers"),
    "pictures held-out": table("trainer-pictures", "held-out"),
    "pictures text": table("trainer-pictures", "text"),
    "pictures figure": table_bars("trainer-pictures", "facts", 2, "%"),
    "pictures facts": table("trainer-pictures", "facts"),
    "pictures context": table("trainer-pictures", "drafter context"),
    "pictures runs": table("trainer-pictures", "runs"),
    "pictures sources": sources("pictures", "trainer-pictures"),
    "lookup replanning": table("lookup", "replanning"),
    "lookup sources": table("lookup", "sources"),
    "lookup copying": table("lookup", "copying"),
    "lookup nothing": table("lookup", "no repetition"),
    "lookup host": table("lookup", "host"),
    "lookup wide": table("wide-lookup", "replanning"),
    "lookup wide sources": table("wide-lookup", "sources"),
    "lookup origin": sources("lookup", "wide-lookup", "trace-lookup"),
    "trace facts": table("trace-lookup", "trace"),
    "trace lookup": table("trace-lookup", "trace lookup"),
    "trace sources": table("trace-lookup", "trace sources"),
    "quality divergence": table("quality", "divergence"),
    "quality plans": table("quality", "plans"),
    "quality better": table("quality", "better"),
    "quality gates": table("quality", "gates"),
    "quality draft vocabulary": table("quality", "draft vocabulary"),
    "quality sources": sources("quality"),
    "relaxed": table("policies", "relaxed"),
    "width": table("policies", "width"),
    "grammar": table("grammar", "grammar"),
    "quantize layer": table("quantize-layer", "one layer"),
    "quantize layer figure": table_bars("quantize-layer", "one layer", 3, "ns"),
    "quantize gpu": table("quantize-gpu", "one layer, GPU"),
    "quantize rehearsal": table("quantize-rehearsal", "rehearsal"),
    "calibrate package": table("calibrate-package", "calibrate"),
    "quantize sources": sources(
        "quantize-layer", "quantize-gpu", "quantize-rehearsal", "calibrate-package"
    ),
    "numerics": table("numerics", "numerics"),
    "builds": table("numerics", "builds"),
    "numerics figure": table_bars("numerics", "builds", 4, "%"),
    "agent whole": section("agent-whole", "^whole trace$"),
    "agent design": section("agent-whole", "^design$"),
    "agent without": section("agent-whole", " reuse$", named=True),
    "agent replayed": section("agent-1", "^trace"),
    "agent figure": section_bars("agent-whole", "^first tokens$"),
    "agent copies": section("agent-1", "^copies$"),
    "agent memory": section("agent-1", "^memory$"),
    "agent thor": section("agent-whole", "^predicted"),
    "agent overhead": table("turn-overhead", "turn overhead"),
    "agent sources": sources("agent-whole", "agent-1", "agent-2", "turn-overhead"),
    "tuning": stacked("tuning", "tune", "h200-tune"),
    "tuning steps": abreast("steps", 1, "tune", "h200-tune"),
    "tuning changed": stacked("changed", "tune", "h200-tune"),
    "tuning twice": stacked("tuned twice", "tune", "h200-tune"),
    "tuning figure": table_bars("planted", "planted", 3, "us"),
    "tuning planted": abreast("planted", 2, "planted", "h200-planted"),
    "tuning parts": stacked("tuning", "part", "h200-part"),
    "tuning parts steps": stacked("steps", "part", "h200-part"),
    "tuning parts changed": stacked("changed", "part", "h200-part"),
    "tuning serve": table("serve-tuning", "serve"),
    "tuning named": table("serve-tuning", "named"),
    "tuning sources": sources(*TUNED, "serve-tuning"),
    "bench sources": sources("bench"),
    "verify sources": sources("bench", "h200-bench"),
    "attention sources": sources("bench", "contexts"),
    "prefill sources": sources("bench", "prompts"),
    "host sources": sources("bench", "schema-cycles", "host-processors"),
    "startup sources": sources("startup"),
    "flood sources": sources("flood"),
    "serving sources": sources("serving"),
    "ros2 sources": sources("ros2", "first-plan"),
    "light client sources": sources("light-client"),
    "http floods sources": sources("http-floods"),
    "planner sources": sources("heldout", "drafters", "policies", "grammar"),
    "numerics sources": sources("numerics"),
}


def page(text: str) -> str:
    """A page with its parts written anew."""
    return re.sub(
        r"(<!-- begin ([\w -]+?) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{PARTS[found[2]]()}\n{found[3]}",
        text,
        flags=re.S,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    args = parser.parse_args(argv)
    stale: list[str] = []
    for path in sorted(HERE.glob("*.md")):
        old = path.read_text(encoding="utf-8")
        new = page(old)
        if new != old:
            stale += [path.name]
            if not args.check:
                path.write_text(new, encoding="utf-8")
    if args.check and stale:
        print(f"pages differ from their results: {', '.join(stale)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
