"""planner-nano as packages, and its held-out tasks as requests. Asks for nothing that serves."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from thor_dflash.builders.build import build
from thor_dflash.calib.planbench import Task, task_from_line
from thor_dflash.config import BuildConfig
from thor_dflash.progress import Silent
from thor_dflash.runtime.session import Request, Session

NANO = Path(__file__).parents[1] / "models" / "planner-nano"
CAPACITY = 1024


def package(out: Path, **options: object) -> Path:
    """A package of the small planner in `out`; `options` are those of a build."""
    settings = {"kv": "fp8", "activations": "bf16", "chunk": 64, "capacity": CAPACITY, **options}
    config = BuildConfig(**settings)  # type: ignore[arg-type]
    build(NANO / "target", NANO / "drafter", out, config, Silent())
    return out


@cache
def tasks() -> tuple[Task, ...]:
    """The held-out tasks, families taking turns."""
    lines = (NANO / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(task_from_line(line) for line in lines)


def request(s: Session, index: int, most: int = 256) -> Request:
    """A held-out task, thinking, at most so many tokens."""
    assert s.text is not None
    messages = [{"role": role, "content": content} for role, content in tasks()[index].messages]
    prompt = tuple(s.text.encode(s.text.render(messages, thinking=True)))
    return Request(prompt=prompt, max_tokens=most, stop=frozenset(s.manifest.stop_tokens))
