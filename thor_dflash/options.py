"""The options of the subcommands of the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

import thor_dflash
from thor_dflash.errors import ConfigError


class _Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError. `error` and `exit` are its documented hooks."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def check(self, arguments: Sequence[str]) -> None:
        """Refuse an unknown option.

        Raises:
            ConfigError: there is one; names the nearest known one. argparse alone would first
                complain of a missing option, even if it is there but misspelt.
        """
        for argument in takewhile("--".__ne__, arguments):
            name = argument.partition("=")[0]
            # As in argparse, an argument with a space is a value and not an option.
            if not name.startswith("--") or " " in argument or name in self._option_string_actions:
                continue
            known = [option for option in self._option_string_actions if option.startswith("--")]
            near = get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            self.error(f"{name} must be an option of {self.prog.split()[-1]}{hint}")

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
                f"(got {self.given} and {values})"
            )
        self.given = values
        vars(namespace)[self.dest] = values


def _path(text: str) -> Path:
    """A path that is not empty: an empty name is the working directory to pathlib, but in a shell
    it usually comes from an unset variable.
    """
    if not text:
        raise argparse.ArgumentTypeError("must be a path (got an empty name)")
    return Path(text)


def listed(sections: Sequence[str]) -> str:
    """Configuration sections as text."""
    return ", ".join(sections) or "no section"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: it is invalid; the message names the --help to see.
    """
    top, verbs = _parsers()
    if argv and argv[0] in verbs:
        verbs[argv[0]].check(argv[1:])
    args, others = top.parse_known_args(argv)
    if others:
        verbs[args.verb].error(f"unrecognized arguments: {' '.join(others)}")
    return args


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    return _parsers()[0]


