"""The demo: planner-nano plans one held-out task, with thinking, and reports its speed."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text as Styled

from thor_dflash.builders.build import build
from thor_dflash.calib.planbench import Task, Verdict, judge, task_from_line
from thor_dflash.config.tree import Config
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.plan_table import TableConsole, plan_panel
from thor_dflash.core.progress import Progress, amount
from thor_dflash.core.progress import ProgressTask as Timing
from thor_dflash.package.manifest import Manifest
from thor_dflash.runtime.decoding.proposers import NoDrafter, Proposer
from thor_dflash.runtime.session import Request, RequestReport, Session, open_session
from thor_dflash.runtime.text.tokenizer import Answer, Tokenizer


def _root() -> Path:
    """The checkout or unpacked sdist that holds this file; from a wheel, the working directory."""
    here = Path(__file__).resolve().parents[1:3]
    return next((path for path in here if (path / "models").is_dir()), Path())


ROOT = _root()
MODEL = ROOT / "models" / "planner-nano"
"""Not in a wheel: the repository and the sdist have it."""
PACKAGE = ROOT / "build" / "planner-nano"

RUNS = 3
"""Number of runs over which the median time is taken."""

BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One answer, and the reports of the runs that made it."""

    tokens: tuple[int, ...]
    reports: tuple[RequestReport, ...]

    @property
    def seconds(self) -> float:
        """Time from the prompt to the last token, median of the runs, s."""
        return median(r.timings.e2e_ms for r in self.reports) / 1e3

    @property
    def tok_s(self) -> float:
        """Decoding rate, median of the runs, tokens/s."""
        return median(r.timings.tok_s for r in self.reports)


def run(config: Config, progress: Progress) -> None:
    """Build the small model that ships with the repository and plan its first held-out task.

    Raises:
        ConfigError: the repository's model is missing.
    """
    task = read_task()
    manifest = build(MODEL / "target", MODEL / "drafter", PACKAGE, config.build, progress)
    session = open_session(PACKAGE, config.engine, progress)
    progress.close()
    console = TableConsole(sys.stdout)
    try:
        _show(console, session, manifest, task, progress)
    finally:
        session.close()


def read_task() -> Task:
    """Read the first task of models/planner-nano/heldout.jsonl."""
    path = MODEL / "heldout.jsonl"
    if not path.is_file():
        raise ConfigError(
            f"{path} must be a file: run the demo in a checkout or an unpacked sdist (got none)"
        )
    return task_from_line(path.read_text(encoding="utf-8").splitlines()[0])


def _show(
    console: Console, session: Session, manifest: Manifest, task: Task, progress: Progress
) -> None:
    text = session.tokenizer
    assert text is not None
    _introduce(console, manifest, task)
    messages = [{"role": role, "content": content} for role, content in task.messages]
    prompt = tuple(text.encode(text.render(messages, thinking=True)))
    request = Request(prompt=prompt, max_tokens=512, stop=frozenset(manifest.stop_tokens))
    answer = _stream(console, session, text, request)
    verdict = judge(task, answer.text())
    console.print(_plan(answer.text(), verdict))
    with progress.task("timing it against its own plain decoding", 2 * RUNS, "runs") as timing:
        fast = _measure(session, request, timing)
        plain = _measure(session, request, timing, NoDrafter())
    console.print(_numbers(fast, plain, len(prompt)))
    same = fast.tokens == plain.tokens
    console.print(
        f"{'Same' if same else 'NOT THE SAME'} {len(fast.tokens)} tokens both ways: speculation "
        "changes how fast, never what.",
        style="green" if same else "bold red",
    )
    console.print(
        f"A plain step computes the same {manifest.block} rows; on a CPU, one row would be faster. "
        "planner-nano shows the machinery on any laptop; none of its numbers is one of the 27B.",
        style="dim",
    )


def _introduce(console: Console, manifest: Manifest, task: Task) -> None:
    drafter = manifest.drafter
    assert drafter is not None
    size = amount(sum(e.bytes for e in manifest.files.values()), "bytes")
    console.print(
        f"[bold]planner-nano[/bold]  {len(manifest.target.layers)} + {len(drafter.layers)} layers, "
        f"NVFP4, block of {manifest.block}, {size}, engine {manifest.engine}"
    )
    user = next(content for role, content in task.messages if role == "user")
    title = f"held-out task {task.name}, never seen in training"
    console.print(Panel(Styled(user), title=title, title_align="left", border_style="blue"))


def _stream(console: Console, session: Session, text: Tokenizer, request: Request) -> Answer:
    """Print the thinking, dimmed, as it is committed. The answer is shown as a plan afterwards."""
    answer = Answer(text, request.prompt)
    console.print("thinking", style="dim bold")
    for chunk in session.generate(request):
        for piece in answer.feed(chunk.tokens):
            if piece.thinking:
                console.print(Styled(piece.text, style="dim italic"), end="")
    answer.end()
    console.print()
    return answer


def _plan(text: str, verdict: Verdict) -> Panel:
    state = "valid: the executor reaches the goal" if verdict.valid else verdict.reason
    try:
        plan: object = json.loads(text)
    except ValueError:
        plan = None
    return plan_panel(plan, text, state, "green" if verdict.valid else "red")


def _measure(
    session: Session, request: Request, timing: Timing, proposer: Proposer | None = None
) -> DemoRun:
    reports: list[RequestReport] = []
    tokens: tuple[int, ...] = ()
    for _ in range(RUNS):
        chunks = session.run(request, proposer) if proposer else session.generate(request)
        tokens = tuple(t for c in chunks for t in c.tokens)
        reports.append(session.report())
        timing.advance(1)
    return DemoRun(tokens, tuple(reports))


def _numbers(fast: DemoRun, plain: DemoRun, prompt: int) -> Table:
    table = Table(title=f"{prompt} prompt tokens, {len(fast.tokens)} generated, median of {RUNS}",
                  title_justify="left")  # fmt: skip
    table.add_column("")
    for name in ("DFlash", "plain"):
        table.add_column(name, justify="right")
    specs = [run.reports[-1].spec for run in (fast, plain)]
    table.add_column(f"tokens per cycle, 1 to {len(specs[0].accept_hist)}", style="cyan")
    table.add_row("cycles", *(str(s.cycles) for s in specs), histogram(specs[0].accept_hist))
    table.add_row("accept length", *(f"{s.accept_len:.2f}" for s in specs))
    table.add_row("tokens/s", f"{fast.tok_s:.0f}", f"{plain.tok_s:.0f}")
    table.add_row("request to plan, s", f"{fast.seconds:.2f}", f"{plain.seconds:.2f}")
    table.add_row("speed-up", f"[bold green]{plain.seconds / fast.seconds:.1f}x[/]", "1.0x")
    return table


def histogram(counts: tuple[int, ...]) -> str:
    """Return one bar character per count, its height relative to the largest count."""
    top = max(counts) or 1
    return "".join(BARS[-(-count * (len(BARS) - 1) // top)] for count in counts)
