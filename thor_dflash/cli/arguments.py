"""The options of each subcommand and their help. `dest` is a configuration key if it has a dot."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def path(text: str) -> Path:
    """A path that is not empty: an empty name is the working directory to pathlib, but in a shell
    it usually comes from an unset variable.
    """
    if not text:
        raise argparse.ArgumentTypeError("must be a path (got an empty name)")
    return Path(text)


def named(text: str) -> str:
    """A setting that is not empty, for the same reason: empty would switch it off."""
    if not text:
        raise argparse.ArgumentTypeError("must be a path (got an empty name)")
    return text


def build(sub: argparse.ArgumentParser) -> None:
    """Add the options of `build`."""
    sub.add_argument(
        "--target", type=path, required=True, metavar="DIR",
        help="directory of the target model (Hugging Face)",
    )  # fmt: skip
    sub.add_argument(
        "--drafter", type=path, metavar="DIR",
        help="directory of its DFlash drafter; without one, the package decodes plainly",
    )  # fmt: skip
    sub.add_argument(
        "--out", type=path, required=True, metavar="PKG", help="directory of the package to write"
    )
    sub.add_argument(
        "--engine", dest="build.engine", metavar="ort|cuda|tensorrt",
        help="what will run the package: ort is ONNX Runtime on the CPU, for tests (default ort)",
    )  # fmt: skip


def _package(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--package", type=path, required=True, metavar="PKG",
        help="package directory, made by thor-dflash build",
    )  # fmt: skip


def _messages(add: Callable[..., argparse.Action]) -> None:
    add(
        "--messages", type=path, metavar="FILE.json",
        help='a chat: a JSON list of {"role": ..., "content": ...}',
    )  # fmt: skip


def generate(sub: argparse.ArgumentParser) -> None:
    """Add the options of `generate`."""
    _package(sub)
    source = sub.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="what the user says")
    _messages(source.add_argument)
    source.add_argument(
        "--tokens", type=path, metavar="FILE.json", help="the prompt as a JSON list of token ids"
    )
    sub.add_argument(
        "--schema", type=path, metavar="FILE.json",
        help="JSON schema that the answer after the thinking must obey",
    )  # fmt: skip
    sub.add_argument(
        "--drafter", dest="decode.drafter", metavar="auto|dflash|none",
        help="none decodes plainly: the same tokens, more slowly (default auto: if there is one)",
    )  # fmt: skip
    sub.add_argument(
        "--max-tokens", dest="decode.max_tokens", metavar="N",
        help="longest answer, thinking included (default 1024)",
    )  # fmt: skip
    sub.add_argument(
        "--thinking", dest="decode.thinking", metavar="on|off",
        help="whether the model thinks before it answers (default on)",
    )  # fmt: skip
    sub.add_argument(
        "--ignore-eos", dest="decode.ignore_eos", action="store_const", const="true",
        help="do not end at the stop tokens, but at --max-tokens; for measurements",
    )  # fmt: skip
    _policies(sub)
    sub.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the text"
    )


def profile(sub: argparse.ArgumentParser) -> None:
    """Add the options of `profile`."""
    generate(sub)
    sub.add_argument("--runs", type=int, metavar="N", help="answers to measure (default 15)")
    sub.add_argument(
        "--warmup", type=int, default=2, metavar="N",
        help="answers before these, not measured (default 2)",
    )  # fmt: skip
    sub.add_argument(
        "--soak", type=int, metavar="SECONDS",
        help="measure for so long instead of --runs, to see what heat does",
    )  # fmt: skip
    sub.add_argument(
        "--compare", type=path, metavar="X.json",
        help="an earlier profile of the same question, printed by --json",
    )  # fmt: skip
    sub.add_argument(
        "--html", type=path, metavar="X.html", help="also write the profile as one page of charts"
    )
    sub.add_argument(
        "--trace", type=path, metavar="X.json",
        help="also write a trace of the last answer, for ui.perfetto.dev",
    )  # fmt: skip


def _policies(sub: argparse.ArgumentParser) -> None:
    for option, key, metavar, text in (
        ("--thinking-budget", "decode.budget.tokens", "N",
         "close the thinking after N tokens"),
        ("--thinking-close", "decode.budget.close", "hard|soft",
         "soft: also shortly before, where the model nearly closes it (default hard)"),
        ("--reasoning-effort", "decode.budget.effort", "NAME",
         "a thinking budget by name: none, minimal, low, medium, high, x-high or max"),
        ("--accept", "decode.accept", "strict|relaxed",
         "relaxed: while thinking, take near misses of the drafter, too (default strict)"),
        ("--gate", "decode.gate", "on|off",
         "on: decode plainly while drafting does not pay (default off)"),
        ("--block", "engine.block", "N",
         "rows of a block, one of the widths in the package (default: its longest)"),
    ):  # fmt: skip
        sub.add_argument(option, dest=key, metavar=metavar, help=text)


def score(sub: argparse.ArgumentParser) -> None:
    """Add the options of `score`."""
    _package(sub)
    sub.add_argument(
        "--tokens", type=path, required=True, metavar="FILE.json", help="a JSON list of token ids"
    )
    sub.add_argument(
        "--out", type=path, required=True, metavar="X.npz",
        help="file to write: numpy, with one row of logits for each token",
    )  # fmt: skip
    sub.add_argument(
        "--taps", action="store_true",
        help="also write the outputs of the target's layers that the drafter reads",
    )  # fmt: skip


def check(sub: argparse.ArgumentParser) -> None:
    """Add the options of `check`."""
    _package(sub)
    other = sub.add_mutually_exclusive_group()
    other.add_argument(
        "--reference", metavar="PKG2|ort",
        help="also compare logits with those of another package, or of PKG's own graphs (ort)",
    )  # fmt: skip
    other.add_argument(
        "--golden", type=path, metavar="X.npz",
        help="also compare logits with those in a file that --make-golden wrote",
    )  # fmt: skip
    other.add_argument(
        "--make-golden", type=path, metavar="X.npz",
        help="only write this file, to compare with on another machine",
    )  # fmt: skip
    sub.add_argument(
        "--tokens", type=path, metavar="FILE.json",
        help="a JSON list of token ids to check with (default: random ones)",
    )  # fmt: skip
    sub.add_argument(
        "--operators", choices=("auto", "all", "none"), default="auto",
        help="compare each operator with its definition: auto only if the logits differ or are "
        "not compared, all always, none never (default auto)",
    )  # fmt: skip
    sub.add_argument(
        "--tolerance", type=float, metavar="X",
        help="largest difference of logits that is accepted, as a share of the largest logit",
    )  # fmt: skip
    sub.add_argument("--json", action="store_true", help="print the report as JSON")


def doctor(sub: argparse.ArgumentParser) -> None:
    """Add the options of `doctor`."""
    sub.add_argument(
        "--package", type=path, metavar="PKG", help="a package that is to run on this machine"
    )
    sub.add_argument("--json", action="store_true", help="print the report as JSON")


def demo(sub: argparse.ArgumentParser) -> None:
    """`demo` has no options of its own."""


def bench(sub: argparse.ArgumentParser) -> None:
    """Add the options of `bench`."""
    source = sub.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--shape", metavar="NAME",
        help="measure a model of these sizes; needs --random-weights (known: qwen3.6-27b)",
    )  # fmt: skip
    source.add_argument(
        "--package", type=path, metavar="PKG", help="the package to start; needs --ready"
    )
    sub.add_argument(
        "--random-weights", action="store_true",
        help="make weights on the device instead of reading a checkpoint",
    )  # fmt: skip
    sub.add_argument(
        "--engine", dest="build.engine", metavar="cuda", help="needed with --shape; only cuda"
    )
    sub.add_argument(
        "--quick", action="store_true",
        help="skip the variants that each leave one optimisation out",
    )  # fmt: skip
    sub.add_argument(
        "--ready", action="store_true",
        help="measure the time from process start to the first answer; for a --shape, a package "
        "is first written to --out",
    )  # fmt: skip
    sub.add_argument(
        "--out", type=path, metavar="DIR", help="new directory for the package of --ready"
    )
    sub.add_argument("--json", action="store_true", help="print the rows as JSON")


def serve(sub: argparse.ArgumentParser) -> None:
    """Add the options of `serve`."""
    source = sub.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--package", type=path, metavar="PKG", help="package directory, made by thor-dflash build"
    )
    source.add_argument(
        "--mock", action="store_true",
        help="serve without a model: every plan is the same; to test clients",
    )  # fmt: skip
    sub.add_argument(
        "--mock-cycle-ms", type=float, metavar="MS", help="how long one step of --mock takes"
    )
    sub.add_argument(
        "--bind", dest="serve.bind", action="append", metavar="ENDPOINT",
        help="tcp://HOST:PORT or ipc://PATH to listen on; repeatable (default tcp://127.0.0.1:5571)",
    )  # fmt: skip
    for option, key, metavar, kind, text in (
        ("--curve", "serve.curve", "DIR", named,
         "encrypt, and admit only known clients: directory made by thor-dflash keygen"),
        ("--prefix-dir", "serve.prefix_dir", "DIR", named,
         "where to keep the prefixes that clients ask to persist"),
        ("--events", "serve.events", "FILE", named,
         "file to append one line of JSON to for each event"),
        ("--trace-slow", "serve.trace_slow_ms", "MS", str,
         "write a trace of each plan that takes longer, into serve.trace_dir"),
        ("--yield-us", "serve.yield_us", "US", str,
         "wait before each step, in microseconds, for other users of the device"),
    ):  # fmt: skip
        sub.add_argument(option, dest=key, type=kind, metavar=metavar, help=text)
    for name, text in (
        ("insecure", "let other machines connect without encryption"),
        ("allow-admin", "let clients drain and stop the server; ipc or --curve only"),
        ("log-prompts", "write prompts to the log"),
    ):
        dest = f"serve.{name.replace('-', '_')}"
        sub.add_argument(f"--{name}", dest=dest, action="store_const", const="true", help=text)


def plan(sub: argparse.ArgumentParser) -> None:
    """Add the options of `plan`."""
    source = sub.add_mutually_exclusive_group(required=True)
    source.add_argument("prompt", nargs="?", metavar="TEXT", help="what the robot shall do")
    _messages(source.add_argument)
    sub.add_argument(
        "--server", default="tcp://127.0.0.1:5571", metavar="ENDPOINT",
        help="tcp://HOST:PORT or ipc://PATH (default tcp://127.0.0.1:5571)",
    )  # fmt: skip
    sub.add_argument(
        "--keys", type=path, metavar="DIR", help="client's CURVE keys, for a server with --curve"
    )
    sub.add_argument(
        "--token-file", type=path, metavar="FILE",
        help="file with the secret of a server that has serve.token_file",
    )  # fmt: skip
    sub.add_argument(
        "--schema", type=path, metavar="FILE.json", help="JSON schema that the plan must obey"
    )
    sub.add_argument(
        "--thinking", choices=("on", "off", "auto"),
        help="auto: if the deadline leaves time (default: the server's)",
    )  # fmt: skip
    sub.add_argument(
        "--max-tokens", type=int, metavar="N",
        help="longest plan, thinking not counted (default: the server's)",
    )  # fmt: skip
    sub.add_argument(
        "--deadline-ms", type=int, metavar="MS",
        help="the plan, or what there is of it, must be here by then (default: none)",
    )  # fmt: skip
    sub.add_argument(
        "--session", metavar="NAME",
        help="name of the robot or arm: a later plan of the same name replaces this one",
    )  # fmt: skip
    sub.add_argument(
        "--prefix-id", metavar="NAME",
        help="name of a pinned prefix that the chat begins with: its system message",
    )  # fmt: skip
    sub.add_argument("--json", action="store_true", help="print the result as one JSON object")


def gateway(sub: argparse.ArgumentParser) -> None:
    """Add the options of `gateway`."""
    sub.add_argument(
        "--server", dest="gateway.servers", action="append", metavar="ENDPOINT",
        help="a plan server; repeatable (default tcp://127.0.0.1:5571)",
    )  # fmt: skip
    sub.add_argument(
        "--listen", dest="gateway.listen", metavar="HOST:PORT",
        help="where to answer HTTP (default 127.0.0.1:8000)",
    )  # fmt: skip
    sub.add_argument(
        "--keys", dest="gateway.keys", type=named, metavar="DIR",
        help="client's CURVE keys, for servers with --curve",
    )  # fmt: skip
    sub.add_argument(
        "--insecure", dest="gateway.insecure", action="store_const", const="true",
        help="let other machines connect: HTTP has neither encryption nor a password here",
    )  # fmt: skip


def keygen(sub: argparse.ArgumentParser) -> None:
    """Add the options of `keygen`."""
    sub.add_argument(
        "directory", type=path, metavar="DIR", help="new directory to write the keys to"
    )
