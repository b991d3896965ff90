"""planner-nano-eyes on its held-out tasks, by the picture that it is shown.

python -m thor_dflash.calib.studies.pictures --models DIR [--engine cuda] [--limit N] [--json]

Every answer is made with the drafter; the first ones also without, and must be the same. A
transformers.json of calib.nano.reference beside the checkpoints is compared with the answers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Literal

from thor_dflash.builders.build import build
from thor_dflash.calib import plan_requests
from thor_dflash.calib.planbench import judge
from thor_dflash.calib.planbench.drawing import PALETTE
from thor_dflash.calib.planbench.families import Rejected
from thor_dflash.calib.planbench.pictured import (
    PICTURED_FAMILIES,
    SHOWN,
    PicturedTask,
    Shown,
    heldout_pictured,
    rearranged,
    shown_picture,
)
from thor_dflash.calib.studies import script
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import ProgressTask, Silent, choose
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.decoding.proposers import NoDrafter
from thor_dflash.runtime.session import Request, RequestReport, Session, open_session
from thor_dflash.runtime.vision.picture import Picture

TASKS = 180
PLAIN = 3
"""Tasks that are also answered without the drafter."""


def request_of(
    session: Session, pictured: PicturedTask, pixels: Array | None, *, thinking: bool = True
) -> Request:
    """A task as a request, with a picture [128, 128] of palette indices, or without."""
    text = plan_requests.tokenizer_of(session)
    system, (role, content) = pictured.task.messages
    parts = [{"type": "text", "text": content}]
    pictures = [] if pixels is None else [Picture(PALETTE[pixels])]
    parts += [{"type": "image"}] * len(pictures)
    messages = [{"role": system[0], "content": system[1]}, {"role": role, "content": parts}]
    ids = tuple(text.encode(text.render(messages, thinking, pictures=len(pictures))))
    images = session.images(ids, pictures)
    prompt, stop = images.prompt if images else ids, frozenset(session.manifest.stop_tokens)
    return Request(prompt=prompt, max_tokens=plan_requests.MAX_TOKENS, stop=stop, images=images)


class PictureStudy:
    """Answers the first held-out tasks with one package."""

    def __init__(self, session: Session, count: int) -> None:
        self.session = session
        self.count = count
        # The last tasks are shown the scenes of those after them.
        self.tasks = heldout_pictured(count + len(PICTURED_FAMILIES))
        self.own: list[tuple[int, ...]] = []
        """Tokens of the answers with the tasks' own pictures, after thinking."""
        self.own_valid: list[bool] = []

    def row(self, shown: Shown, bar: ProgressTask, *, thinking: bool = True) -> list[object]:
        """Valid plans of each family and of all, in percent, and the accept length.

        Raises:
            AssertionError: an answer depends on the drafter.
        """
        valid: list[bool] = []
        reports: list[RequestReport] = []
        for index, pictured in enumerate(self.tasks[: self.count]):
            pixels = shown_picture(self.tasks, index, shown)
            request = request_of(self.session, pictured, pixels, thinking=thinking)
            tokens, right = self._answer(pictured, request)
            valid.append(right)
            reports.append(self.session.report())
            if shown == "its own" and thinking:
                self.own.append(tokens)
                self.own_valid.append(right)
                if index < PLAIN:
                    same = plan_requests.tokens_of(self.session.run(request, NoDrafter()))
                    assert same == tokens, f"{pictured.task.name}: the drafter changed the answer"
            bar.advance(1)
        families = [pictured.task.family for pictured in self.tasks[: self.count]]
        rates: list[object] = []
        for name in (*PICTURED_FAMILIES, "all"):
            some = [v for v, f in zip(valid, families, strict=True) if name in (f, "all")]
            rates.append(round(100 * mean(some), 1) if some else "")
        specs = [report.spec for report in reports]
        committed = sum(spec.cycles * spec.accept_len for spec in specs)
        accept = committed / sum(spec.cycles for spec in specs)
        return [*rates, round(accept, 2)]

    def pairs(self, bar: ProgressTask) -> list[object]:
        """Texts with two pictures that need different plans: how many, and the share of right plans
        for the first, for the second and for both, in percent.
        """
        found: list[tuple[bool, bool]] = []
        for pictured, first in zip(self.tasks[: self.count], self.own_valid, strict=True):
            bar.advance(1)
            try:
                other = rearranged(pictured)
            except (Rejected, ValueError):
                continue
            request = request_of(self.session, other, other.drawn.pixels)
            found.append((first, self._answer(other, request)[1]))
        columns = [*zip(*found, strict=True), [all(pair) for pair in found]]
        rates = [round(100 * mean(column), 1) for column in columns] if found else [""] * 3
        return [len(found), *rates]

    def _answer(self, pictured: PicturedTask, request: Request) -> tuple[tuple[int, ...], bool]:
        """An answer's tokens, and whether its plan reaches the goal."""
        tokens = plan_requests.tokens_of(self.session.generate(request))
        answer = plan_requests.answer_of(self.session, request.prompt, tokens)
        return tokens, judge(pictured.task, answer).valid


def same_tokens(own: Sequence[Sequence[int]], file: Path) -> tuple[int, int]:
    """How many of transformers' answers the runtime's equal, and how many there are."""
    wanted: list[list[int]] = json.loads(file.read_text(encoding="utf-8"))["answers"]
    both = list(zip(own, wanted, strict=False))
    return sum(list(tokens) == want for tokens, want in both), len(both)


def measure(models: Path, engine: Literal["ort", "cuda"], limit: int) -> dict[str, script.Table]:
    """The tables of docs/performance."""
    progress = choose(sys.stderr)
    head = (
        "picture",
        "thinking",
        *(f"{name}, %" for name in PICTURED_FAMILIES),
        "all, %",
        "accept length",
    )
    rows: list[Sequence[object]] = [head]
    with TemporaryDirectory() as held:
        out = Path(held) / "package"
        build(models / "target", models / "drafter", out, BuildConfig(engine=engine), Silent())
        with closing(open_session(out, EngineConfig(threads=1), Silent())) as session:
            study = PictureStudy(session, limit)
            modes: list[tuple[Shown, bool]] = [(shown, True) for shown in SHOWN]
            modes.append(("its own", False))
            for shown, thinking in modes:
                word = "on" if thinking else "off"
                title = f"picture: {shown}, thinking {word}"
                with progress.task(title, limit, "tasks") as bar:
                    rows.append([shown, word, *study.row(shown, bar, thinking=thinking)])
            with progress.task("the same texts, other pictures", limit, "tasks") as bar:
                pairs = study.pairs(bar)
    progress.close()
    parts = "for the first picture", "for the second", "for both"
    named = ("texts with two pictures", *(f"right plans {part}, %" for part in parts))
    tables: dict[str, script.Table] = {"pictures": rows, "pairs": [named, pairs]}
    if (answers := models / "transformers.json").is_file():
        same, every = same_tokens(study.own, answers)
        tables["transformers"] = [("prompts", "same tokens"), (every, same)]
    return tables


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = script.parser(__doc__, package=False)
    parser.add_argument("--models", type=Path, required=True, help="holds target and drafter")
    parser.add_argument("--engine", choices=("ort", "cuda"), default="ort")
    parser.add_argument("--limit", type=script.count, default=TASKS, help="first so many tasks")
    args = parser.parse_args(argv)
    script.show(measure(args.models, args.engine, args.limit).items(), as_json=args.json)


if __name__ == "__main__":
    sys.exit(script.run(main))
