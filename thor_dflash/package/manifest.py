"""`manifest.toml`: describes the files of a package, and checks them.

Builders write a package and the runtime reads it; this file is all they share. The first line of
the manifest holds the hash of the rest, so that an edited or truncated manifest is detected.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from queue import Empty, SimpleQueue
from threading import Event
from typing import Annotated, Literal, cast

from msgspec import Meta

from thor_dflash.core import strict_records
from thor_dflash.core.bounds import Count, Positive
from thor_dflash.core.errors import PackageError
from thor_dflash.core.message_text import show
from thor_dflash.core.model_dims import DrafterDims, TargetDims, VisionDims
from thor_dflash.core.progress import Progress
from thor_dflash.core.shortages import shortage

FORMAT = 6
"""Version of the package format. A runtime reads only its own version."""
NAME = "manifest.toml"
MAGIC = "# thor-dflash package, sha256 of the lines below: "
CHUNK = 4 << 20
"""Bytes per read while hashing: large enough for the disk, small enough for a smooth bar."""
HASHERS = 8
"""Files hashed at once. Hashing releases the GIL, and one core is slower than a disk."""
WEIGHTS = "weights/"
"""Directory of the files that hold only numbers."""
NAMED = 5
"""Maximum problems named in one error message."""
UNEXPECTED = "that no build wrote"
"""How the text of anything unexpected ends."""
CHUNKED = "observe_chunk"
"""The only step whose graph does not depend on the block width."""
HIDDEN = "drafter.hidden"
"""The state of an MTP layer: the target's last prefilled row, after the final norm."""
ENCODE = "encode"
"""The step of the vision tower, with one graph per size of `image_patches`."""
CHUNK_STEPS = ("prefill", CHUNKED)
"""Steps with one graph per prefill step size."""
Size = Annotated[int, Meta(ge=0)]
"""Bytes."""
REBUILD = "build it again with `thor-dflash build --force`"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of the package."""

    sha256: str
    bytes: Size


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTotals:
    """Number and size of the tensors of one class that are stored in one precision."""

    count: Count
    bytes: Size


@dataclass(frozen=True, slots=True, kw_only=True)
class KvScales:
    """FP8 KV scales from the checkpoint; a layer without one uses 1.0."""

    layers: Count = 0
    """Attention layers with stored scales."""
    low: float = 1.0
    high: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The model card: recommended lengths, in tokens. All 0: there is none."""

    max_tokens: Count = 0
    complex: Count = 0
    """Longest answer to a hard problem; 0: unknown."""
    reply: Count = 0
    """Reserved for closing message and reply when thinking has a budget."""
    low: Count = 0
    medium: Count = 0
    high: Count = 0
    x_high: Count = 0
    max: Count = 0
    close: str = ""
    """The message that closes thinking at its budget."""
    source: str = ""
    """Where these numbers come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """A checkpoint the package was built from."""

    directory: str
    """Name of the directory, without its path."""
    config_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The description of a package."""

    format: int = FORMAT
    tool: str
    """Version of thor-dflash that built it."""
    created: str
    """UTC, ISO 8601."""
    name: str | None = None
    """What clients call the model; None: as the target's directory."""
    engine: Literal["ort", "cuda", "tensorrt"]
    block: Positive
    """Rows of the verify block."""
    chunk: Positive
    """Rows of a prefill step."""
    widths: tuple[Positive, ...] = ()
    """Narrower blocks that it also has graphs for, rows."""
    chunks: tuple[Positive, ...] = ()
    """Other sizes of a prefill step that it also has graphs for, rows."""
    capacity: Positive
    """Default context of a session, tokens."""
    kv: Literal["f32", "bf16", "fp8"]
    activations: Literal["f32", "bf16"]
    saves: Literal["records", "states"]
    vocab_limit: Positive
    """Ids from here on are padding and are never chosen."""
    stop_tokens: tuple[Count, ...]
    tokenizer: bool
    """Whether the package holds tokenizer files; without them it handles only token ids."""
    skipped: tuple[str, ...]
    """Tensors of the checkpoints that no graph uses."""
    target: TargetDims
    drafter: DrafterDims | None = None
    vision: VisionDims | None = None
    image_patches: tuple[Positive, ...] = ()
    """Sizes of the vision graph, patches, ascending."""
    card: ModelCard = field(default_factory=ModelCard)
    kv_scales: KvScales = field(default_factory=KvScales)
    quantisation: Mapping[str, Mapping[str, TensorTotals]]
    """Tensor class -> stored precision -> number and size of tensors."""
    sources: Mapping[str, CheckpointSource]
    """"target" and, if there is one, "drafter"."""
    files: Mapping[str, FileEntry]
    """Path inside the package, with `/` -> hash and size. Excludes the manifest."""

    def graph(self, step: str, block: int, chunk: int) -> str:
        """The file name, without extension, of a step's graph for blocks of `block` rows and
        prefill steps of `chunk` rows.
        """
        own_block = block == self.block or step == CHUNKED
        own_chunk = chunk == self.chunk or step not in CHUNK_STEPS
        return graph_name(step, 0 if own_block else block, 0 if own_chunk else chunk)

    @property
    def model(self) -> str:
        """What clients call the model."""
        return self.name or self.sources["target"].directory

    @property
    def own_drafter(self) -> Literal["dflash", "mtp", "none"]:
        """The kind of the package's drafter, as requests name it."""
        return "none" if self.drafter is None else self.drafter.kind or "dflash"

    @property
    def widest_chunk(self) -> int:
        """Rows of the largest prefill step; caches and rings have space for it."""
        return max((self.chunk, *self.chunks))

    def __post_init__(self) -> None:
        for name in self.files:
            path = PurePosixPath(name)
            outside = path.is_absolute() or ".." in path.parts or name == NAME
            if outside or not path.parts or "\0" in name:
                raise PackageError(f"files must be paths inside the package (got {show(name)})")


