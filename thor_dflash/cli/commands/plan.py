"""`thor-dflash plan`: requests one plan from a server and prints it as it arrives."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from thor_dflash.cli.commands.generate import Printer
from thor_dflash.cli.input_files import read_chat, read_schema
from thor_dflash.config.tree import Config
from thor_dflash.core.progress import Progress, ProgressTask, print_line
from thor_dflash.runtime.text.thinking import TextPiece

if TYPE_CHECKING:
    from thor_dflash.serving.protocol.messages import Event, PlanRequest, Result


GAP = "pieces are missing here: the server dropped them, as they were not read in time"


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Request a plan from a server and print it."""
    from thor_dflash.core.extras import extra

    with extra("serve"):
        from thor_dflash.serving.client import Options, RemotePlanner, connection
        from thor_dflash.serving.transport import access

    token = None if args.token_file is None else access.read_token(str(args.token_file))
    options = Options(keys="" if args.keys is None else str(args.keys), token=token)
    connection.check(args.server, options, "--server")
    with RemotePlanner(args.server, options) as planner:
        request = _request(args)
        waiting = progress.task(f"waiting for {args.server}")
        if args.json:
            with waiting:
                result = planner.plan(request)
            print(json.dumps(_table(result)))
            return
        result = _show(_begun(planner.stream(request), waiting))
    print_line(sys.stderr, _summary(result))


def _request(args: Namespace) -> PlanRequest:
    from thor_dflash.serving.protocol.messages import Message, PlanRequest

    given: dict[str, Any] = {"stream": "text"}
    for name in ("thinking", "max_tokens", "deadline_ms", "session", "prefix_id"):
        if (value := vars(args)[name]) is not None:
            given[name] = value
    if args.schema is not None:
        given["json_schema"] = read_schema(args.schema)
    if args.messages is not None:
        turns: list[dict[str, Any]] = [*read_chat(args.messages)]
        given["messages"] = tuple(Message(**turn) for turn in turns)
    return PlanRequest(prompt=args.prompt, **given)


def _begun(events: Iterator[Event], waiting: ProgressTask) -> Iterator[Event]:
    """Pass on the events; ends `waiting` at the first."""
    with waiting:
        first = next(events)
    yield first
    yield from events


def _show(events: Iterator[Event]) -> Result:
    """Print the pieces of a plan up to the first that is missing; then its answer, once whole."""
    from thor_dflash.serving.protocol.messages import Chunk

    printer, missing = Printer(sys.stdout), False
    with closing(printer):
        for seq, event in enumerate(events):
            missing = missing or event.seq != seq
            if not isinstance(event, Chunk):
                break
            if event.text is not None and not missing:
                printer.show([TextPiece(event.text, event.kind == "thinking")])
        else:
            raise AssertionError("a stream ends with its result")
    if missing:
        print_line(sys.stderr, f"{GAP}; the whole answer follows")
        print(event.text)
    return event


def _table(result: Result) -> Any:
    import msgspec

    return msgspec.to_builtins(result)


def _summary(result: Result) -> str:
    usage, timings, spec = result.usage, result.timings, result.spec
    words = [
        f"{usage.thinking_tokens} thinking and {usage.output_tokens} answer tokens",
        f"plan {'valid' if result.plan_valid else 'not valid'}",
        f"ended by {result.finish_reason}",
    ]
    if timings is not None:
        words.insert(1, f"{timings.e2e_ms / 1e3:.2f} s")
    if spec is not None:
        words.insert(2, f"{spec.accept_len:.2f} tokens a cycle")
    return ", ".join(words)
