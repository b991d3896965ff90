"""Golden files: outputs of a package on one machine, to compare other engines with elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thor_dflash.calib.check.trace_record import Outputs
from thor_dflash.core.errors import RequestError
from thor_dflash.core.message_text import visible
from thor_dflash.core.tensors import Array, DType
from thor_dflash.package.manifest import Manifest
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.session import Session

VALUE = "value."
PARTS = {"block": 0, "rounds": 0, "tokens": 1, "logits": 2}
"""Arrays that every golden file holds, and their numbers of dimensions."""
KINDS = ("a number", "a list of numbers", "a table of numbers")
NUMBERS = "biuf"
"""Kinds of numpy element types that are numbers."""
REMAKE = "make it again with `thor-dflash check --make-golden`"


@dataclass(frozen=True, slots=True)
class Golden:
    """Logits of some tokens, and the values inside the step of their first block."""

    sources: dict[str, str]
    """"target", "drafter" -> SHA-256 of the checkpoint's config.json."""
    device: str
    """Engine and device that made it, with the hash of its tuned launches; "" if not noted."""
    block: int
    rounds: bool
    """Whether the engine that made it rounds activations or caches to fewer bits than float32."""
    tokens: tuple[int, ...]
    logits: Array
    """float32 [T, V]."""
    taps: Array | None
    """float32 [T, taps * H]; None for a package without a drafter."""
    values: Outputs
    """Name of a value in the verify graph -> the value, bf16 and FP8 as float32."""


def sources(manifest: Manifest) -> dict[str, str]:
    """Return a package's Golden.sources."""
    return {name: source.config_sha256 for name, source in manifest.sources.items()}


def device(session: Session) -> str:
    """Return a package's Golden.device."""
    return f"{session.manifest.engine} on {session.model.engine.device}"


def rounds(manifest: Manifest) -> bool:
    """Return a package's Golden.rounds."""
    return (manifest.activations, manifest.kv) != ("f32", "f32")


def arrays(golden: Golden) -> dict[str, Array]:
    """Return the arrays to store in a file."""
    out = {f"{VALUE}{name}": _plain(x) for name, x in golden.values.items()}
    out |= {f"source.{name}": np.array(sha) for name, sha in golden.sources.items()}
    out["device"] = np.array(golden.device)
    out["block"] = np.array(golden.block)
    out["rounds"] = np.array(golden.rounds)
    out["tokens"] = np.array(golden.tokens, np.int32)
    out["logits"] = golden.logits
    if golden.taps is not None:
        out["taps"] = golden.taps
    return out


def _plain(x: Array) -> Array:
    """Convert types that numpy files do not support to float32."""
    return x.astype(np.float32) if DType.of(x) in (DType.BF16, DType.F16, DType.FP8) else x


def read(path: Path) -> Golden:
    """Read a golden file.

    Raises:
        RequestError: it cannot be read, is no golden file, or is damaged.
    """
    held = _held(path)
    for name, ndim in PARTS.items():
        x = held.get(name)
        if x is None or x.ndim != ndim or x.dtype.kind not in NUMBERS:
            got = "nothing" if x is None else f"{x.dtype} {list(x.shape)}"
            raise RequestError(f"{path}: {name} must be {KINDS[ndim]} (got {got}); {REMAKE}")
    return Golden(
        {n.removeprefix("source."): str(x) for n, x in held.items() if n.startswith("source.")},
        visible(str(held.get("device", ""))),
        int(held["block"]),
        bool(held["rounds"]),
        tuple(int(t) for t in held["tokens"]),
        held["logits"],
        held.get("taps"),
        {n.removeprefix(VALUE): x for n, x in held.items() if n.startswith(VALUE)},
    )


def _held(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as file:
            held = {name: file[name] for name in file.files}
        if not all(isinstance(x, np.ndarray) for x in held.values()):  # numpy gives bytes
            raise ValueError("a member is no array")
        return held
    except OSError as e:
        raise RequestError(f"{path} must be a readable file (got: {e.strerror or e})") from e
    except Exception as e:
        # Of zipfile, zlib, tokenize, ...: a damaged file has many faults. They are not quoted: for
        # a file of another format numpy's message advises to load it unsafely.
        raise RequestError(
            f"{path} must be a golden file (got: a file that numpy cannot read); {REMAKE}"
        ) from e


def fits(golden: Golden, model: ModelRunner, where: str) -> None:
    """Refuse a golden of another model, or one with arrays of the wrong shape or type.

    Raises:
        RequestError: it was made from another checkpoint, or is not as `arrays` wrote it.
    """
    same(golden.sources, model.manifest, where)
    for name, rows in (("logits", golden.logits), ("taps", golden.taps)):
        port = model.graphs["verify"].outputs.get(name)
        if rows is None or port is None:
            continue
        if rows.shape != (want := (len(golden.tokens), port.at({})[1])) or rows.dtype != np.float32:
            raise RequestError(
                f"{where}: {name} must be float32 {list(want)}, of every token a row "
                f"(got {rows.dtype} {list(rows.shape)}); {REMAKE}"
            )


def same(made: Mapping[str, str], manifest: Manifest, where: str) -> None:
    """Refuse data made from other checkpoints; `made` as Golden.sources.

    Raises:
        RequestError: naming the checkpoint that differs.
    """
    have = sources(manifest)
    for name, sha in made.items():
        if have.get(name, sha) != sha:
            raise RequestError(
                f"{where} must be made of the {name} of the package "
                f"(got another config.json: {sha[:12]}, not {have[name][:12]})"
            )