def graph_name(step: str, block: int = 0, chunk: int = 0) -> str:
    """The file name, without extension, of a step's graph; 0: the package's own block or chunk."""
    return step + (f".{block}" if block else "") + (f".chunk{chunk}" if chunk else "")


def encoder_name(patches: int) -> str:
    """The file name, without extension, of the vision graph for images of up to `patches`."""
    return f"{ENCODE}.{patches}"


def render(manifest: Manifest) -> str:
    """The text of manifest.toml."""
    import tomli_w  # here, as commands that only measure a server need no engine

    body = tomli_w.dumps(cast("dict[str, object]", strict_records.encode(manifest)))
    return f"{MAGIC}{hashlib.sha256(body.encode()).hexdigest()}\n{body}"


def sha256(manifest: Manifest) -> str:
    """Hash of manifest.toml, which holds the hashes of all other files."""
    return hashlib.sha256(render(manifest).encode()).hexdigest()


def identity(manifest: Manifest) -> str:
    """sha256 of what was built, from what: a package that was built again is the same, also by a
    version with other graphs. It is another one if weights were packed differently.
    """
    weights = {name: entry for name, entry in manifest.files.items() if name.startswith(WEIGHTS)}
    sources = {name: replace(source, directory="") for name, source in manifest.sources.items()}
    plain = replace(manifest, created="", tool="", name=None, sources=sources, files=weights)
    return sha256(plain)


def is_package(path: Path) -> bool:
    """Whether any version of thor-dflash built the directory `path`, even if it is damaged now."""
    try:
        with (path / NAME).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC.encode()
    except OSError:
        return False


def check_outside(option: str, path: Path) -> None:
    """Refuse a path inside a package: an additional file would damage the package.

    Raises:
        PackageError: `path` is in a package, after following links.
    """
    real = Path(os.path.realpath(path))  # resolve() fails on circular links
    if inside := next((p for p in real.parents if is_package(p)), None):
        raise PackageError(f"{option} must be outside any package (got {path}, in {inside})")


def read(package: Path) -> Manifest:
    """Read the manifest of a package. `checking` checks the other files.

    Raises:
        PackageError: not a package, a damaged manifest, or one of another version.
    """
    if not package.is_dir():
        got = "a file" if package.exists() else "nothing there"
        raise PackageError(f"{package} must be a package directory (got {got})")
    path, remedy = package / NAME, _remedy(package)
    try:
        text = strict_records.read_text(path)
    except OSError as e:
        raise PackageError(
            f"{package} must hold a {NAME}, as a package does (got: {e.strerror}); {remedy}"
        ) from e
    except ValueError as e:
        raise PackageError(f"{path} must be a text in UTF-8 (got: {e}); {remedy}") from e
    return _parse(path, text, remedy)


def _remedy(package: Path) -> str:
    """What to do about a damaged package. `build` replaces only what it knows for a package."""
    if not os.path.lexists(package / NAME):
        return "name one that `thor-dflash build` made"
    return REBUILD if is_package(package) else f"remove it and {REBUILD}"


