"""The options of the subcommands of the command line."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NoReturn

import thor_dflash
from thor_dflash.cli.arguments import COMMANDS, path
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.message_text import cut, nearest, show

MESSAGE = 300
"""Maximum characters of argparse's own messages, which repeat a value that is refused."""


class _Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError. `error` and `exit` are its documented hooks."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{cut(message, MESSAGE)} (see {self.prog} --help)")

    def unknown(self, words: Sequence[str]) -> list[str]:
        """The long options among these words that the command does not have."""
        # As to argparse, a word with a space is a text.
        long = (x for x in takewhile(lambda word: word != "--", words) if x.startswith("--"))
        known = self._option_string_actions
        return [x for x in long if " " not in x and x.partition("=")[0] not in known]

    def refuse_unknown(self, words: Sequence[str]) -> NoReturn:
        """Refuse what `parse_known_args` left over; name the option that the first of these
        resembles.
        """
        # A word after an unknown option may be its value: argparse cannot know, nor which word of
        # the line was (it takes the first that it can for an argument of the command).
        options = [word for word in words if word.startswith("-")]
        first = (options or words)[0].partition("=")[0]
        near = difflib.get_close_matches(first, self._option_string_actions, n=1)
        hint = f": did you mean {near[0]}?" if near else ""
        self.error(f"unrecognized arguments: {' '.join(options or words)}{hint}")

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse's own takes a full disk, and a pipe without a reader, for success.
        (file or sys.stderr).write(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # now, because errors at the interpreter's exit are not reported
        super().exit(status, message)


class _Once(argparse.Action):
    """Stores one value like argparse, but refuses a second one, which would silently win."""

    given: object = None

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if self.given is not None:
            raise ConfigError(
                f"{'/'.join(self.option_strings)} must be given once "
                f"(got {cut(str(self.given))} and {cut(str(values))})"
            )
        self.given = values
        vars(namespace)[self.dest] = values


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: it is invalid; the message names the --help to see.
    """
    top, commands = _parsers(argv[:1])
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        top.error(f"COMMAND must be a command (got {show(argv[0])}): {nearest(argv[0], COMMANDS)}")
    try:
        args, others = top.parse_known_args(argv)
    except ConfigError:
        # Where a required option is mistyped, argparse only says that it is missing.
        used = commands.get(argv[0], top) if argv else top
        if unknown := used.unknown(argv):
            used.refuse_unknown(unknown)
        raise
    if others:
        commands[args.command].refuse_unknown(others)
    return args


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    return _parsers(None)[0]


def _parsers(used: Sequence[str] | None) -> tuple[_Parser, Mapping[str, _Parser]]:
    """The parser and those of the commands. Only commands in `used` (None: all) get options."""
    made: dict[str, _Parser] = {}
    top = _Parser(prog="thor-dflash", description=thor_dflash.__doc__, allow_abbrev=False)
    top.add_argument(
        "--version", action="version", version=f"thor-dflash {thor_dflash.__version__}"
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add, sections, text) in COMMANDS.items():
        sub = made[name] = commands.add_parser(
            name, help=text, description=text, allow_abbrev=False
        )
        if used is not None and name not in used:
            continue
        sub.register("action", None, _Once)
        if add is not None:
            add(sub)
        reads = sections.split()
        sub.set_defaults(reads=reads, config=None, set=[])
        if reads:
            _settings(sub, name, reads)
    return top, made


def _settings(sub: _Parser, name: str, reads: Sequence[str]) -> None:
    """Add the options by which a subcommand gets its sections of the configuration."""
    sub.add_argument("-c", "--config", type=path, metavar="FILE.toml", help="configuration file")
    keys = " and ".join(f"{section}.*" for section in reads)
    sub.add_argument(
        "-s", "--set", action="append", default=[], metavar="a.b=value",
        help=f"set one key of the configuration; {name} reads {keys}; repeatable",
    )  # fmt: skip
