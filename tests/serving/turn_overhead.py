"""What a server does for the last turn of a long conversation before its first prefill step.

    python tests/serving/turn_overhead.py TRACE.jsonl --tokenizer DIR [--json]

From the repository root, with PYTHONPATH=.:tests. The turns of the longest conversation are
prepared in order by a session with a tiny model and the tokenizer of DIR, so that the last one
finds the turns before it encoded. Milliseconds of processor time, also of the process that renders
templates; the least and the median of ROUNDS, because other work on a machine makes the same
instructions slower.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from support.checkpoints import GEOMETRIES, write_target

from thor_dflash.builders.build import build
from thor_dflash.calib.replay.recorded_trace import RecordedConversation, read_trace
from thor_dflash.calib.studies import script
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.progress import Silent
from thor_dflash.package import tokenizer_files
from thor_dflash.runtime.session import Request, open_session
from thor_dflash.runtime.text import template_process, template_worker
from thor_dflash.runtime.text.messages import chat
from thor_dflash.runtime.text.prompt_segments import PromptEncoder
from thor_dflash.serving.planner.session_backend import SessionBackend
from thor_dflash.serving.protocol import codec, messages, validation

ROUNDS = 25
VOCABULARY = 248_320
CAPACITY, CHUNK = 33_280, 128
CONFIG = ServeConfig(thinking="off", max_tokens=1024)


def package(tokenizer: Path, root: Path) -> Path:
    """A package with two tiny layers, the tokenizer of a directory and its vocabulary."""
    geometry = replace(GEOMETRIES["27b"], vocab=VOCABULARY, layers=2, interval=2, hidden=16)
    write_target(root / "target", geometry, 5)
    for name in tokenizer_files.FILES:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, root / "target" / name)
    path = root / "target" / "config.json"
    config_text = path.read_text(encoding="utf-8")
    longer = re.sub(r'("max_position_embeddings": )\d+', rf"\g<1>{2 * CAPACITY}", config_text)
    path.write_text(longer, encoding="utf-8")
    config = BuildConfig(chunk=CHUNK, capacity=CAPACITY)
    build(root / "target", None, root / "package", config, Silent())
    return root / "package"


def body_of(conversation: RecordedConversation, index: int) -> bytes:
    """A turn as a plan request, as a gateway sends it."""
    turns = [
        {"content": "", **{k: v for k, v in message.items() if v is not None}}
        for message in conversation.turns[index].messages
    ]
    ask = {"op": "plan", "v": 1, "id": "a", "messages": turns, "tools": conversation.tools}
    return msgspec.msgpack.encode(ask)


def read(body: bytes) -> messages.PlanRequest:
    """The request of a body."""
    found = codec.codec_of(body)
    request = codec.read(found, body, codec.head_of(found, body))
    assert isinstance(request, messages.PlanRequest)
    return request


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Least and median milliseconds of this process."""
    times: list[float] = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        times.append(1e3 * (time.process_time() - start))
    return min(times), statistics.median(times)


def measure(trace: Path, tokenizer: Path) -> list[tuple[object, ...]]:
    """The table: a row for each part, and for all of it."""
    every = read_trace(trace).conversations
    longest = max(every, key=lambda one: len(body_of(one, len(one.turns) - 1)))
    last = len(longest.turns) - 1
    with TemporaryDirectory() as name:
        made = package(tokenizer, Path(name))
        session = open_session(made, EngineConfig(threads=1), Silent(), reuse=64 << 20)
        with closing(SessionBackend(session, CONFIG)) as backend:
            for index in range(last + 1):
                prepared = backend.prepare(read(body_of(longest, index)), None)
            body, prompt = body_of(longest, last), prepared.prompt
            ask = read(body)
            given = validation.messages_of(None, ask.messages)
            source = (tokenizer / tokenizer_files.TEMPLATE).read_text(encoding="utf-8")
            lines = request_lines(source, chat(given), longest)
            text = backend.tokenizer.render(given, False, longest.tools)
            encoder = PromptEncoder(backend.tokenizer)
            encoder.encode(text)
            admitted = prepared.admitted
            assert admitted is not None
            own = {
                "read the request": timed(lambda: read(body)),
                "prepare it": timed(lambda: backend.prepare(ask, None)),
                "find what is held, at the start": timed(
                    lambda: session.turns.hashed(prompt, admitted.conversation.scope)
                ),
                "template process": timed(lambda: rendered(lines)),
            }
            within = {
                "of it: check the chat": timed(lambda: chat(given)),
                "of it: encode turn by turn": timed(lambda: encoder.encode(text)),
                "of it: find what is held": timed(
                    lambda: session.held(prompt, admitted.conversation.scope)
                ),
                "of it: admit": timed(lambda: session.admit(request_of(prompt))),
            }
    rows: list[tuple[object, ...]] = [("part", "least, ms", "median, ms")]
    rows += [(name, round(low, 2), round(mid, 2)) for name, (low, mid) in own.items()]
    sums = [sum(times[i] for times in own.values()) for i in range(2)]
    rows.append(("together", *(round(total, 2) for total in sums)))
    rows += [(name, round(low, 2), round(mid, 2)) for name, (low, mid) in within.items()]
    rows.append((f"prompt of {len(prompt):,} tokens, chat of {len(body):,} bytes", "", ""))
    return rows


def request_of(prompt: tuple[int, ...]) -> Request:
    """A request of these ids."""
    return Request(prompt=prompt, max_tokens=8, drafter="none")


def request_lines(
    source: str, turns: object, conversation: RecordedConversation
) -> tuple[str, bytes]:
    """What the template process reads."""
    request = {"source": source, "names": {}, "tools": conversation.tools,
               "options": {"enable_thinking": False}}  # fmt: skip
    return json.dumps(request, ensure_ascii=False), msgspec.json.encode(turns)


def rendered(lines: tuple[str, bytes]) -> bytes:
    """What the template process does with a request, here so that its time can be read."""
    request = {**json.loads(lines[0]), "messages": msgspec.json.decode(lines[1])}
    kind, text = template_worker.answer(request, template_process.LENGTH)
    assert kind == "text"
    return text


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    args = parser.parse_args(arguments)
    script.show([("turn overhead", measure(args.trace, args.tokenizer))], as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