def _parse(path: Path, text: str, remedy: str) -> Manifest:
    head, _, body = text.partition("\n")
    try:
        table = tomllib.loads(body)
    except (ValueError, RecursionError) as e:
        raise PackageError(f"{path} must be TOML (got: {e}); {remedy}") from e
    if not head.startswith(MAGIC):
        raise PackageError(f"{path} must begin with {MAGIC!r} (got {head[:60]!r}); {remedy}")
    if table.get("format") != FORMAT:
        raise PackageError(
            f"{path}: format must be {FORMAT} (got {table.get('format')}); the package is from "
            f"another version of thor-dflash, {REBUILD}"
        )
    if head.removeprefix(MAGIC) != hashlib.sha256(body.encode()).hexdigest():
        raise PackageError(f"{path} must be as it was built (got an edited file); {REBUILD}")
    try:
        return strict_records.decode(Manifest, table, "", PackageError)
    except PackageError as e:
        raise PackageError(f"{path}: {e}; {REBUILD}") from e


def hash_file(path: Path, advance: Callable[[int], None] = lambda n: None) -> FileEntry:
    """Hash a file of any size, CHUNK bytes at a time. `advance` gets the size of each read."""
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

    All other files have been checked when the body begins; weights are hashed while it runs, so
    that it can load them at the same time. Wrong weights do no harm before they are computed with,
    so results of the body may be used only after this context has ended.

    Raises:
        PackageError: names the files that are missing, truncated, altered or extra. Replaces an
            error of the body if weights were already found to be damaged.
    """
    # Sizes are cheap to check and hashes are not: do not hash if files are missing.
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
    """Check that the package holds the files of its manifest, of the right sizes, and no others,
    nor a directory behind a link, through which ONNX Runtime refuses to read. Does not hash them.

    Raises:
        PackageError: names the files that are missing, truncated or extra.
    """
    problems: list[str] = []
    for name, entry in manifest.files.items():
        path = package / name
        if not path.is_file():
            problems.append(f"{name} missing")
        elif (size := path.stat().st_size) != entry.bytes:
            problems.append(f"{name} of {size} bytes, not {entry.bytes}")
    folders = {str(parent) for name in manifest.files for parent in PurePosixPath(name).parents}
    for path in sorted(package.rglob("*")):
        name = path.relative_to(package).as_posix()
        expected = name in manifest.files or name == NAME
        if not expected and (name not in folders or path.is_symlink()):
            problems.append(f"{name} {UNEXPECTED}")
    _refuse(package, problems)


def _refuse(package: Path, problems: Sequence[str]) -> None:
    if problems:
        raise _refusal(package, problems)


def _refusal(package: Path, problems: Sequence[str]) -> PackageError:
    strange = all(text.endswith(UNEXPECTED) for text in problems)
    remedy = "remove it" if strange else REBUILD
    return PackageError(f"{package} must hold what was built (got {_named(problems)}); {remedy}")


def _named(problems: Sequence[str]) -> str:
    more = len(problems) - NAMED
    return ", ".join(problems[:NAMED]) + (f", and {more} more" if more > 0 else "")


class _Ended(Exception):
    """Ends a hash that is no longer needed."""


class _Hashing:
    """Hashes files on its own threads until the context is left."""

    def __init__(self, package: Path, files: Mapping[str, FileEntry]) -> None:
        self._files = files
        # Only the waiting thread reports progress, so the others queue the bytes they have read.
        self._read: SimpleQueue[int] = SimpleQueue()
        self._stop = Event()
        self._pool = ThreadPoolExecutor(HASHERS)
        try:
            self._jobs = {
                name: self._pool.submit(hash_file, package / name, self._count) for name in files
            }
        except BaseException:  # no more threads: those that began would go on to the end of a file
            self._halt()
            raise

    def __enter__(self) -> _Hashing:
        return self

    def __exit__(self, *error: object) -> None:
        self._halt()

    def _count(self, count: int) -> None:
        self._read.put(count)
        if self._stop.is_set():
            raise _Ended

    def wait(self, progress: Progress, label: str) -> list[str]:
        """Report progress until all files are hashed; return the problems."""
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
        """Stop hashing; return the problems found so far."""
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
        if shortage(e):
            raise  # it says nothing about the file
        return f"{name} unreadable: {e.strerror}"
