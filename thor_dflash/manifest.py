"""`manifest.toml`: what a package on disk holds, and whether it still does.

Builders write a package, the runtime reads it; this file is all they share. The first line of the
manifest carries the hash of the rest, so an edited or truncated manifest is noticed like any file.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from queue import Empty, SimpleQueue
from threading import Event
from typing import Literal, cast

import tomli_w

from thor_dflash import contents, records
from thor_dflash.dims import DrafterDims, TargetDims
from thor_dflash.errors import PackageError
from thor_dflash.progress import Progress

FORMAT = 3
"""Version of the package format. A runtime reads its own and no other."""
NAME = "manifest.toml"
MAGIC = "# thor-dflash package, sha256 of the lines below: "
CHUNK = 4 << 20
"""Read at a time while hashing, bytes: large enough for the disk, small enough for a smooth bar."""
HASHERS = 8
"""Files hashed at once; hashing lets go of the interpreter, and one core is slower than a disk."""
WEIGHTS = "weights/"
"""Where files lie that hold numbers and nothing else."""
NAMED = 5
"""Most problems one error message names."""
CHUNKED = "observe_chunk"
"""The one step whose graph does not know the block."""
CHUNK_STEPS = ("prefill", CHUNKED)
"""Steps that have a graph for each size of a prefill step."""
REBUILD = "build it again with `thor-dflash build`"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of the package."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Tensors of one class stored in one precision."""

    count: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvScales:
    """FP8 KV scales the checkpoint brought; a layer without one uses 1.0."""

    layers: int = 0
    """Attention layers with stored scales."""
    low: float = 1.0
    high: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The model card: what its makers say about lengths, tokens. All 0: there is none."""

    max_tokens: int = 0
    complex: int = 0
    """Longest answer to a hard problem; 0: nobody says."""
    reply: int = 0
    """Kept for the answer when thinking has a budget."""
    low: int = 0
    medium: int = 0
    high: int = 0
    x_high: int = 0
    max: int = 0
    close: str = ""
    """What closes thinking at its budget."""
    source: str = ""
    """Where these numbers are from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint the package was built from."""

    directory: str
    """Name of the directory, without its path."""
    config_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A package, described."""

    format: int = FORMAT
    tool: str
    """Version of thor-dflash that built it."""
    created: str
    """UTC, ISO 8601."""
    engine: Literal["ort", "cuda", "tensorrt"]
    block: int
    """Rows of the verify block."""
    chunk: int
    """Rows of a prefill step."""
    widths: tuple[int, ...] = ()
    """Narrower blocks it also has graphs for."""
    chunks: tuple[int, ...] = ()
    """Other sizes of a prefill step it also has graphs for, rows."""
    capacity: int
    """Context a session gets when it asks for none, tokens."""
    kv: Literal["f32", "bf16", "fp8"]
    activations: Literal["f32", "bf16"]
    saves: Literal["records", "states"]
    vocab_limit: int
    """Ids from here on are padding and are never chosen."""
    stop_tokens: tuple[int, ...]
    tokenizer: bool
    """The package holds tokenizer files; without them it serves token ids alone."""
    skipped: tuple[str, ...]
    """Tensors of the checkpoints that no graph uses."""
    target: TargetDims
    drafter: DrafterDims | None = None
    card: Card = field(default_factory=Card)
    kv_scales: KvScales = field(default_factory=KvScales)
    quantisation: Mapping[str, Mapping[str, Share]]
    """Tensor class -> stored precision -> how much."""
    sources: Mapping[str, Source]
    """"target" and, where there is one, "drafter"."""
    files: Mapping[str, FileEntry]
    """Path inside the package, with `/` -> what it must be. The manifest is not among them."""

    def graph(self, step: str, block: int, chunk: int) -> str:
        """The file, without its ending, of a step's graph for blocks of `block` rows and prefill
        steps of `chunk`.
        """
        own_block = block == self.block or step == CHUNKED
        own_chunk = chunk == self.chunk or step not in CHUNK_STEPS
        return graph_name(step, 0 if own_block else block, 0 if own_chunk else chunk)

    @property
    def widest_chunk(self) -> int:
        """Most rows of a prefill step; caches and rings have room for them."""
        return max((self.chunk, *self.chunks))

    def __post_init__(self) -> None:
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or name == NAME:
                raise PackageError(f'files must be paths inside the package (got "{name}")')


