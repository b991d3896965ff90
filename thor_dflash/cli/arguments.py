"""The options of each subcommand. Those that set a key of the configuration have it as `dest`, and
get type and help from the key's section.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any


def path(text: str) -> Path:
    """A path that is not empty: an empty name is the working directory to pathlib, but in a shell
    it usually comes from an unset variable.
    """
    if not text:
        raise argparse.ArgumentTypeError("must be a path (got an empty name)")
    return Path(text)


def named(text: str) -> str:
    """A setting that is not empty, for the same reason: empty would switch it off."""
    path(text)
    return text


def _settings(sub: argparse.ArgumentParser, *keys: str) -> None:
    """Add the options that set these keys of the configuration."""
    from thor_dflash.config import reference  # here, so that --help is fast

    for key in keys:
        option, metavar = reference.OPTIONS[key]
        kind: dict[str, Any] = {"metavar": metavar or "|".join(reference.values(key))}
        if not kind["metavar"]:
            kind = {"action": "store_const", "const": "true"}
        elif metavar == "ENDPOINT":
            kind["action"] = "append"
        elif metavar in ("DIR", "FILE"):
            kind["type"] = named
        sub.add_argument(option, dest=key, help=reference.help_of(key), **kind)


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
    _settings(sub, "build.engine")


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
    _settings(
        sub, "decode.drafter", "decode.max_tokens", "decode.thinking", "decode.ignore_eos",
        "decode.budget.tokens", "decode.budget.close", "decode.budget.effort", "decode.accept",
        "decode.gate", "engine.block",
    )  # fmt: skip
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
    _settings(sub, "build.engine")
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
    _settings(
        sub, "serve.bind", "serve.curve", "serve.prefix_dir", "serve.events", "serve.trace_slow_ms",
        "serve.yield_us", "serve.insecure", "serve.allow_admin", "serve.log_prompts",
    )  # fmt: skip


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
    _settings(sub, "gateway.servers", "gateway.listen", "gateway.keys", "gateway.insecure")


def keygen(sub: argparse.ArgumentParser) -> None:
    """Add the options of `keygen`."""
    sub.add_argument(
        "directory", type=path, metavar="DIR", help="new directory to write the keys to"
    )
