"""Refuses options that exclude each other, and settings of the command line without effect. A
configuration file may hold settings for other commands.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from thor_dflash.core.errors import ConfigError
from thor_dflash.core.message_text import cut

DAY_MS = 86_400_000
"""Longest time that may be given, the same as in the configuration."""
HTTP = ("--model", "--key-file", "--plain", "--body")
"""Options of requests over HTTP."""
EXCLUSIVE: Mapping[str, Sequence[Sequence[str]]] = {
    "check": (
        ("--golden", "--tokens"),  # a golden file holds its own tokens
        ("--make-golden", "--tolerance", "--operators", "--json"),
    ),
    "quality": (
        ("--stored", "--store", "--data", "--tasks"),  # the file has texts and tasks
        ("--store", "--reference-target", "--target", "--html", "--json"),
    ),
    "profile": (
        ("--json", "--compare"),  # --json prints one profile only
        ("--soak", "--runs"),
    ),
    "bench": (
        ("--package", "--random-weights", "--engine", "--quick", "--out"),
        ("--ready", "--quick"),
    ),
    "serve": (("--package", "--mock-cycle-ms"),),
    "replay": (
        ("--json", "--compare"),
        ("--url", "--random-weights", "--tokenizer", "--reuse-mb"),
        ("--package", "--random-weights", "--tokenizer", *HTTP),
        ("--shape", *HTTP),
        ("--plain", "--forced-accept"),
    ),
}
"""Command -> groups of an option and those that have no meaning with it."""
KEYS = {"--engine": "build.engine", "--tasks": "quality.tasks"}
"""Options of these checks that set a key."""
UNREAD_SECTIONS = {
    ("bench", "--package"): "build",
    ("serve", "--mock"): "engine",
    ("calibrate", "--target"): "engine",
}
"""Command and option -> the section that it does not read with that option."""
UNREAD_BY_MOCK = (
    "serve.yield_us", "serve.cancel_ms", "serve.prefix_mb", "serve.allow_forced",
    "serve.reuse_idle_s", "serve.idle_prefill",
)  # fmt: skip
"""A mock has no steps on a device, no memory for prefixes and no template that writes answers."""
ON_GPU = ("cuda", "tensorrt")
ENGINES: Mapping[str, tuple[str, ...]] = {
    "engine.threads": ("ort",),
    "engine.device": ON_GPU,
    "engine.graphs": ON_GPU,
    "engine.overlap": ON_GPU,
    "engine.cubins": ON_GPU,
    "engine.tune": ("cuda",),
    "engine.tunings": ("cuda",),
}
"""Keys that only some engines read -> these engines."""


def items(given: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Key and value of every `--set key=value`."""
    for item in given:
        key, _, value = item.partition("=")
        yield key.strip(), value.strip()


def set_keys(args: Namespace) -> list[str]:
    """The key of every --set."""
    return [key for key, _ in items(args.set)]


def given_keys(args: Namespace) -> set[str]:
    """The keys that the command line sets, by --set or by their own option."""
    options = {key for key, value in vars(args).items() if "." in key and value is not None}
    return options | set(set_keys(args))


def check_options(args: Namespace) -> None:
    """Refuse options that exclude each other, and numbers outside their range.

    Raises:
        ConfigError: there is one.
    """
    given = vars(args)
    for name in ("thinking", "preserve_thinking"):
        if given.get("tokens") and args.command != "score" and f"decode.{name}" in given_keys(args):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} must go with --prompt or --messages (got --tokens)")
    for one, *others in EXCLUSIVE.get(args.command, ()):
        for other in others:
            if _given(args, one) and _given(args, other):
                raise ConfigError(f"{other} must go without {one} (got both)")
    for name, low, high in (
        ("tolerance", 0, 1e300), ("mock_cycle_ms", 0, DAY_MS), ("deadline_ms", 1, DAY_MS),
        ("watch", 0.1, DAY_MS // 1000),
    ):  # fmt: skip
        value = given.get(name)
        if value is not None and not low <= value <= high:  # true for NaN as well
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} must be {low} to {high} (got {value})")


def _given(args: Namespace, option: str) -> bool:
    name = KEYS.get(option) or option[2:].replace("-", "_")
    value = vars(args)[name]
    return value is not None and value is not False and (option, value) != ("--operators", "auto")


def check_settings(args: Namespace) -> None:
    """Refuse a --set or option that the command, or the engine of its package, does not read.

    Raises:
        ConfigError: there is one.
        PackageError: what is given as a package is none.
    """
    reads, where = list(args.reads), args.command
    for (command, option), section in UNREAD_SECTIONS.items():
        if args.command == command and _given(args, option):
            reads.remove(section)
            where = f"{command} {option}"
    for key, item in zip(set_keys(args), args.set, strict=True):
        if key.partition(".")[0] not in reads:
            raise ConfigError(
                f"{key} must be a setting of {where} "
                f"(got --set {cut(item)}; {where} reads {', '.join(reads)})"
            )
    if args.command == "serve" and args.mock:
        for key in given_keys(args) & {*UNREAD_BY_MOCK}:
            raise ConfigError(f"{key} must go without --mock (got both)")
    # Packages are read only if needed. The doctor examines the machine for any engine.
    if ENGINES.keys() & set(set_keys(args)) and args.command != "doctor":
        refuse_engine(args.set, _engines(args))


def _engines(args: Namespace) -> list[str]:
    """The engines of the packages on the command line."""
    from thor_dflash.package import manifest

    package, other = (vars(args).get(name) for name in ("package", "reference"))
    found: list[str] = [manifest.read(package).engine] if package else []
    if other:
        found.append(other if other == "ort" else manifest.read(Path(other)).engine)
    return found


def refuse_tensorrt(given: Iterable[str], engine: str) -> None:
    """Refuse keys of the TensorRT builder for a package of another engine.

    Raises:
        ConfigError: there is one.
    """
    for key, _ in items(given):
        if key.startswith("build.tensorrt.") and engine != "tensorrt":
            raise ConfigError(f"{key} must go with --engine tensorrt (got {engine})")


def refuse_engine(given: Iterable[str], engines: Collection[str]) -> None:
    """Refuse keys that none of these engines reads; no engines: any may be used.

    Raises:
        ConfigError: there is one.
    """
    for key, _ in items(given):
        readers = ENGINES.get(key, ())
        if readers and engines and not set(readers) & set(engines):
            got = " and ".join(sorted(set(engines)))
            raise ConfigError(f"{key} must go with engine {' or '.join(readers)} (got {got})")