def _parsers() -> tuple[argparse.ArgumentParser, Mapping[str, _Parser]]:
    made: dict[str, _Parser] = {}
    top = _Parser(prog="thor-dflash", description=thor_dflash.__doc__, allow_abbrev=False)
    top.add_argument(
        "--version", action="version", version=f"thor-dflash {thor_dflash.__version__}"
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, add, sections, text in (
        ("build", _build, "build", "two checkpoints to a package"),
        ("generate", _generate, "engine decode", "answer one prompt"),
        ("profile", _profile, "engine decode", "where each millisecond of an answer goes"),
        ("score", _score, "engine", "teacher-forced logits of token ids"),
        ("check", _check_options, "engine", "compare engines operator by operator"),
        ("doctor", _doctor, "engine", "what this machine can run, and how to mend the rest"),
        ("demo", _demo, "build engine", "plan one task with the small model that ships here"),
        ("bench", _bench, "build engine", "what each part of a step costs on this device"),
        ("serve", _serve, "engine serve", "answer plan requests over ZeroMQ"),
        ("plan", _plan, "", "ask a server for one plan"),
        ("gateway", _gateway, "gateway", "OpenAI's HTTP in front of plan servers"),
        ("keygen", _keygen, "", "keys for an encrypted server"),
    ):
        sub = made[name] = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.register("action", None, _Once)
        add(sub)
        reads = sections.split()
        sub.set_defaults(reads=reads)
        sub.add_argument("-c", "--config", type=_path, metavar="FILE.toml", help="configuration")
        sub.add_argument(
            "-s", "--set", action="append", default=[], metavar="a.b=value",
            help=f"change one key; this verb reads {listed(reads)}",
        )  # fmt: skip
    return top, made


def _build(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--target", type=_path, required=True, metavar="DIR", help="target checkpoint")
    sub.add_argument("--drafter", type=_path, metavar="DIR", help="DFlash checkpoint, if any")
    sub.add_argument("--out", type=_path, required=True, metavar="PKG", help="package to write")
    sub.add_argument(
        "--engine", dest="build.engine", metavar="ort|cuda|tensorrt", help="engine to build for"
    )


def _generate(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--package", type=_path, required=True, metavar="PKG")
    source = sub.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="what the user says")
    source.add_argument("--messages", type=_path, metavar="FILE.json", help="a chat: role, content")
    source.add_argument("--tokens", type=_path, metavar="FILE", help="a JSON list of token ids")
    sub.add_argument("--drafter", dest="decode.drafter", metavar="dflash|none")
    sub.add_argument("--max-tokens", dest="decode.max_tokens", metavar="N")
    sub.add_argument("--thinking", dest="decode.thinking", metavar="on|off")
    sub.add_argument(
        "--ignore-eos", dest="decode.ignore_eos", action="store_const", const="true",
        help="go on past the stop tokens",
    )  # fmt: skip
    _policies(sub)
    sub.add_argument("--json", action="store_true", help="one JSON object instead of the text")


def _profile(sub: argparse.ArgumentParser) -> None:
    _generate(sub)
    sub.add_argument("--runs", type=int, metavar="N", help="that count; 15")
    sub.add_argument("--warmup", type=int, default=2, metavar="N", help="runs before these; 2")
    sub.add_argument(
        "--soak", type=int, metavar="SECONDS", help="for so long, not --runs: what heat does"
    )
    sub.add_argument(
        "--compare", type=_path, metavar="X.json", help="what --json printed for the same before"
    )
    sub.add_argument("--html", type=_path, metavar="X.html", help="draw it: one page, no network")
    sub.add_argument(
        "--trace", type=_path, metavar="X.json", help="the last answer for ui.perfetto.dev"
    )


def _policies(sub: argparse.ArgumentParser) -> None:
    for option, key, metavar, text in (
        ("--thinking-budget", "decode.budget.tokens", "N", "close thinking after N tokens"),
        ("--thinking-close", "decode.budget.close", "hard|soft", "soft: earlier where it is near"),
        ("--reasoning-effort", "decode.budget.effort", "NAME", "a budget by name: none ... max"),
        ("--accept", "decode.accept", "strict|relaxed", "relaxed takes near misses in thinking"),
        ("--gate", "decode.gate", "on|off", "leave the drafter out while it does not pay"),
        ("--block", "engine.block", "N", "rows of a block, one of the package's widths"),
    ):
        sub.add_argument(option, dest=key, metavar=metavar, help=text)


def _score(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--package", type=_path, required=True, metavar="PKG")
    sub.add_argument("--tokens", type=_path, required=True, metavar="FILE", help="JSON list of ids")
    sub.add_argument("--out", type=_path, required=True, metavar="X.npz")
    sub.add_argument("--taps", action="store_true", help="the rows the drafter reads, too")


def _check_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--package", type=_path, required=True, metavar="PKG")
    other = sub.add_mutually_exclusive_group()
    other.add_argument(
        "--reference", metavar="PKG2|ort", help="a package of another engine; ort: PKG's graphs"
    )
    other.add_argument("--golden", type=_path, metavar="X.npz", help="made by --make-golden")
    other.add_argument("--make-golden", type=_path, metavar="X.npz", help="write, compare nothing")
    sub.add_argument("--tokens", type=_path, metavar="FILE", help="JSON list of ids")
    sub.add_argument(
        "--operators", choices=("auto", "all", "none"), default="auto",
        help="hold each operator to its definition: where logits differ, always, or never",
    )  # fmt: skip
    sub.add_argument("--tolerance", type=float, metavar="X", help="of logits, share of the largest")
    sub.add_argument("--json", action="store_true", help="the report as JSON")


def _doctor(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--package", type=_path, metavar="PKG", help="which is to run here")
    sub.add_argument("--json", action="store_true", help="the report as JSON")


def _demo(sub: argparse.ArgumentParser) -> None:
    pass


def _bench(sub: argparse.ArgumentParser) -> None:
    source = sub.add_mutually_exclusive_group(required=True)
    source.add_argument("--shape", metavar="NAME", help="a model's sizes: qwen3.6-27b")
    source.add_argument("--package", type=_path, metavar="PKG", help="with --ready")
    sub.add_argument("--random-weights", action="store_true", help="made on the device, not read")
    sub.add_argument("--engine", dest="build.engine", metavar="cuda")
    sub.add_argument("--quick", action="store_true", help="without one thing left out at a time")
    sub.add_argument(
        "--ready", action="store_true",
        help="time from process start until it can answer; a shape is written to --out first",
    )  # fmt: skip
    sub.add_argument("--out", type=_path, metavar="DIR", help="a new directory for --ready")
    sub.add_argument("--json", action="store_true", help="the rows as JSON")


def _serve(sub: argparse.ArgumentParser) -> None:
    source = sub.add_mutually_exclusive_group(required=True)
    source.add_argument("--package", type=_path, metavar="PKG")
    source.add_argument("--mock", action="store_true", help="no model: always the same plan")
    sub.add_argument("--mock-cycle-ms", type=float, metavar="MS", help="time of a mock's step")
    sub.add_argument(
        "--bind", dest="serve.bind", action="append", metavar="ENDPOINT", help="tcp:// or ipc://"
    )
    for option, key, metavar, text in (
        ("--curve", "serve.curve", "DIR", "keys of keygen"),
        ("--prefix-dir", "serve.prefix_dir", "DIR", "where prefixes persist that shall"),
        ("--events", "serve.events", "FILE", "a line of JSON for each thing that happens"),
        ("--trace-slow", "serve.trace_slow_ms", "MS", "plans that take longer leave a trace"),
        ("--yield-us", "serve.yield_us", "US", "idle before each step, for others on the device"),
    ):
        sub.add_argument(option, dest=key, metavar=metavar, help=text)
    for name, text in (
        ("insecure", "let other machines connect without CURVE"),
        ("allow-admin", "answer drain and shutdown"),
        ("log-prompts", "write prompts to the log"),
    ):
        dest = f"serve.{name.replace('-', '_')}"
        sub.add_argument(f"--{name}", dest=dest, action="store_const", const="true", help=text)


def _plan(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("prompt", metavar="TEXT")
    sub.add_argument("--server", default="tcp://127.0.0.1:5571", metavar="ENDPOINT")
    sub.add_argument("--keys", type=_path, metavar="DIR", help="CURVE keys of a client")
    sub.add_argument("--token-file", type=_path, metavar="FILE", help="the server's secret")
    sub.add_argument("--schema", type=_path, metavar="FILE.json", help="what the plan must obey")
    sub.add_argument("--thinking", choices=("on", "off", "auto"))
    sub.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    sub.add_argument("--deadline-ms", type=int, metavar="MS")
    sub.add_argument("--session", metavar="NAME", help="a later plan of it replaces this one")
    sub.add_argument("--prefix-id", metavar="NAME", help="a pinned prefix to start from")
    sub.add_argument("--json", action="store_true", help="the result as one JSON object")


def _gateway(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--server", dest="gateway.servers", action="append", metavar="ENDPOINT", help="repeatable"
    )
    sub.add_argument("--listen", dest="gateway.listen", metavar="HOST:PORT")
    sub.add_argument("--keys", dest="gateway.keys", metavar="DIR", help="CURVE keys of a client")
    sub.add_argument(
        "--insecure", dest="gateway.insecure", action="store_const", const="true",
        help="let other machines connect",
    )  # fmt: skip


def _keygen(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("directory", type=_path, metavar="DIR")
