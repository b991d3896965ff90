"""The command line; arguments.py lists the commands, exit_status.py what they return.

An error that the user can fix is one line on stderr; any other is a bug and shows its traceback.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from thor_dflash.cli import exit_status, option_checks, stdio
from thor_dflash.cli.parser import parse
from thor_dflash.core import extras
from thor_dflash.core.errors import ConfigError, ThorError
from thor_dflash.core.message_text import one_line
from thor_dflash.core.progress import print_line
from thor_dflash.core.shortages import check_memory, shortage

if TYPE_CHECKING:
    from thor_dflash.config.tree import Config
    from thor_dflash.core.progress import Progress


DISK_ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ESTALE)
"""Errors of a disk, which do not name the file if it was already open."""


LIGHT = (
    "plan", "status", "stats", "schema", "gateway", "keygen", "template", "completion",
)  # fmt: skip
"""Commands that do not import numpy."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run one command, return the exit status."""
    stdio.open_closed()
    stdio.escape_unencodable(sys.stdout)
    try:
        return _main(argv)
    finally:
        stdio.settle(sys.stdout)
        stdio.settle(sys.stderr)


def _main(argv: Sequence[str] | None) -> int:
    try:
        status = run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except ThorError as e:
        _print_error(str(e))
        return exit_status.of_error(e)
    except KeyboardInterrupt as e:
        _print_error(f"interrupted: {e}" if e.args else "interrupted")
        return exit_status.INTERRUPTED
    except BrokenPipeError:
        return exit_status.PIPE_CLOSED
    except Exception as e:
        if not (text := shortage(e) or _refusal(e)):
            raise
        _print_error(text)
        return exit_status.USAGE
    return status


def _refusal(error: Exception) -> str:
    """The message for what the user can fix: a path that the system refuses (too long, no
    permission), a full disk, a library that does not load. "" for a bug.
    """
    if isinstance(error, OSError) and (error.filename or error.errno in DISK_ERRORS):
        return f"{error.filename or 'every file'} must be usable (got: {error.strerror})"
    if isinstance(error, ModuleNotFoundError) and error.name in extras.ENGINE:
        return extras.missing("engine", error)
    if isinstance(error, ImportError) and not (error.name or "").startswith("thor_dflash"):
        return f"{error.name or 'every library'} must load on this machine (got: {error})"
    return ""


def _print_error(text: str) -> None:
    print_line(sys.stderr, f"thor-dflash: {one_line(text)}")


def run(argv: Sequence[str]) -> int:
    """Run one command line; return its exit status.

    Raises:
        ThorError: anything the user can fix.
    """
    args = parse(argv)
    option_checks.check_options(args)
    if args.command not in LIGHT:
        check_memory()

    # Imported here, like the imports inside the commands, so that --help is fast.
    from thor_dflash.config import tree as config
    from thor_dflash.core import progress

    settings = config.load(args.config, overrides(args))
    option_checks.check_settings(args)
    report = progress.choose(sys.stderr)
    try:
        return _run_command(args, settings, report) or 0
    finally:
        report.close()


def _run_command(args: argparse.Namespace, config: Config, progress: Progress) -> int | None:
    """Run the command; return its exit status, None for 0."""
    module = importlib.import_module(f"thor_dflash.cli.commands.{args.command.replace('-', '_')}")
    command: Callable[[argparse.Namespace, Config, Progress], int | None] = module.run
    return command(args, config, progress)


def overrides(args: argparse.Namespace) -> tuple[str, ...]:
    """Every --set, then every option that is another spelling of a key (its dest is the key).

    Raises:
        ConfigError: a key is given twice, or both as an option and with --set.
    """
    from thor_dflash.config import tree as config

    given, texts = option_checks.set_keys(args), config.texts()
    for key in given:
        if given.count(key) > 1:
            raise ConfigError(f"{key} must be given once (got --set {given.count(key)} times)")
    options: list[str] = []
    for key, value in vars(args).items():
        if "." not in key or value is None:
            continue
        if key in given:
            raise ConfigError(f"{key} must be given once (got an option and --set)")
        # Quote texts as TOML strings: a directory's name may look like a number or a list.
        literal = key in texts or isinstance(value, list)
        options.append(f"{key}={_literal(value) if literal else value}")
    return (*args.set, *options)


def _literal(value: Any) -> str:
    """A value in TOML: here the same as JSON, except that TOML requires DEL to be escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


if __name__ == "__main__":
    sys.exit(main())
