"""The options of each command. Those that set a key of the configuration have it as `dest`, and get
type and help from the key's section.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

SERVER = "tcp://127.0.0.1:5571"


class Arguments(Protocol):
    """A parser, or a group of options of one."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """See argparse."""
        ...


def path(text: str) -> Path:
    """A path that is not empty: an empty name is the working directory to pathlib, but in a shell
    it usually comes from an unset variable.
    """
    if not text:
        raise argparse.ArgumentTypeError("must be a path (got an empty name)")
    return Path(text)


def _path_setting(text: str) -> str:
    """A setting that is not empty, for the same reason: empty would switch it off."""
    return str(path(text)) and text


PATHS = ("DIR", "PKG", "FILE", "FILE.json", "FILE.jsonl", "X.json", "X.npz", "X.html")
NUMBERS = ("N", "MS", "SECONDS")


def _add(sub: Arguments, option: str, text: str, **more: Any) -> None:
    """Add `--name METAVAR`, whose type is that of the metavar, or the flag `--name`."""
    name, _, metavar = option.partition(" ")
    if metavar:
        kind = path if metavar in PATHS else int if metavar in NUMBERS else str
        more = {"type": kind, "metavar": metavar, **more}
    elif "choices" not in more:
        more = {"action": "store_true", **more}
    sub.add_argument(name, help=text, **more)


def _settings(sub: Arguments, *keys: str) -> None:
    """Add the options that set these keys of the configuration."""
    from thor_dflash.config import reference  # here, so that --help is fast

    for key in keys:
        option, metavar = reference.OPTIONS[key]
        kind: dict[str, Any] = {"metavar": metavar or "|".join(reference.values(key))}
        if not kind["metavar"]:
            kind = {"action": "store_const", "const": "true"}
        elif metavar in ("ENDPOINT", "NAME", "CLASS=FORMAT"):
            kind["action"] = "append"
        elif metavar in PATHS:
            kind["type"] = _path_setting
        sub.add_argument(option, dest=key, help=reference.help_of(key), **kind)


PACKAGE = ("--package PKG", "package directory, made by thor-dflash build")
MESSAGES = ("--messages FILE.json", 'a chat: a JSON list of {"role": ..., "content": ...}')
TOKENS = ("--tokens FILE.json", "a JSON list of token ids")
URL = ("--url URL", "address of any server with OpenAI's API: http://HOST:PORT/v1")
QUANTIZE = (
    "quantize.preset", "quantize.classes", "quantize.method", "quantize.dialect", "quantize.kv",
    "quantize.activations", "quantize.device",
)  # fmt: skip
PLAN_FORMATS = ("json_steps", "bt_cpp_xml", "pddl_plan", "nav2_waypoints")
"""Those of the protocol, whose import would make --help slow."""
SOURCES = "- reads standard input, @FILE a file"
DRAFT = f"text that the answer may repeat, as the plan before it (repeatable); {SOURCES}"
PLAN = ("--plan", "print sizes, disk and the predicted time of a step, and write nothing")
REPORT = ("--json", "print the report as JSON")


def build(sub: argparse.ArgumentParser) -> None:
    """Add the options of `build`."""
    _add(sub, "--target DIR", "directory of the target model (Hugging Face)", required=True)
    _add(sub, "--drafter DIR", "directory of its DFlash drafter, or mtp: the MTP layer in the "
         "target's checkpoint; without one, the package decodes plainly")  # fmt: skip
    _add(sub, "--out PKG", "directory of the package to write", required=True)
    _add(sub, "--force", "replace a package that is already at --out")
    _settings(sub, "build.engine", "build.vision")


def quantize(sub: argparse.ArgumentParser) -> None:
    """Add the options of `quantize`."""
    source = sub.add_mutually_exclusive_group(required=True)
    _add(source, "--target DIR", "directory of the target model to quantise (Hugging Face)")
    _add(source, "--drafter DIR", "directory of the DFlash drafter to quantise instead")
    _add(sub, "--out DIR", "new directory for the quantised checkpoint")
    _add(sub, "--statistics FILE", "activations of the target, made by thor-dflash calibrate: for "
         "method act, scales of the KV cache, and input_scale of modelopt's FP8")  # fmt: skip
    _add(sub, *PLAN)
    _add(sub, "--from-quantised", "accept a checkpoint that is quantised already, and round its "
         "weights a second time")  # fmt: skip
    _settings(sub, *QUANTIZE)


def calibrate(sub: argparse.ArgumentParser) -> None:
    """Add the options of `calibrate`."""
    source = sub.add_mutually_exclusive_group(required=True)
    _add(source, "--target DIR", "directory of the target model (Hugging Face), quantised or not: "
         "runs it layer by layer from the disk, in float32 on the CPU")  # fmt: skip
    _add(source, "--package PKG", "package of the target instead: runs it on its own engine, ort "
         "or cuda")  # fmt: skip
    _add(sub, "--prompts FILE", 'JSON lines to run: {"messages": [...]}, {"text": "..."} or '
         '{"tokens": [...]}', required=True)  # fmt: skip
    _add(sub, "--out FILE", "file to write, a .safetensors", required=True)
    _settings(sub, "calibrate.tokens")


def synth(sub: argparse.ArgumentParser) -> None:
    """Add the options of `synth`."""
    _add(sub, "--shape NAME", "the model, as qwen3.6-27b; another name lists all", required=True)
    _add(sub, "--drafter", "its drafter instead of the target")
    _add(sub, "--mtp", "with the target's MTP layer")
    _add(sub, "--layers N", "only so many of the target's layers (default: all)")
    _add(sub, "--out DIR", "new directory for the checkpoint")
    _add(sub, *PLAN)
    _settings(sub, *QUANTIZE)


def generate(sub: argparse.ArgumentParser) -> None:
    """Add the options of `generate`."""
    _add(sub, *PACKAGE, required=True)
    source = sub.add_mutually_exclusive_group(required=True)
    _add(source, "--prompt TEXT", f"message of the user; {SOURCES}")
    _add(source, *MESSAGES)
    _add(source, "--tokens FILE.json", "the prompt as a JSON list of token ids")
    _image(sub, "--prompt")
    _add(sub, "--schema FILE.json", "JSON schema that the answer after the thinking must obey")
    _add(sub, "--draft TEXT", DRAFT, action="append")
    _settings(
        sub, "decode.drafter", "decode.max_tokens", "decode.thinking", "decode.preserve_thinking",
        "decode.ignore_eos", "decode.budget.tokens", "decode.budget.close", "decode.budget.effort",
        "decode.accept", "decode.gate", "engine.block", "decode.sampling.temperature",
        "decode.sampling.top_p", "decode.sampling.top_k", "decode.sampling.min_p",
        "decode.sampling.seed", "decode.sampling.acceptance",
    )  # fmt: skip
    _add(sub, "--json", "print one JSON object instead of the text")


def profile(sub: argparse.ArgumentParser) -> None:
    """Add the options of `profile`."""
    generate(sub)
    _add(sub, "--runs N", "answers to measure (default 15)")
    _add(sub, "--warmup N", "answers before these, not measured (default 2)", default=2)
    _add(sub, "--soak SECONDS", "measure for so long instead of --runs, to see the effect of heat")
    _add(sub, "--compare X.json", "an earlier profile of the same request, printed by --json")
    _add(sub, "--html X.html", "also write the profile as one page of charts")
    _add(sub, "--trace X.json", "also write a trace of the last answer, for ui.perfetto.dev")


def score(sub: argparse.ArgumentParser) -> None:
    """Add the options of `score`."""
    _add(sub, *PACKAGE, required=True)
    _add(sub, *TOKENS, required=True)
    _add(sub, "--out X.npz", "file to write: numpy, with one row of logits for each token",
         required=True)  # fmt: skip
    _add(sub, "--taps", "also write the outputs of the target's layers that the drafter reads")


def check(sub: argparse.ArgumentParser) -> None:
    """Add the options of `check`."""
    _add(sub, *PACKAGE, required=True)
    other = sub.add_mutually_exclusive_group()
    _add(other, "--reference PKG2|ort", "also compare logits with those of another package, or of "
         "PKG's own graphs (ort)")  # fmt: skip
    _add(other, "--golden X.npz", "also compare logits with those in a file that --make-golden "
         "wrote")  # fmt: skip
    _add(other, "--make-golden X.npz", "only write this file, to compare with on another machine")
    _add(sub, "--tokens FILE.json", "a JSON list of token ids to check with (default: random ones)")
    _add(sub, "--operators", "compare each operator with its definition: auto only if the logits "
         "differ or are not compared, all always, none never (default auto)",
         choices=("auto", "all", "none"), default="auto")  # fmt: skip
    _add(sub, "--tolerance X", "largest difference of logits that is accepted, as a share of the "
         "largest logit", type=float)  # fmt: skip
    _add(sub, *REPORT)


def quality(sub: argparse.ArgumentParser) -> None:
    """Add the options of `quality`."""
    sub.epilog = "Exit status: 1 if a gate fails, or nothing was measured."
    source = sub.add_mutually_exclusive_group(required=True)
    _add(source, "--reference PKG", "package of the model before it was quantised")
    _add(source, "--stored X.npz", "its logits and answers instead, which --store wrote")
    other = sub.add_mutually_exclusive_group(required=True)
    _add(other, "--package PKG", "package to judge")
    _add(other, "--store X.npz", "only write the reference's logits and answers to this file")
    _add(sub, "--data FILE.jsonl", 'texts to compare on, a JSON object a line with "text", '
         '"messages" or "tokens", and perhaps "class" (default: a chapter of a book)')  # fmt: skip
    _add(sub, "--reference-target DIR", "checkpoint of the reference, to compare weights, too")
    _add(sub, "--target DIR", "checkpoint of the package to judge; with --reference-target")
    _settings(sub, "quality.tasks")
    _add(sub, "--html X.html", "also write the comparison as one page of charts")
    _add(sub, *REPORT)


def draft_vocab(sub: argparse.ArgumentParser) -> None:
    """Add the options of `draft-vocab`."""
    sub.epilog = "Exit status: 1 if no list pays; then none is written."
    _add(sub, "--target DIR", "directory of the target model (Hugging Face)", required=True)
    _add(sub, "--drafter DIR", "directory of its drafter", required=True)
    _add(sub, "--out X.json", "file to write, for build.draft_ids", required=True)
    _add(sub, "--corpus FILE.jsonl", 'answers to count, a JSON object a line with "messages", of '
         'which the last counts, "text" or "tokens", and perhaps "class"')  # fmt: skip
    _add(sub, "--package PKG", "package of both, whose answers are counted, and accept length "
         "measured")  # fmt: skip
    _add(sub, "--rollouts N", "tasks that the package answers (default 120)")
    _add(sub, "--accept-length X", "tokens per cycle, without a package to measure them",
         type=float)  # fmt: skip
    _add(sub, "--schema FILE.json", "JSON schema whose names must be in the list")
    _add(sub, "--size N", "number of ids, even (default: the fastest that loses at most 1 %%)")
    _add(sub, "--force", "write the list of --size also if it would not be recommended")


def doctor(sub: argparse.ArgumentParser) -> None:
    """Add the options of `doctor`."""
    _add(sub, "--package PKG", "a package that is to run on this machine")
    _add(sub, *REPORT)


def bench(sub: argparse.ArgumentParser) -> None:
    """Add the options of `bench`."""
    source = sub.add_mutually_exclusive_group(required=True)
    _add(source, "--shape NAME", "measure a model of these sizes; needs --random-weights (known: "
         "qwen3.6-27b, qwen3.8-27b)")  # fmt: skip
    _add(source, "--package PKG", "the package to start; needs --ready or --image")
    _add(sub, "--random-weights", "make weights on the device instead of reading a checkpoint")
    _add(sub, "--engine cuda", "needed with --shape; only cuda", dest="build.engine")
    _add(sub, "--quick", "skip the variants that each leave one optimisation out")
    _add(sub, "--ready", "measure the time from process start to the first answer; for a --shape, "
         "a package is first written to --out")  # fmt: skip
    _add(sub, "--out DIR", "new directory for the package of --ready")
    _add(sub, "--image WIDTHxHEIGHT", "measure what such a camera frame in a prompt costs, and "
         "nothing else; may be given several times", action="append", default=[])  # fmt: skip
    _add(sub, "--json", "print the rows as JSON")


def replay(sub: argparse.ArgumentParser) -> None:
    """Add the options of `replay`."""
    sub.epilog = (
        "With --url every turn is sent as MLPerf's Edge Agentic client sends it. Nothing that this "
        "prints is an MLPerf result. Exit status: 1 if turns are missing."
    )
    sub.add_argument("trace", type=path, metavar="TRACE.jsonl", help="recorded conversations")
    source = sub.add_mutually_exclusive_group(required=True)
    _add(source, *URL)
    _add(source, *PACKAGE)
    _add(source, "--shape NAME", "model whose sizes to take: qwen3.6-27b, qwen3.8-27b")
    _add(sub, "--random-weights", "make weights on the device instead of reading a package")
    _add(sub, "--tokenizer DIR", "directory with tokenizer.json and chat template, for "
         "--random-weights")  # fmt: skip
    _add(sub, "--conversations N", "only the first N conversations")
    _add(sub, "--turns N", "only the first N turns of each")
    _add(sub, "--forced-accept K", "commit the recorded answers, K tokens a cycle (a fraction on "
         "average), or as many as the drafter agrees with: drafter; with --url the server "
         "needs serve.allow_forced")  # fmt: skip
    _add(sub, "--reuse-mb N", "memory for the states of earlier turns, MiB, 0 for none (default "
         "4096); without --url")  # fmt: skip
    _add(sub, "--thinking", "whether the model thinks (default off)", choices=("on", "off"),
         default="off")  # fmt: skip
    _http(sub)
    _add(sub, "--plain", "send nothing that MLPerf's client does not send: no token counts")
    _add(sub, "--body FILE.json", "further fields of every request, a JSON object")
    _add(sub, "--compare X.json", "an earlier replay of the same turns, printed by --json")
    _add(sub, "--html X.html", "also write the replay as one page of charts")
    _add(sub, "--json", "print the replay as JSON")


def _http(sub: argparse.ArgumentParser) -> None:
    _add(sub, "--model NAME", "model to ask for (default: the first that the server lists)")
    _add(sub, "--key-file FILE", "file with the API key of the server")


def bfcl(sub: argparse.ArgumentParser) -> None:
    """Add the options of `bfcl`."""
    sub.epilog = (
        "Scores need the package bfcl-eval, which pins old versions of others: install both into "
        "an environment of their own. Without it, only the form of the calls is checked."
    )
    sub.add_argument("samples", type=path, metavar="SAMPLES.jsonl", help="BFCL v4, single turn")
    _add(sub, *URL, required=True)
    _http(sub)
    _add(sub, "--first N", "only the first N samples")
    _add(sub, "--json", "print the scores as JSON")


def tune(sub: argparse.ArgumentParser) -> None:
    """Add the options of `tune`."""
    sub.epilog = (
        "Only what was not measured on this device, with this driver and in this power mode is "
        "measured. An engine uses the record from then on, unless engine.tune is off."
    )
    _add(sub, *PACKAGE, required=True)
    _add(sub, "--budget-s N", "stop measuring after so many seconds (default 120); tune again to "
         "go on")  # fmt: skip
    _add(sub, "--again", "measure everything anew")
    _add(sub, "--explain", "print every launch with all its candidates and their times")
    _add(sub, "--json", "print the record as JSON")


def serve(sub: argparse.ArgumentParser) -> None:
    """Add the options of `serve`."""
    source = sub.add_mutually_exclusive_group(required=True)
    _add(source, *PACKAGE)
    _add(source, "--mock", "serve without a model: every plan is the same; to test clients")
    _add(sub, "--mock-cycle-ms MS", "how long one step of --mock takes", type=float)
    _settings(
        sub, "serve.bind", "serve.curve", "serve.prefix_dir", "serve.events", "serve.trace_slow_ms",
        "serve.yield_us", "serve.insecure", "serve.allow_admin", "serve.log_prompts",
    )  # fmt: skip


def _server(sub: argparse.ArgumentParser) -> None:
    """Add the options by which a client finds its server."""
    _add(sub, "--server ENDPOINT", f"tcp://HOST:PORT or ipc://PATH (default {SERVER})",
         default=SERVER)  # fmt: skip
    _add(sub, "--keys DIR", "client's CURVE keys, for a server with --curve")
    _add(sub, "--token-file FILE", "file with the secret of a server that has serve.token_file")


def plan(sub: argparse.ArgumentParser) -> None:
    """Add the options of `plan`."""
    sub.epilog = (
        "The plan alone goes to stdout, as a table on a terminal and else as one line of JSON; "
        "thinking and progress go to stderr. Exit status: 0 a whole and valid plan, 1 no valid "
        "plan, 2 a wrong request, 3 a plan that was cut short after its last whole step, 4 no "
        "server answered, 5 the server did not plan (busy, draining, too late, displaced, a fault)."
    )
    source = sub.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "prompt", nargs="?", metavar="TEXT", help=f"what the robot shall do; {SOURCES}"
    )
    _add(source, *MESSAGES)
    _image(sub, "TEXT")
    _server(sub)
    rule = sub.add_mutually_exclusive_group()
    _add(rule, "--schema FILE.json", "JSON schema that the plan must obey")
    _add(rule, "--skills FILE", "the robot's skills, of which the server makes what the plan must "
         "obey: a .yaml, .toml or .json file")  # fmt: skip
    _plan_format(sub)
    _add(sub, "--draft TEXT", DRAFT, action="append")
    _add(sub, "--thinking", "auto: if the deadline leaves time (default: the server's)",
         choices=("on", "off", "auto"))  # fmt: skip
    _add(sub, "--max-tokens N", "longest plan, thinking not counted (default: the server's)")
    _add(sub, "--temperature X", "draw tokens at this temperature (default: 0, the best token)",
         type=float)  # fmt: skip
    _add(sub, "--top-p X", "draw from the best tokens with this share of the probability",
         type=float)  # fmt: skip
    _add(sub, "--top-k N", "draw from this many best tokens")
    _add(sub, "--min-p X", "draw from tokens with this share of the best one's probability",
         type=float)  # fmt: skip
    _add(sub, "--seed N", "seed of the draw: the same plan again (default: drawn, and reported)")
    _add(sub, "--acceptance", "of drafts of drawn tokens; rejection may accept more, and no seed "
         "repeats the plan (default: coupled)", choices=("coupled", "rejection"))  # fmt: skip
    _add(sub, "--deadline-ms MS", "the plan, or what there is of it, must be here by then "
         "(default: none)")  # fmt: skip
    _add(sub, "--session NAME", "name of the robot or arm: a later plan of the same name replaces "
         "this one")  # fmt: skip
    _add(sub, "--prefix-id NAME", "name of a pinned prefix that the chat begins with: its system "
         "message")  # fmt: skip
    _add(sub, "--json", "print the result as one JSON object")


def _image(sub: argparse.ArgumentParser, text: str) -> None:
    _add(sub, "--image FILE", f"a .jpg or .png that {text} is about; may be given several times",
         action="append", default=[])  # fmt: skip


def status(sub: argparse.ArgumentParser) -> None:
    """Add the options of `status`."""
    sub.epilog = (
        "Exit status: 0 the server takes plans (ready, busy), 1 it is in another state, 2 a wrong "
        "request, 4 no server answered."
    )
    _server(sub)
    _wait(sub)
    _add(sub, "--quiet", "print nothing: for health checks")
    _add(sub, "--json", "print health, hello and stats as one JSON object")


def _wait(sub: Arguments) -> None:
    _add(sub, "--wait S", "longest wait for the server, seconds (default 2)", type=float,
         default=2.0)  # fmt: skip


def stats(sub: argparse.ArgumentParser) -> None:
    """Add the options of `stats`."""
    sub.epilog = (
        "On a terminal it is drawn, elsewhere it is plain lines. With --watch a server that is "
        "gone is waited for, and Ctrl-C ends it. Exit status: 0, 2 a wrong request, 4 no server "
        "answered, 130 Ctrl-C."
    )
    _server(sub)
    _wait(sub)
    _add(sub, "--watch", "again every S seconds (default 2) until Ctrl-C", action=None,
         metavar="S", type=float, nargs="?", const=2.0)  # fmt: skip
    _add(sub, "--json", "print health, hello and stats as one JSON object, with --watch one a line")


def schema(sub: argparse.ArgumentParser) -> None:
    """Add the options of `schema`."""
    sub.add_argument(
        "skills", type=path, metavar="SKILLS", help="a .yaml, .toml or .json file (tdp.skills.v1)"
    )
    _plan_format(sub)


def _plan_format(sub: argparse.ArgumentParser) -> None:
    _add(sub, "--plan-format NAME", "what a plan is (default json_steps, tdp.plan.v1)",
         choices=PLAN_FORMATS, default="json_steps")  # fmt: skip


def template(sub: argparse.ArgumentParser) -> None:
    """Add the options of `template`."""
    sub.add_argument("name", nargs="?", metavar="NAME", help="the file to print (default: a list)")


def completion(sub: argparse.ArgumentParser) -> None:
    """Add the options of `completion`."""
    sub.epilog = (
        "Write it to ~/.local/share/bash-completion/completions/thor-dflash, to _thor-dflash in a "
        "directory of zsh's $fpath, or to ~/.config/fish/completions/thor-dflash.fish."
    )
    sub.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"),
                     help="bash, zsh or fish")  # fmt: skip


def gateway(sub: argparse.ArgumentParser) -> None:
    """Add the options of `gateway`."""
    _settings(
        sub, "gateway.servers", "gateway.listen", "gateway.api_key_file", "gateway.hosts",
        "gateway.keys", "gateway.insecure",
    )  # fmt: skip


def keygen(sub: argparse.ArgumentParser) -> None:
    """Add the options of `keygen`."""
    sub.add_argument(
        "directory", type=path, metavar="DIR", help="new directory to write the keys to"
    )


COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None] | None, str, str]] = {
    "build": (build, "build",
              "make a package out of a target model and, if there is one, its drafter"),
    "quantize": (quantize, "quantize",
                 "make an NVFP4 and FP8 checkpoint out of a BF16 one"),
    "calibrate": (calibrate, "calibrate engine",
                  "measure a target's activations, for quantize --statistics"),
    "synth": (synth, "quantize",
              "write a checkpoint of a published shape with random values, to rehearse a build"),
    "generate": (generate, "engine decode", "answer one prompt with a package"),
    "profile": (profile, "engine decode",
                "measure one answer many times: where each millisecond goes"),
    "score": (score, "engine", "write the model's logits after each of the given token ids"),
    "check": (check, "engine",
              "test that a package computes what it should, operator by operator"),
    "quality": (quality, "engine quality",
                "measure what quantising has cost: a package against its reference"),
    "draft-vocab": (draft_vocab, "engine",
                    "choose the ids that a drafter may propose, if that makes it faster"),
    "tune": (tune, "engine",
             "measure how each launch of a package runs fastest on this GPU"),
    "doctor": (doctor, "engine", "show what this machine can run, and how to mend the rest"),
    "demo": (None, "build engine",
             "plan one task with the small model of the repository (needs a checkout)"),
    "bench": (bench, "build engine", "measure what each part of a step costs on this GPU"),
    "replay": (replay, "build engine",
               "replay recorded conversations: what every turn reads, and how long it takes"),
    "bfcl": (bfcl, "", "send tool-call samples to a server, and score its calls"),
    "serve": (serve, "engine serve",
              "run a plan server, which answers plan requests over ZeroMQ"),
    "plan": (plan, "", "request one plan from a running plan server"),
    "status": (status, "", "say whether a plan server takes plans, and how its last ones went"),
    "stats": (stats, "", "show queue, speed, deadlines and power of a plan server, also live"),
    "schema": (schema, "", "print the JSON schema of the plans over a robot's skills"),
    "gateway": (gateway, "gateway", "offer OpenAI's HTTP API in front of running plan servers"),
    "template": (template, "", "print a systemd unit, a configuration or a Dockerfile"),
    "completion": (completion, "", "print the completion of a shell"),
    "keygen": (keygen, "",
               "make the CURVE keys of an encrypted plan server and of its first client"),
}  # fmt: skip
"""Command -> what adds its options, the sections of the configuration that it reads, its help."""
