"""Packages of planner-nano, and its held-out tasks as requests. Imports nothing of the server, so
that machines without the `serve` extra can use it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from thor_dflash.builders.build import build
from thor_dflash.calib.planbench import Task, task_from_line
from thor_dflash.config.build import BuildConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.session import Request, Session

NANO = Path(__file__).parents[2] / "models" / "planner-nano"
CAPACITY = 1024


def package(out: Path, drafter: str = "drafter", **options: object) -> Path:
    """Build planner-nano's package in `out`, and return `out`. `options` go to BuildConfig."""
    settings = {"kv": "fp8", "activations": "bf16", "chunk": 64, "capacity": CAPACITY, **options}
    config = BuildConfig(**settings)  # type: ignore[arg-type]
    build(NANO / "target", NANO / drafter, out, config, Silent())
    return out


@cache
def tasks() -> tuple[Task, ...]:
    """Returns the held-out tasks, in which the families alternate."""
    lines = (NANO / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(task_from_line(line) for line in lines)


def request(s: Session, index: int, most: int = 256) -> Request:
    """Returns a held-out task as a request with thinking, for at most `most` tokens."""
    assert s.tokenizer is not None
    messages = [{"role": role, "content": content} for role, content in tasks()[index].messages]
    prompt = tuple(s.tokenizer.encode(s.tokenizer.render(messages, thinking=True)))
    return Request(prompt=prompt, max_tokens=most, stop=frozenset(s.manifest.stop_tokens))
