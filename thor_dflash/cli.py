"""thor-dflash build | generate | score | check | doctor | demo | bench | serve | plan | gateway |
keygen.

Exit status: 0; 1 where doctor or check found something wrong; 2 with one line on stderr for
anything the user can put right; 130 on Ctrl-C; 141 when the reader of stdout has gone. Anything
else is a bug and shows its traceback. Whether anybody reads stderr changes none of it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import thor_dflash
from thor_dflash import streams
from thor_dflash.errors import ConfigError, ThorError
from thor_dflash.progress import say

if TYPE_CHECKING:
    from thor_dflash.config import Config
    from thor_dflash.progress import Progress


class _Parser(argparse.ArgumentParser):
    """argparse, with its complaints as errors of ours. `error`, `exit` are its documented hooks."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        sys.stdout.flush()  # not at the interpreter's end, where nobody tells what is wrong with it
        super().exit(status, message)


class _Once(argparse.Action):
    """Stores one value, as argparse does, but refuses a second one, which would silently win."""

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


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run one verb, return the exit status."""
    try:
        streams.prepare()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
        status = run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except ThorError as e:
        _complain(" ".join(str(e).split()))
        return 2
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except BrokenPipeError:
        streams.leave(sys.stdout)
        return 141
    except OSError as e:
        # A path the system will not look at (too long, no permission) is the user's to put right,
        # and so is a stdout that takes nothing.
        if e.filename is None and not streams.refuses(sys.stdout):
            raise
        what = f"{e.filename} must be usable" if e.filename else "stdout must be writable"
        _complain(f"{what} (got: {e.strerror})")
        return 2
    return status


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C, put off while a module is imported: an interrupt between two steps of loading a
    library is an ImportError to some and the end of the process to others.
    """
    while frame is not None and frame.f_code is not main.__code__:
        if frame.f_code.co_filename == _IMPORT:
            again = threading.Timer(_PUT_OFF, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


_IMPORT = "<frozen importlib._bootstrap>"
_PUT_OFF = 0.02
"""Seconds."""


def _complain(text: str) -> None:
    say(sys.stderr, f"thor-dflash: {text}")


def run(argv: Sequence[str]) -> int:
    """Run one command line; its exit status.

    Raises:
        ThorError: anything the user can put right.
    """
    args = parser().parse_args(argv)
    _check(args)
    # Imported here, as each verb imports its floor, so that --help answers at once.
    from thor_dflash import config, progress

    settings = config.load(args.config, overrides(args))
    _belongs(args)
    report = progress.choose(sys.stderr, quiet="json" in args and args.json)
    try:
        return _verb(args, settings, report) or 0
    finally:
        report.close()


def _verb(args: argparse.Namespace, config: Config, progress: Progress) -> int | None:
    """The verb's exit status; most have none to tell."""
    module = importlib.import_module(f"thor_dflash.verbs.{args.verb}")
    verb: Callable[[argparse.Namespace, Config, Progress], int | None] = module.run
    return verb(args, config, progress)


def _check(args: argparse.Namespace) -> None:
    thinking = vars(args).get("decode.thinking") or "decode.thinking" in _set(args)
    if args.verb == "generate" and args.tokens and thinking:
        raise ConfigError("--thinking must go with --prompt or --messages (got --tokens)")
    for one, *others in _APART.get(args.verb, ()):
        for other in others:
            if _given(args, one) and _given(args, other):
                raise ConfigError(f"{other} must go without {one} (got both)")
    _at_least_0("--tolerance", vars(args).get("tolerance"))
    _at_least_0("--mock-cycle-ms", vars(args).get("mock_cycle_ms"))


_APART: Mapping[str, Sequence[Sequence[str]]] = {
    "check": (
        ("--golden", "--tokens"),  # which holds its own
        ("--make-golden", "--tolerance", "--operators", "--json"),
    ),
    "bench": (
        ("--package", "--random-weights", "--engine", "--quick", "--out"),
        ("--ready", "--quick"),
    ),
    "serve": (("--package", "--mock-cycle-ms"),),
}
"""Verb -> options, each with those that it would leave without a meaning."""
_SAYS_NOTHING: Mapping[str, object] = {"--operators": "auto"}
"""Options with a default -> what they are where nobody gives them."""


def _given(args: argparse.Namespace, option: str) -> bool:
    name = "build.engine" if option == "--engine" else option[2:].replace("-", "_")
    value = vars(args)[name]
    return value is not None and value is not False and value != _SAYS_NOTHING.get(option)


def _at_least_0(option: str, value: float | None) -> None:
    if value is not None and not 0 <= value < float("inf"):
        raise ConfigError(f"{option} must be a finite number of at least 0 (got {value})")


def overrides(args: argparse.Namespace) -> tuple[str, ...]:
    """Every --set, then every option that is another spelling of a key (its dest is the key).

    Raises:
        ConfigError: a key is given twice, or both ways.
    """
    given = _set(args)
    for key in given:
        if given.count(key) > 1:
            raise ConfigError(f"{key} must be given once (got --set {given.count(key)} times)")
    items: list[str] = []
    for key, value in vars(args).items():
        if "." not in key or value is None:
            continue
        if key in given:
            raise ConfigError(f"{key} must be given once (got an option and --set)")
        items.append(f"{key}={value}")
    return (*args.set, *items)


def _set(args: argparse.Namespace) -> list[str]:
    """The key of every --set."""
    return [item.partition("=")[0].strip() for item in args.set]


def _belongs(args: argparse.Namespace) -> None:
    """Refuse what the verb would not look at. A file may hold sections of other verbs, too."""
    reads, verb = list(args.reads), args.verb
    for verb_, option, section in _UNREAD:
        if verb == verb_ and _given(args, option):
            reads.remove(section)
            verb = f"{verb_} {option}"
    for key, item in zip(_set(args), args.set, strict=True):
        if key.partition(".")[0] not in reads:
            raise ConfigError(
                f"{key} must be a setting of {verb} "
                f"(got --set {item}; {verb} reads {_listed(reads)})"
            )


_UNREAD = (("bench", "--package", "build"), ("serve", "--mock", "engine"))
"""Verb, an option with which it does not read a section, the section."""


def _listed(sections: Sequence[str]) -> str:
    return ", ".join(sections) or "no section"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = _Parser(prog="thor-dflash", description=thor_dflash.__doc__, allow_abbrev=False)
    top.add_argument(
        "--version", action="version", version=f"thor-dflash {thor_dflash.__version__}"
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, add, sections, text in (
        ("build", _build, "build", "two checkpoints to a package"),
        ("generate", _generate, "engine decode", "answer one prompt"),
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
        sub = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.register("action", None, _Once)
        add(sub)
        reads = sections.split()
        sub.set_defaults(reads=reads)
        sub.add_argument("-c", "--config", type=Path, metavar="FILE.toml", help="configuration")
        sub.add_argument(
            "-s", "--set", action="append", default=[], metavar="a.b=value",
            help=f"change one key; this verb reads {_listed(reads)}",
        )  # fmt: skip
    return top


def _build(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--target", type=Path, required=True, metavar="DIR", help="target checkpoint")
    sub.add_argument("--drafter", type=Path, metavar="DIR", help="DFlash checkpoint, if any")
    sub.add_argument("--out", type=Path, required=True, metavar="PKG", help="package to write")
    sub.add_argument(
        "--engine", dest="build.engine", metavar="ort|cuda|tensorrt", help="engine to build for"
    )


def _generate(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--package", type=Path, required=True, metavar="PKG")
    source = sub.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="what the user says")
    source.add_argument("--messages", type=Path, metavar="FILE.json", help="a chat: role, content")
    source.add_argument("--tokens", type=Path, metavar="FILE", help="a JSON list of token ids")
    sub.add_argument("--drafter", dest="decode.drafter", metavar="dflash|none")
    sub.add_argument("--max-tokens", dest="decode.max_tokens", metavar="N")
    sub.add_argument("--thinking", dest="decode.thinking", metavar="on|off")
    sub.add_argument(
        "--ignore-eos", dest="decode.ignore_eos", action="store_const", const="true",
        help="go on past the stop tokens",
    )  # fmt: skip
    _policies(sub)
    sub.add_argument("--json", action="store_true", help="one JSON object instead of the text")


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
    sub.add_argument("--package", type=Path, required=True, metavar="PKG")
    sub.add_argument("--tokens", type=Path, required=True, metavar="FILE", help="JSON list of ids")
    sub.add_argument("--out", type=Path, required=True, metavar="X.npz")
    sub.add_argument("--taps", action="store_true", help="the rows the drafter reads, too")


def _check_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--package", type=Path, required=True, metavar="PKG")
    other = sub.add_mutually_exclusive_group()
    other.add_argument(
        "--reference", metavar="PKG2|ort", help="a package of another engine; ort: PKG's graphs"
    )
    other.add_argument("--golden", type=Path, metavar="X.npz", help="made by --make-golden")
    other.add_argument("--make-golden", type=Path, metavar="X.npz", help="write, compare nothing")
    sub.add_argument("--tokens", type=Path, metavar="FILE", help="JSON list of ids")
    sub.add_argument(
        "--operators", choices=("auto", "all", "none"), default="auto",
        help="hold each operator to its definition: where logits differ, always, or never",
    )  # fmt: skip
    sub.add_argument("--tolerance", type=float, metavar="X", help="of logits, share of the largest")
    sub.add_argument("--json", action="store_true", help="the report as JSON")


def _doctor(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--package", type=Path, metavar="PKG", help="which is to run here")
    sub.add_argument("--json", action="store_true", help="the report as JSON")


def _demo(sub: argparse.ArgumentParser) -> None:
    pass


def _bench(sub: argparse.ArgumentParser) -> None:
    source = sub.add_mutually_exclusive_group(required=True)
    source.add_argument("--shape", metavar="NAME", help="a model's sizes: qwen3.6-27b")
    source.add_argument("--package", type=Path, metavar="PKG", help="with --ready")
    sub.add_argument("--random-weights", action="store_true", help="made on the device, not read")
    sub.add_argument("--engine", dest="build.engine", metavar="cuda")
    sub.add_argument("--quick", action="store_true", help="without one thing left out at a time")
    sub.add_argument(
        "--ready", action="store_true",
        help="time from process start until it can answer; a shape is written to --out first",
    )  # fmt: skip
    sub.add_argument("--out", type=Path, metavar="DIR", help="a new directory for --ready")
    sub.add_argument("--json", action="store_true", help="the rows as JSON")


def _serve(sub: argparse.ArgumentParser) -> None:
    source = sub.add_mutually_exclusive_group(required=True)
    source.add_argument("--package", type=Path, metavar="PKG")
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
    sub.add_argument("--keys", metavar="DIR", help="CURVE keys of a client")
    sub.add_argument("--token-file", type=Path, metavar="FILE", help="the server's secret")
    sub.add_argument("--schema", type=Path, metavar="FILE.json", help="what the plan must obey")
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
    sub.add_argument("directory", type=Path, metavar="DIR")
