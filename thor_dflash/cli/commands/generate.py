"""`thor-dflash generate`: one prompt, one answer, as a stream of text or as one JSON object."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from thor_dflash.cli.requests import read_prompt, unbounded_notes, unused_schema_notes
from thor_dflash.config.tree import Config
from thor_dflash.core.message_text import visible
from thor_dflash.core.progress import Progress, Silent, amount, print_line
from thor_dflash.serving.planner.partial_json import read_object

if TYPE_CHECKING:
    from thor_dflash.runtime.session import RequestReport, TokenChunk
    from thor_dflash.runtime.text.thinking import TextPiece
    from thor_dflash.runtime.text.tokenizer import Answer

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Printer:
    """Writes an answer as it arrives; thinking is dim on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._colour = self._terminal and Console(file=stream).color_system is not None
        self._dim: bool = False
        self._ended = True
        """Whether the text so far ends with a line end."""

    def show(self, pieces: Iterable[TextPiece]) -> None:
        """Write some pieces of text."""
        for piece in pieces:
            if self._colour and piece.thinking != self._dim:
                self._dim = piece.thinking
                self._stream.write(DIM if self._dim else PLAIN)
            # A terminal would obey control characters of the model's text.
            self._stream.write(visible(piece.text, keep="\n\t") if self._terminal else piece.text)
            if piece.text:
                self._ended = piece.text.endswith("\n")
        self._stream.flush()

    def close(self) -> None:
        """End the line and reset the colour. Idempotent."""
        self._stream.write((PLAIN if self._dim else "") + ("" if self._ended else "\n"))
        self._stream.flush()
        self._ended = True
        self._dim = False


@dataclasses.dataclass(slots=True)
class Completion:
    """The result of one request."""

    tokens: list[int]
    finish: str = ""
    seconds: float = 0.0


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Answer one prompt and print the answer to stdout."""
    from thor_dflash.runtime.session import open_session
    from thor_dflash.runtime.text.tokenizer import Answer

    prompt_options = read_prompt(args, config.decode)
    check = partial(prompt_options.prompt, decode=config.decode)
    with closing(open_session(args.package, config.engine, progress, check=check)) as session:
        request = prompt_options.request(session, config, progress)
        progress.close()
        for text in unbounded_notes(request):
            print_line(sys.stderr, f"note: {text}")
        answer = Answer(session.tokenizer, request.prompt) if session.tokenizer else None
        chunks = _read(session.generate(request), len(request.prompt), progress)
        output = _stream(chunks, answer, progress if args.json else None)
        report = session.report()
    for text in unused_schema_notes(request, answer.text() if answer else ""):
        print_line(sys.stderr, f"note: {text}")
    if args.json:
        print(json.dumps(_result(output, answer, report)))
    else:
        print_line(sys.stderr, _summary(output, report))


def _read(chunks: Iterator[TokenChunk], length: int, progress: Progress) -> Iterator[TokenChunk]:
    """Pass on the chunks, but turn those that read the prompt of `length` tokens into progress
    reports, unless one step reads all of it.
    """
    chunk, done = next(chunks), 0
    while chunk.encoded:
        chunk = next(chunks)
    if not chunk.tokens and 0 < chunk.prompt_done < length - 1:
        with progress.task("reading the prompt", length, "tokens") as task:
            while not chunk.tokens and not chunk.finish:
                if not chunk.encoded:
                    task.advance(chunk.prompt_done - done)
                    done = chunk.prompt_done
                chunk = next(chunks)
    yield chunk
    yield from chunks


def _stream(
    chunks: Iterator[TokenChunk], answer: Answer | None, progress: Progress | None
) -> Completion:
    """Print the answer as it comes, or with `progress` only how many tokens it has."""
    output, printer = Completion([]), Printer(sys.stdout)
    start = time.perf_counter()
    try:
        with (progress or Silent()).task("answering", None, "tokens") as task:
            for chunk in chunks:
                output.tokens += chunk.tokens
                output.finish = chunk.finish
                task.advance(len(chunk.tokens))
                pieces = answer.feed(chunk.tokens) if answer else _ids(chunk.tokens)
                if not progress:
                    printer.show(pieces)
        if answer and not progress:
            printer.show(answer.end())
    finally:
        printer.close()
    output.seconds = time.perf_counter() - start
    return output


def _ids(tokens: tuple[int, ...]) -> list[TextPiece]:
    from thor_dflash.runtime.text.thinking import TextPiece

    return [TextPiece(f"{token} ", thinking=False) for token in tokens]


def _result(output: Completion, answer: Answer | None, report: RequestReport) -> dict[str, object]:
    drawn = report.sampling
    return {
        "tokens": output.tokens,
        "text": answer.text() if answer else None,
        "plan": read_object(answer.text()) if answer else None,
        "thinking": answer.thinking() if answer else None,
        "finish_reason": output.finish,
        "seed": drawn.seed if drawn else None,
        "acceptance": drawn.acceptance if drawn else None,
        "usage": dataclasses.asdict(report.usage),
        "spec": dataclasses.asdict(report.spec),
        "timings": {**dataclasses.asdict(report.timings), "phases_ms": dict(report.phases_ms)},
        "phases": {name: dataclasses.asdict(part) for name, part in report.phases.items()},
        "close_kind": report.close,
        "notes": [dataclasses.asdict(note) for note in report.notes],
        "drafts": [dataclasses.asdict(one) for one in report.drafts],
    }


def _summary(output: Completion, report: RequestReport) -> str:
    count, spec = len(output.tokens), report.spec
    drawn = report.sampling
    seed = f", seed {drawn.seed}{' with rejection' * drawn.rejection}" if drawn else ""
    return (
        f"{amount(count, 'tokens')} in {output.seconds:.2f} s, {count / output.seconds:.1f} tok/s, "
        f"{amount(spec.cycles, 'cycles')} of {spec.accept_len:.2f} tokens, "
        f"ended by {output.finish}{seed}"
    )