def graph_name(step: str, block: int = 0, chunk: int = 0) -> str:
    """The file, without its ending, of a step's graph; 0 is the package's own block or chunk."""
    return step + (f".{block}" if block else "") + (f".chunk{chunk}" if chunk else "")


def render(manifest: Manifest) -> str:
    """The text of manifest.toml."""
    body = tomli_w.dumps(cast("dict[str, object]", records.encode(manifest)))
    return f"{MAGIC}{hashlib.sha256(body.encode()).hexdigest()}\n{body}"


def is_package(path: Path) -> bool:
    """Whether `path` is a directory that some version of thor-dflash built, damaged or not."""
    try:
        if (path / NAME).is_fifo():  # as in `read`
            return False
        with (path / NAME).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC.encode()
    except OSError:
        return False


def check_outside(option: str, path: Path) -> None:
    """Refuse a path in a package, which would no longer hold what was built.

    Raises:
        PackageError: `path` lies in one, links followed.
    """
    real = Path(os.path.realpath(path))  # resolve() fails where links go round
    if inside := next((p for p in real.parents if is_package(p)), None):
        raise PackageError(f"{option} must be outside any package (got {path}, in {inside})")


def read(package: Path) -> Manifest:
    """The manifest of a package. The other files are left to `verify`.

    Raises:
        PackageError: no package, a damaged one, or one of another version.
    """
    if not package.is_dir():
        raise PackageError(f"{package} must be a package directory (got {_what(package)})")
    path = package / NAME
    try:
        if path.is_fifo():  # to read it is to wait for who writes it
            raise PackageError(f"{path} must be a file (got a pipe); {REBUILD}")
        text = path.read_text(encoding="utf-8")
    except PermissionError as e:
        raise PackageError(f"{path} must be readable (got: {e.strerror})") from e
    except OSError as e:
        raise PackageError(f"{package} must hold a {NAME} (got: {e.strerror}); {REBUILD}") from e
    except UnicodeDecodeError as e:
        raise PackageError(f"{path} must be UTF-8 (got: {e}); {REBUILD}") from e
    return _parse(path, text)


def _parse(path: Path, text: str) -> Manifest:
    head, _, body = text.partition("\n")
    try:
        table = tomllib.loads(body)
    except RecursionError as e:
        raise PackageError(f"{path} must be TOML (got lists nested too deep); {REBUILD}") from e
    except ValueError as e:
        raise PackageError(f"{path} must be TOML (got: {e}); {REBUILD}") from e
    if not head.startswith(MAGIC):
        raise PackageError(f"{path} must begin with {MAGIC!r} (got {head[:60]!r}); {REBUILD}")
    if table.get("format") != FORMAT:
        raise PackageError(
            f"{path}: format must be {FORMAT} (got {table.get('format')}); the package is from "
            f"another version of thor-dflash, {REBUILD}"
        )
    if head.removeprefix(MAGIC) != hashlib.sha256(body.encode()).hexdigest():
        raise PackageError(f"{path} must be as it was built (got an edited file); {REBUILD}")
    try:
        return records.decode(Manifest, table, "", PackageError)
    except PackageError as e:
        raise PackageError(f"{path}: {e}; {REBUILD}") from e


def _what(path: Path) -> str:
    return "a file" if path.exists() else "nothing there"


