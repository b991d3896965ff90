"""A small model of random weights with planner-nano's tokenizer, and JSON schemas that constrain
its answers.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from support.checkpoints import GEOMETRIES, DrafterGeometry, write_drafter, write_target

from thor_dflash.builders.build import build
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.package import tokenizer_files as files
from thor_dflash.runtime.decoding.block import Policy
from thor_dflash.runtime.decoding.proposers import Proposer
from thor_dflash.runtime.grammar.compiler import Grammar
from thor_dflash.runtime.grammar.policy import Constrain, Place
from thor_dflash.runtime.session import Request, Session, open_session
from thor_dflash.runtime.text.tokenizer import Tokenizer
from thor_dflash.serving.planner.plan_schema import from_skills

TOKENIZER = Path(__file__).parents[2] / "models/planner-nano/target"
VOCAB = 1280
"""Rows of planner-nano's embedding: more than its tokenizer has ids."""
_HELD: list[TemporaryDirectory[str]] = []

PLAN = from_skills(
    {"pick": {"object": "object"}, "place": {"object": "object", "on": "place"}, "wait": {}},
    {"object": ["mug", "cup_red", "cup_blue"], "place": ["tray_a", "shelf"]},
    max_steps=3,
)
SMALL = {
    "type": "object",
    "properties": {
        "say": {"type": "string", "maxLength": 12},
        "n": {"type": "integer", "minimum": 0, "maximum": 300},
        "ok": {"enum": [True, False, None]},
    },
    "required": ["say", "n", "ok"],
    "additionalProperties": False,
}


@cache
def package(
    chunk: int = 32,
    chunks: tuple[int, ...] = (),
    template: str = "",
    seed: int = 5,
    mtp: bool = False,
) -> Path:
    """Returns a package with random weights and a tokenizer, removed when the process ends. It has
    one layer of each kind: what grammars and servers do does not depend on the number of layers.
    With `mtp` the drafter is the target's MTP layer.
    """
    held = TemporaryDirectory()
    _HELD.append(held)
    root, geometry = Path(held.name), replace(GEOMETRIES["27b"], vocab=VOCAB, layers=2, interval=2)
    geometry = replace(geometry, mtp=mtp)
    write_target(root / "target", geometry, seed)
    write_drafter(root / "drafter", geometry, DrafterGeometry(taps=(0, 1)), 4)
    for name in files.FILES:
        if (TOKENIZER / name).is_file():
            shutil.copy(TOKENIZER / name, root / "target" / name)
    if template:
        (root / "target" / files.TEMPLATE).write_text(template, encoding="utf-8")
    config = BuildConfig(chunk=chunk, chunks=chunks, capacity=768)
    drafter = "mtp" if mtp else root / "drafter"
    build(root / "target", drafter, root / "package", config, Silent())
    return root / "package"


@cache
def session() -> Session:
    """Returns a session over `package()`, the same one for every test."""
    return open_session(package(), EngineConfig(threads=1), Silent())


def text() -> Tokenizer:
    """Returns the session's tokenizer and chat template."""
    found = session().tokenizer
    assert found is not None
    return found


def asked(thinking: bool, words: str = "Pick the mug.", max_tokens: int = 300) -> Request:
    """Returns a request; the answer begins inside a `<think>` block only if `thinking`."""
    rendered = text().render([{"role": "user", "content": words}], thinking)
    stop = frozenset(session().manifest.stop_tokens)
    return Request(prompt=tuple(text().encode(rendered)), max_tokens=max_tokens, stop=stop)


def constrained(
    request: Request,
    proposer: Proposer,
    grammar: Grammar,
    *,
    thinking: bool = False,
    force: bool = True,
    policies: Sequence[Policy] = (),
) -> list[int]:
    """Answer a request under a grammar and return all tokens. `thinking`: the prompt ends inside a
    `<think>` block. `policies` come before the grammar's.
    """
    policy = Constrain(grammar, Place(thinking=thinking), force=force)
    answers = session().run(request, proposer, (*policies, policy))
    return [token for chunk in answers for token in chunk.tokens]
