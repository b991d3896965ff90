"""The reference's logits: from a loaded package, or from a file that an earlier run stored.

The file is an .npz (a zip of numpy arrays, not compressed), which numpy reads, too:

    reference.json   what is stored: the package, the texts, its own answers (StoredReference)
    0.npy, 1.npy...  of each text float16 [rows, ids]: for each scored token the logits before it,
                     less their maximum, without the ids that are never chosen

half a megabyte a token at 248,077 ids. float16 adds about 1e-6 nats to a divergence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.lib import format as npy

from thor_dflash.calib.quality.quality_report import QualityPackage
from thor_dflash.calib.quality.scored_texts import PlanOutcome, ScoredText
from thor_dflash.core import strict_records
from thor_dflash.core.errors import RequestError
from thor_dflash.core.progress import Progress, Silent
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.measure import score
from thor_dflash.runtime.session import Session

HEADER = "reference.json"
ROWS = 64
"""Rows that are read of a file at a time."""
REMAKE = "store it again with `thor-dflash quality --store`"
LOGITS, TAPS = "logits", "taps"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReference:
    """What a file holds beside the logits."""

    version: int = 1
    package: QualityPackage
    tokenizer: str
    """sha256 of tokenizer.json; "" for none."""
    ids: int
    """Ids that may be chosen, columns of the logits."""
    texts: tuple[ScoredText, ...]
    outcomes: tuple[PlanOutcome, ...]


class ReferenceLogits(Protocol):
    """What a candidate is compared with."""

    @property
    def header(self) -> StoredReference:
        """Package, texts and answers."""
        ...

    def rows(self, index: int, taps: bool) -> Iterator[Mapping[str, Array]]:
        """Yield `logits` [n, ids] before every scored token of a text, some rows at a time; and
        `taps` if wanted.
        """
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose outputs `taps` holds, one after the other; none: there are none."""
        ...


def scored_rows(session: Session, text: ScoredText, taps: bool) -> Iterator[dict[str, Array]]:
    """Yield the rows of a loaded package before every scored token, a block at a time."""
    tokens, begin = text.tokens[:-1], text.begin - 1
    names = [LOGITS, TAPS] if taps else [LOGITS]
    score.shapes(session, tokens, taps)
    for block in score.blocks(session, tokens, names, Silent(), begin):
        yield {**block, LOGITS: block[LOGITS][:, : session.manifest.vocab_limit]}


class LiveReference:
    """A loaded package."""

    def __init__(self, session: Session, header: StoredReference) -> None:
        self._session = session
        self._header = header

    @property
    def header(self) -> StoredReference:
        """See ReferenceLogits."""
        return self._header

    @property
    def taps(self) -> tuple[int, ...]:
        """See ReferenceLogits."""
        drafter = self._session.manifest.drafter
        return drafter.taps if drafter else ()

    def rows(self, index: int, taps: bool) -> Iterator[Mapping[str, Array]]:
        """See ReferenceLogits."""
        return scored_rows(self._session, self._header.texts[index], taps)