def hash_file(path: Path, advance: Callable[[int], None] = lambda n: None) -> FileEntry:
    """Hash a file of any size, CHUNK bytes at a time. Calls `advance` with the bytes read."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
            size += len(piece)
            advance(len(piece))
    return FileEntry(sha256=digest.hexdigest(), bytes=size)


@contextmanager
def checking(package: Path, manifest: Manifest, progress: Progress) -> Generator[None]:
    """Check that the package holds the files of its manifest and nothing else.

    Weights are hashed while the body runs, so that it may load them meanwhile. No number in them
    can do harm before it is computed with: what the body makes counts once this has ended. All
    other files are what they must be when it begins.

    Raises:
        PackageError: names the files that are missing, truncated, altered or extra; also in place
            of the body's error, where weights were found to be damaged before it.
    """
    # Sizes are free and hashes are not: with files missing there is no point in reading the rest.
    check_files(package, manifest)
    weights = {name: e for name, e in manifest.files.items() if name.startswith(WEIGHTS)}
    others = {name: e for name, e in manifest.files.items() if name not in weights}
    with _Hashing(package, others) as hashing:
        _refuse(package, hashing.wait(progress, "checking package"))
    with _Hashing(package, weights) as hashing:
        try:
            yield
        except Exception as e:
            if problems := hashing.end():
                raise _refusal(package, problems) from e
            raise
        _refuse(package, hashing.wait(progress, "checking weights"))


def check_files(package: Path, manifest: Manifest) -> None:
    """Check that the package holds the files of its manifest, of their sizes and readable, and
    nothing else. Nothing is hashed.

    Raises:
        PackageError: names the files that are missing, truncated, unreadable or extra.
    """
    sizes = {name: entry.bytes for name, entry in manifest.files.items()}
    found = contents.look(package, sizes, NAME)
    # Whatever is wrong beside it: what is closed may be whole, and no build opens it.
    if found.closed:
        raise PackageError(
            f"{package} must be readable, and its directories no links (got {_named(found.closed)})"
        )
    _refuse(package, found.wrong)


def _refuse(package: Path, problems: Sequence[str]) -> None:
    if problems:
        raise _refusal(package, problems)


def _refusal(package: Path, problems: Sequence[str]) -> PackageError:
    return PackageError(f"{package} must hold what was built (got {_named(problems)}); {REBUILD}")


def _named(problems: Sequence[str]) -> str:
    more = len(problems) - NAMED
    return ", ".join(problems[:NAMED]) + (f", and {more} more" if more > 0 else "")


class _Ended(Exception):
    """Nobody waits for the hash."""


class _Hashing:
    """Hashes files on threads of its own, until it is left."""

    def __init__(self, package: Path, files: Mapping[str, FileEntry]) -> None:
        self._files = files
        # Progress is told from one thread alone, so the others hand over what they have read.
        self._read: SimpleQueue[int] = SimpleQueue()
        self._stop = Event()
        self._pool = ThreadPoolExecutor(HASHERS)
        self._jobs = {
            name: self._pool.submit(hash_file, package / name, self._told) for name in files
        }

    def __enter__(self) -> _Hashing:
        return self

    def __exit__(self, *error: object) -> None:
        self._halt()

    def _told(self, count: int) -> None:
        self._read.put(count)
        if self._stop.is_set():
            raise _Ended

    def wait(self, progress: Progress, label: str) -> list[str]:
        """Show how far it is until all is hashed; the files that are not what they must be."""
        if not self._jobs:
            return []
        total = sum(entry.bytes for entry in self._files.values())
        with progress.task(label, total, "bytes") as task:
            while not all(job.done() for job in self._jobs.values()):
                with suppress(Empty):
                    task.advance(self._read.get(timeout=0.02))
            while not self._read.empty():
                task.advance(self._read.get())
        return self._problems()

    def end(self) -> list[str]:
        """Hash no further; what is known to be wrong."""
        self._halt()
        return self._problems()

    def _halt(self) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def _problems(self) -> list[str]:
        return [p for name, job in self._jobs.items() if (p := _problem(name, job, self._files))]


def _problem(name: str, job: Future[FileEntry], files: Mapping[str, FileEntry]) -> str:
    if job.cancelled() or isinstance(job.exception(), _Ended):
        return ""
    try:
        return "" if job.result() == files[name] else f"{name} altered"
    except OSError as e:
        return f"{name} unreadable: {e.strerror}"
