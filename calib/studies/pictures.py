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
from thor_dflash.calib.planbench.pictured import (
    PICTURED_FAMILIES,
    SHOWN,
    PicturedTask,
    Shown,
    heldout_pictured,
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
    """Answers the tasks of one package."""

    def __init__(self, session: Session, tasks: Sequence[PicturedTask]) -> None:
        self.session = session
        self.tasks = tasks
        self.own: list[tuple[int, ...]] = []
        """Tokens of the answers with the tasks' own pictures."""

    def row(self, shown: Shown, bar: ProgressTask) -> tuple[object, ...]:
        """Valid plans of each family and of all, and the accept length.

        Raises:
            AssertionError: an answer depends on the drafter.
        """
        valid: list[bool] = []
        reports: list[RequestReport] = []
        for index, pictured in enumerate(self.tasks):
            request = request_of(self.session, pictured, shown_picture(self.tasks, index, shown))
            tokens = plan_requests.tokens_of(self.session.generate(request))
            reports.append(self.session.report())
            answer = plan_requests.answer_of(self.session, request.prompt, tokens)
            valid.append(judge(pictured.task, answer).valid)
            if shown == "its own":
                self.own.append(tokens)
                if index < PLAIN:
                    same = plan_requests.tokens_of(self.session.run(request, NoDrafter()))
                    assert same == tokens, f"{pictured.task.name}: the drafter changed the answer"
            bar.advance(1)
        families = [pictured.task.family for pictured in self.tasks]
        rates: list[object] = []
        for name in (*PICTURED_FAMILIES, "all"):
            some = [v for v, f in zip(valid, families, strict=True) if name in (f, "all")]
            rates.append(round(100 * mean(some), 1) if some else "")
        specs = [report.spec for report in reports]
        committed = sum(spec.cycles * spec.accept_len for spec in specs)
        accept = committed / sum(spec.cycles for spec in specs)
        return shown, *rates, round(accept, 2)


def same_tokens(own: Sequence[Sequence[int]], file: Path) -> tuple[int, int]:
    """How many of transformers' answers the runtime's equal, and how many there are."""
    wanted: list[list[int]] = json.loads(file.read_text(encoding="utf-8"))["answers"]
    both = list(zip(own, wanted, strict=False))
    return sum(list(tokens) == want for tokens, want in both), len(both)


def measure(models: Path, engine: Literal["ort", "cuda"], limit: int) -> dict[str, script.Table]:
    """The tables of docs/performance."""
    progress, tasks = choose(sys.stderr), heldout_pictured(limit)
    head = ("picture", *(f"{name}, %" for name in PICTURED_FAMILIES), "all, %", "accept length")
    rows: list[Sequence[object]] = [head]
    with TemporaryDirectory() as held:
        out = Path(held) / "package"
        build(models / "target", models / "drafter", out, BuildConfig(engine=engine), Silent())
        with closing(open_session(out, EngineConfig(threads=1), Silent())) as session:
            study = PictureStudy(session, tasks)
            for shown in SHOWN:
                with progress.task(f"picture: {shown}", len(tasks), "tasks") as bar:
                    rows.append(study.row(shown, bar))
    progress.close()
    tables: dict[str, script.Table] = {"pictures": rows}
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
    if args.limit <= (few := len(PICTURED_FAMILIES)):
        parser.error(f"--limit must be greater than {few}, the families (got {args.limit})")
    script.show(measure(args.models, args.engine, args.limit).items(), as_json=args.json)


if __name__ == "__main__":
    sys.exit(script.run(main))
