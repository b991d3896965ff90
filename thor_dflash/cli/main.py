"""thor-dflash build | generate | profile | score | check | doctor | demo | bench | serve | plan |
gateway | keygen.

Exit status: 0; 1 if doctor or check found something wrong; 2, with one line on stderr, for anything
the user can fix; 130 on Ctrl-C; 141 if the reader of stdout has gone. Anything else is a bug and
shows its traceback. A closed or full stderr does not change the status.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from thor_dflash.cli import stdio
from thor_dflash.cli.parser import listed, parse
from thor_dflash.core.errors import ConfigError, ThorError
from thor_dflash.core.message_text import cut, one_line
from thor_dflash.core.progress import print_line

if TYPE_CHECKING:
    from thor_dflash.config.tree import Config
    from thor_dflash.core.progress import Progress


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run one subcommand, return the exit status."""
    try:
        return _main(argv)
    finally:
        stdio.settle(sys.stderr)


def _main(argv: Sequence[str] | None) -> int:
    try:
        stdio.prepare()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
        status = run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except ThorError as e:
        _complain(str(e))
        return 2
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except BrokenPipeError:
        stdio.leave(sys.stdout)
        return 141
    except OSError as e:
        # The user can fix a path that the system refuses (too long, no permission) and a stdout
        # that cannot be written.
        what = _at_fault(e)
        if not what:
            raise
        _complain(f"{what} (got: {e.strerror})")
        return 2
    return status


def _at_fault(e: OSError) -> str:
    """The requirement that the machine violates; empty if the error is not the machine's."""
    if e.filename is not None:
        return f"{e.filename} must be usable"
    if e.errno == errno.ENOENT and str(e.strerror).startswith("No usable temporary directory"):
        return "a temporary directory must be writable and have room"
    if e.errno == errno.ENOENT and _is_nowhere():
        return "the working directory must be there"
    if stdio.refuses(sys.stdout):
        return "stdout must be writable"
    # An error on a file that was already open does not carry its name.
    return "every file must be readable and writable" if e.errno in _DISK else ""