class LogitsFile:
    """A file that `store` wrote."""

    def __init__(self, path: Path) -> None:
        """Raises: RequestError: it is no such file, or damaged."""
        self._path = path
        try:
            self._zip = ZipFile(path)
            with self._zip.open(HEADER) as file:
                value: object = json.load(file)
        except OSError as e:
            raise RequestError(f"{path} must be a readable file (got: {e.strerror or e})") from e
        except (BadZipFile, KeyError, ValueError, RecursionError, EOFError) as e:
            raise RequestError(f"{path} must be stored logits (got another file)") from e
        table = strict_records.as_table(value)
        if table is None:
            raise RequestError(f"{path} must be stored logits (got another file)")
        self._header = strict_records.decode(StoredReference, table, str(path), RequestError)
        self._check()

    def _check(self) -> None:
        if self._header.version != 1:
            raise RequestError(
                f"{self._path}: version must be 1 (got {self._header.version}); {REMAKE}"
            )
        members = {info.filename: info.file_size for info in self._zip.infolist()}
        for i, text in enumerate(self._header.texts):
            size = members.get(f"{i}.npy", 0)
            least = 2 * (len(text.tokens) - text.begin) * self._header.ids
            if size < least:
                raise RequestError(
                    f"{self._path}: {i}.npy must have {least} bytes (got {size}); {REMAKE}"
                )

    @property
    def header(self) -> StoredReference:
        """See ReferenceLogits."""
        return self._header

    @property
    def taps(self) -> tuple[int, ...]:
        """See ReferenceLogits."""
        return ()

    def rows(self, index: int, taps: bool) -> Iterator[Mapping[str, Array]]:
        """See ReferenceLogits.

        Raises:
            RequestError: the file is damaged.
        """
        assert not taps
        text, ids = self._header.texts[index], self._header.ids
        left, name = len(text.tokens) - text.begin, f"{self._path}: {index}.npy"
        try:
            with self._zip.open(f"{index}.npy") as file:
                npy.read_magic(file)
                shape, _, dtype = npy.read_array_header_1_0(file)
                if shape != (left, ids) or dtype != np.float16:
                    got = f"{dtype} {list(shape)}"
                    raise RequestError(
                        f"{name} must be float16 {[left, ids]} (got {got}); {REMAKE}"
                    )
                while left:
                    count = min(ROWS, left)
                    data = file.read(2 * count * ids)
                    yield {LOGITS: np.frombuffer(data, np.float16).reshape(count, ids)}
                    left -= count
                file.read(1)  # at the end the zip's checksum is compared
        except (OSError, BadZipFile, ValueError, EOFError) as e:
            raise RequestError(f"{name} must be undamaged (got: {e}); {REMAKE}") from e

    def close(self) -> None:
        """Close the file."""
        self._zip.close()


def store(file: IO[bytes], reference: ReferenceLogits, progress: Progress) -> None:
    """Write a reference to a file."""
    header = reference.header
    total = sum(len(text.tokens) - text.begin for text in header.texts)
    with (
        ZipFile(file, "w", allowZip64=True) as out,
        progress.task("storing logits", total, "tokens") as bar,
    ):
        out.writestr(HEADER, json.dumps(strict_records.encode(header)))
        for i, text in enumerate(header.texts):
            shape = (len(text.tokens) - text.begin, header.ids)
            with out.open(f"{i}.npy", "w", force_zip64=True) as member:
                head = {"descr": "<f2", "fortran_order": False, "shape": shape}
                npy.write_array_header_1_0(member, head)
                for rows in reference.rows(i, taps=False):
                    member.write(_compact(rows[LOGITS]).tobytes())
                    bar.advance(len(rows[LOGITS]))


def _compact(logits: Array) -> Array:
    """Less the maximum, as float16: near it, where the probability is, the steps are finest."""
    lowest = np.finfo(np.float16).min
    less: Array = np.maximum(logits - logits.max(1, keepdims=True), lowest)
    return less.astype("<f2")


def bytes_of(texts: tuple[ScoredText, ...], ids: int) -> int:
    """Size of a file, near enough to check the disk."""
    return sum(2 * ids * (len(text.tokens) - text.begin) for text in texts)


def same_model(header: StoredReference, session: Session, tokenizer: str) -> None:
    """Refuse to compare models of different tokens.

    Raises:
        RequestError: tokenizer or number of ids differ.
    """
    ids = session.manifest.vocab_limit
    if header.ids != ids:
        raise RequestError(f"--package must have {header.ids} ids as the reference (got {ids})")
    if header.tokenizer != tokenizer:
        raise RequestError(
            "--package must have the reference's tokenizer.json "
            f"(got {tokenizer[:12] or 'none'}, not {header.tokenizer[:12] or 'none'})"
        )
    for text in header.texts:
        if len(text.tokens) - 1 > session.model.limit:
            raise RequestError(
                f"--package must have a context for {len(text.tokens)} tokens and one block, as "
                f"{text.name} needs (got {session.model.capacity})"
            )
