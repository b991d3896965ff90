"""`thor-dflash plan`: requests one plan from a server. The plan goes to stdout; thinking, progress
and everything else to stderr.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Self

from thor_dflash.cli import exit_status, plan_server
from thor_dflash.cli.commands.generate import Printer
from thor_dflash.cli.input_files import read_chat, read_images, read_prompt, read_schema
from thor_dflash.cli.skill_file import read_skills
from thor_dflash.config.tree import Config
from thor_dflash.core.message_text import visible
from thor_dflash.core.plan_table import TableConsole, plan_panel
from thor_dflash.core.progress import Progress, ProgressTask, print_line
from thor_dflash.runtime.text.thinking import TextPiece

if TYPE_CHECKING:
    from thor_dflash.serving.protocol.messages import Chunk, Event, PlanRequest, Result


GAP = " [...] "
"""Stands for pieces of the thinking that the server dropped, as they were not read in time."""
STATES = {
    exit_status.OK: ("valid", "green"),
    exit_status.PARTIAL: ("cut short: the whole steps so far", "yellow"),
    exit_status.WRONG: ("not valid", "red"),
}
"""Exit status -> what it says of a plan, and its colour."""


def run(args: Namespace, config: Config, progress: Progress) -> int:
    """Request a plan from a server and print it; return the exit status."""
    with plan_server.connect(args) as planner:
        request = _request(args)
        with _Display(progress, f"waiting for {args.server}") as display:
            result = display.follow(planner.stream(request))
    status = _status(result)
    if args.json:
        print(json.dumps(_table(result)))
    else:
        _print(result, status, in_json=args.plan_format == "json_steps")
    print_line(sys.stderr, _summary(result, status))
    return status


def _request(args: Namespace) -> PlanRequest:
    from thor_dflash.serving.protocol import codec, validation
    from thor_dflash.serving.protocol.messages import PlanRequest

    given: dict[str, Any] = {"stream": "all"}
    for name in (
        *("thinking", "max_tokens", "deadline_ms", "session", "prefix_id"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "acceptance", "plan_format"),
    ):
        if (value := vars(args)[name]) is not None:
            given[name] = value
    if args.schema is not None:
        given["json_schema"] = read_schema(args.schema)
    if args.skills is not None:
        given["skills"] = read_skills(args.skills)
    if args.messages is not None:
        given |= _sent(*read_chat(args.messages))
    if args.draft:
        given["drafts"] = tuple(read_prompt("--draft", text, empty=True) for text in args.draft)
    images = read_images(args.image, args.prompt, "TEXT")
    if args.prompt is not None:
        given |= _asked(read_prompt("TEXT", args.prompt), images)
    request = codec.convert(given, PlanRequest)
    validation.check(request)
    return request


def _asked(text: str, images: Sequence[tuple[str, bytes]]) -> dict[str, Any]:
    """The fields of a text, and of the images that it is about, which come after it."""
    if not images:
        return {"prompt": text}
    parts = [{"type": "text", "text": text}, *({"type": "image"} for _ in images)]
    return _sent([{"role": "user", "content": parts}], images)


def _sent(
    turns: Sequence[Mapping[str, Any]], images: Sequence[tuple[str, bytes]]
) -> dict[str, Any]:
    """The fields of a chat, whose parts show these images one after the other."""
    names = iter(range(len(images)))

    def named(content: Any) -> Any:
        if isinstance(content, str):
            return content
        return [
            {**part, "image": f"image{next(names)}"} if part["type"] == "image" else part
            for part in content
        ]

    return {
        "messages": [{**turn, "content": named(turn["content"])} for turn in turns],
        "images": [
            {"id": f"image{i}", "format": kind, "data": data}
            for i, (kind, data) in enumerate(images)
        ],
    }


class _Display:
    """Shows on stderr how far a plan is: its thinking as text, the rest as tasks in progress."""

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress = progress
        self._printer = Printer(sys.stderr)
        self._open = ExitStack()
        self._task: ProgressTask | None = None
        self._phase = ""
        self._tokens = {True: 0, False: 0}
        """Tokens of the prompt that were read, and those that were committed after it."""
        self._lost = 0
        """Chunks that are missing."""
        self._begin("", label)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._end_line()
        self._open.__exit__(*error)

    def follow(self, events: Iterator[Event]) -> Result:
        """Show the chunks of a plan; return its result."""
        from thor_dflash.serving.protocol.messages import Chunk

        for number, event in enumerate(events):
            if not isinstance(event, Chunk):
                return event
            if event.seq - number > self._lost and self._phase == "thinking":
                self._think(GAP)
            self._lost = event.seq - number
            self._show(event)
        raise AssertionError("a stream ends with its result")

    def _show(self, chunk: Chunk) -> None:
        if chunk.kind == "thinking" and chunk.text:
            if self._phase != "thinking":
                self._begin("thinking")
            self._think(chunk.text)
        elif chunk.phase == "prefill" and self._phase != "prefill":
            self._begin("prefill", "reading the prompt")
        elif chunk.kind == "text" and self._phase != "answer":
            self._begin("answer", "writing the plan")
        if chunk.tokens is not None:
            reading = chunk.phase == "prefill"
            if self._task is not None and chunk.phase == self._phase:
                self._task.advance(chunk.tokens - self._tokens[reading])
            self._tokens[reading] = chunk.tokens

    def _begin(self, phase: str, label: str = "") -> None:
        self._end_line()
        self._open.close()
        self._phase, self._task = phase, None
        if label:
            self._task = self._open.enter_context(self._progress.task(label, None, "tokens"))

    def _think(self, text: str) -> None:
        with suppress(OSError):  # as in print_line: the plan goes on without its thinking
            self._printer.show([TextPiece(text, thinking=True)])

    def _end_line(self) -> None:
        with suppress(OSError):
            self._printer.close()


def _status(result: Result) -> int:
    if result.plan is None or not result.plan_valid or result.status == "error":
        return exit_status.WRONG
    return exit_status.OK if result.status == "ok" else exit_status.PARTIAL


def _print(result: Result, status: int, *, in_json: bool) -> None:
    """Print the plan to stdout. One that is not valid goes to stderr: what reads a pipe does not
    see the exit status, and could act on it.
    """
    text = result.text or ""
    if result.plan is None or status == exit_status.WRONG:
        print_line(sys.stderr, visible(text, keep="\n\t") if sys.stderr.isatty() else text)
    elif sys.stdout.isatty():
        text = json.dumps(result.plan, indent=2, ensure_ascii=False)
        TableConsole(sys.stdout).print(plan_panel(result.plan, text, *STATES[status]))
    else:
        plan = result.plan
        print(json.dumps(plan) if in_json else str(plan["body"]).removesuffix("\n"))


def _table(result: Result) -> Any:
    import msgspec

    return msgspec.to_builtins(result)


def _summary(result: Result, status: int) -> str:
    usage, timings, spec = result.usage, result.timings, result.spec
    none = "no plan: the answer is a text" if result.status == "ok" else "no plan"
    words = [
        f"{usage.thinking_tokens} thinking and {usage.output_tokens} answer tokens",
        none if result.plan is None else f"plan {STATES[status][0]}",
        f"ended by {result.finish_reason}",
    ]
    if timings is not None:
        words.insert(1, f"{timings.e2e_ms / 1e3:.2f} s")
    if spec is not None:
        words.insert(2, f"{spec.accept_len:.2f} tokens a cycle")
    if result.seed is not None:
        words.append(f"seed {result.seed}" + " with rejection" * (result.acceptance == "rejection"))
    return ", ".join(words)