def _is_nowhere() -> bool:
    """Whether the working directory was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


_DISK = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ESTALE)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C, but later while a module is being imported: an interrupt then can turn into an
    ImportError, or crash the process in the middle of loading a library.
    """
    while frame is not None and frame.f_code is not _main.__code__:
        if frame.f_code.co_filename == _IMPORT:
            again = threading.Timer(_PUT_OFF, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


_IMPORT = "<frozen importlib._bootstrap>"
_PUT_OFF = 0.02
"""Delay of a Ctrl-C during an import, seconds."""


def _complain(text: str) -> None:
    print_line(sys.stderr, f"thor-dflash: {one_line(text)}")


def run(argv: Sequence[str]) -> int:
    """Run one command line; return its exit status.

    Raises:
        ThorError: anything the user can fix.
    """
    args = parse(argv)
    _check(args)

    # Imported here, like the imports inside the subcommands, so that --help is fast.
    from thor_dflash.config import tree as config
    from thor_dflash.core import progress

    settings = config.load(args.config, overrides(args))
    _belongs(args)
    _suits(args)
    report = progress.choose(sys.stderr, quiet="json" in args and args.json)
    try:
        return _verb(args, settings, report) or 0
    finally:
        report.close()


def _verb(args: argparse.Namespace, config: Config, progress: Progress) -> int | None:
    """Run the subcommand; return its exit status, None for 0."""
    module = importlib.import_module(f"thor_dflash.cli.commands.{args.verb}")
    verb: Callable[[argparse.Namespace, Config, Progress], int | None] = module.run
    return verb(args, config, progress)


def _check(args: argparse.Namespace) -> None:
    thinking = vars(args).get("decode.thinking") or "decode.thinking" in _set(args)
    if args.verb in ("generate", "profile") and args.tokens and thinking:
        raise ConfigError("--thinking must go with --prompt or --messages (got --tokens)")
    for one, *others in _APART.get(args.verb, ()):
        for other in others:
            if _given(args, one) and _given(args, other):
                raise ConfigError(f"{other} must go without {one} (got both)")
    _check_numbers(args)


def _check_numbers(args: argparse.Namespace) -> None:
    given = vars(args)
    tolerance, cycle_ms = given.get("tolerance"), given.get("mock_cycle_ms")
    deadline_ms = given.get("deadline_ms")
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise ConfigError(f"--tolerance must be a finite number of at least 0 (got {tolerance})")
    if cycle_ms is not None and not 0 <= cycle_ms <= _DAY_MS:
        raise ConfigError(f"--mock-cycle-ms must be 0 to {_DAY_MS} (got {cycle_ms})")
    if deadline_ms is not None and deadline_ms < 1:
        raise ConfigError(f"--deadline-ms must be an integer >= 1 (got {deadline_ms})")


_DAY_MS = 86_400_000
"""Longest time that may be given, the same as in the configuration."""
_APART: Mapping[str, Sequence[Sequence[str]]] = {
    "check": (
        ("--golden", "--tokens"),  # a golden file holds its own tokens
        ("--make-golden", "--tolerance", "--operators", "--json"),
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
}
"""Subcommand -> groups of an option and the options that have no meaning with it."""
_SAYS_NOTHING: Mapping[str, object] = {"--operators": "auto"}
"""Options with a default -> that default, which counts as not given."""


def _given(args: argparse.Namespace, option: str) -> bool:
    name = "build.engine" if option == "--engine" else option[2:].replace("-", "_")
    value = vars(args)[name]
    return value is not None and value is not False and value != _SAYS_NOTHING.get(option)


def overrides(args: argparse.Namespace) -> tuple[str, ...]:
    """Every --set, then every option that is another spelling of a key (its dest is the key).

    Raises:
        ConfigError: a key is given twice, or both as an option and with --set.
    """
    from thor_dflash.config import tree as config

    given, texts = _set(args), config.texts()
    for key in given:
        if given.count(key) > 1:
            raise ConfigError(f"{key} must be given once (got --set {given.count(key)} times)")
    items: list[str] = []
    for key, value in vars(args).items():
        if "." not in key or value is None:
            continue
        if key in given:
            raise ConfigError(f"{key} must be given once (got an option and --set)")
        # Quote texts as TOML strings: a directory's name may look like a number or a list.
        literal = key in texts or isinstance(value, list)
        items.append(f"{key}={_literal(value) if literal else value}")
    return (*args.set, *items)


def _literal(value: Any) -> str:
    """A value in TOML: here the same as JSON, except that TOML requires DEL to be escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _set(args: argparse.Namespace) -> list[str]:
    """The key of every --set."""
    return [item.partition("=")[0].strip() for item in args.set]


def _belongs(args: argparse.Namespace) -> None:
    """Refuse a --set or option that the subcommand does not read. A configuration file may hold
    sections of other subcommands.
    """
    reads, verb = list(args.reads), args.verb
    for verb_, option, section in _UNREAD:
        if verb == verb_ and _given(args, option):
            reads.remove(section)
            verb = f"{verb_} {option}"
    for key, item in zip(_set(args), args.set, strict=True):
        if key.partition(".")[0] not in reads:
            raise ConfigError(
                f"{key} must be a setting of {verb} "
                f"(got --set {cut(item)}; {verb} reads {listed(reads)})"
            )
    for verb_, option, key in _IDLE:
        said = key in _set(args) or vars(args).get(key) is not None
        if said and args.verb == verb_ and _given(args, option):
            raise ConfigError(f"{key} must go without {option} (got both)")


def _suits(args: argparse.Namespace) -> None:
    """Refuse a --set that no engine reads which the command is about to open."""
    from thor_dflash.cli import unused_settings

    # Otherwise nothing is read here. The doctor examines the machine for any engine.
    some = unused_settings.READERS.keys() & set(_set(args)) and args.verb != "doctor"
    if some and (found := _engines(args)):
        unused_settings.refuse_engine(args.set, found)


def _engines(args: argparse.Namespace) -> list[str]:
    """The engines of the packages on the command line.

    Raises:
        PackageError: one is no package.
    """
    from thor_dflash.package import manifest

    package, other = (vars(args).get(name) for name in ("package", "reference"))
    found: list[str] = [manifest.read(package).engine] if package else []
    if other:
        found.append(other if other == "ort" else manifest.read(Path(other)).engine)
    return found


_UNREAD = (("bench", "--package", "build"), ("serve", "--mock", "engine"))
"""Subcommand, an option, and the section that it does not read with that option."""
_IDLE = tuple(("serve", "--mock", f"serve.{key}") for key in ("yield_us", "cancel_ms", "prefix_mb"))
"""The same for single keys: a mock has no steps on a device and no memory for prefixes."""

if __name__ == "__main__":
    sys.exit(main())
