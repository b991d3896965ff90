"""Options and --set: what a command accepts, and what it refuses instead of ignoring it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.samples import MANIFEST

from thor_dflash.cli import main, parser
from thor_dflash.config.tree import load
from thor_dflash.core.errors import ConfigError
from thor_dflash.package.manifest import MAGIC, render

COMMANDS = {
    "build": "--target t --out o",
    "quantize": "--target t --out o",
    "calibrate": "--target t --prompts p --out o.safetensors",
    "synth": "--shape qwen3.5-0.8b --out o",
    "generate": "--package p --prompt a",
    "profile": "--package p --prompt a",
    "score": "--package p --tokens t --out x.npz",
    "check": "--package p",
    "quality": "--reference r --package p",
    "draft-vocab": "--target t --drafter d --out o.json --package p",
    "doctor": "",
    "demo": "",
    "bench": "--package p",
    "serve": "--package p",
    "plan": "a",
    "gateway": "",
    "keygen": "d",
}
"""Verb -> the least that it must be given."""


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Run a command that must exit with 2, and return its one line on stderr."""
    assert main.main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.removeprefix("thor-dflash: ").rstrip()


# ---- sections
@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("serve --package p -s decode.gate=on", "decode.gate"),
        ("serve --mock -s engine.device=1", "engine.device"),
        ("serve --mock --bind no://where --yield-us 5", "serve.yield_us"),
    ],
)
def test_a_setting_that_a_command_does_not_read_is_refused(
    capsys: pytest.CaptureFixture[str], line: str, key: str
) -> None:
    assert re.match(
        rf"{key} must (be a setting of|go with|go without) ", refused(capsys, *line.split())
    )


def test_a_file_may_hold_sections_of_other_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "all.toml").write_text("[decode]\ngate = 'on'\n[build]\ncapacity = 5\n")
    args = ("--package", str(tmp_path / "none"), "-c", str(tmp_path / "all.toml"))
    assert "must be a package directory (got nothing" in refused(capsys, "check", *args)


@pytest.mark.parametrize(
    ("command", "item", "readers"),
    [
        ("generate", "engine.device=1", "cuda or tensorrt"),
        ("serve", "engine.threads=1", "ort"),
    ],
)
def test_a_setting_that_the_engine_of_the_package_does_not_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, item: str, readers: str
) -> None:
    made = replace(MANIFEST, engine="cuda" if readers == "ort" else "ort")
    (tmp_path / "manifest.toml").write_text(render(made))
    words = [str(tmp_path) if word == "p" else word for word in COMMANDS[command].split()]
    rule = f"must go with engine {readers} (got {made.engine})"
    assert refused(capsys, command, *words, "-s", item) == f"{item.partition('=')[0]} {rule}"


# ---- options
@pytest.mark.parametrize(
    "args",
    [
        "score --package p --tokens t --out x.npz -c a.toml --config b.toml",
        "generate --package p --prompt a --thinking off -s decode.thinking=on",
    ],
)
def test_a_second_value_does_not_win(capsys: pytest.CaptureFixture[str], args: str) -> None:
    assert "must be given once (got" in refused(capsys, *args.split())


def test_a_text_that_begins_like_an_option_is_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", "--package", "p", "--prompt", "--no robot may move"]
    assert parser.parse(line).prompt == "--no robot may move"
    assert parser.parse(["plan", "--", "--stop"]).prompt == "--stop"
    assert refused(capsys, *line[:3], "--prompt", "a", "--sche=b c").startswith("unrecognized")


def test_of_an_unknown_option_its_name_is_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    """argparse takes the option's value for the TEXT, and what is left over is the TEXT."""
    line = refused(capsys, "plan", "--shcema", "plan.json", "hi")
    assert line.startswith("unrecognized arguments: --shcema: did you mean --schema?")
    assert refused(capsys, "plan", "hi", "ho", "--shcema", "x") == line
    assert refused(capsys, "plan", "hi", "ho").startswith("unrecognized arguments: ho")


def test_a_required_option_that_is_mistyped_is_not_called_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = refused(capsys, "generate", "--pakage", "p", "--prompt", "hi")
    assert line.startswith("unrecognized arguments: --pakage: did you mean --package?")
    assert "did you mean --version?" in refused(capsys, "--versio")
    for texts in (["--no robot may move"], ["--", "--stop"]):
        assert "are required: --package" in refused(capsys, "tune", *texts)


@pytest.mark.parametrize(
    "line",
    [
        "gateway --keys",
        "serve --mock --prefix-dir",
    ],
)
def test_an_empty_name_switches_nothing_off(line: str) -> None:
    """As from a variable that is not set."""
    with pytest.raises(ConfigError, match=rf"^argument {line.split()[-1]}: must be a path "):
        parser.parser().parse_args([*line.split(), ""])


def test_ids_have_no_template_that_turns_thinking_off(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "generate", "--package", "p", "--tokens", "t", "--thinking=off")
    assert message == "--thinking must go with --prompt or --messages (got --tokens)"


@pytest.mark.parametrize("budget", ["--thinking-budget 5", "-s decode.budget.effort=low"])
def test_a_budget_without_thinking_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, budget: str
) -> None:
    rule = "a thinking budget must go with decode.thinking on (got off)"
    line = ("profile", *COMMANDS["profile"].split())
    assert refused(capsys, *line, "--thinking", "off", *budget.split()) == rule
    file = tmp_path / "robot.toml"
    file.write_text('[decode]\nthinking = "off"\n')
    assert refused(capsys, *line, "-c", str(file), *budget.split()) == rule
    file.write_text("[decode.budget]\ntokens = 5\n")
    assert refused(capsys, *line, "-c", str(file), "--thinking", "off") != rule, "for others"
    none = ("--thinking", "off", "--reasoning-effort", "none")
    assert refused(capsys, *line, *none) == "p must be a package directory (got nothing there)"


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--top-p 0.9", "decode.sampling.top_p must go with --temperature above 0 (got 0)"),
        ("--acceptance rejection", "decode.sampling.acceptance must go with --temperature above 0"),
        ("--seed 3", "decode.sampling.seed must go with --temperature above 0 (got 0)"),
        ("--temperature 0.001", "decode.sampling.temperature must be 0, or 0.01 to 100"),
        ("--temperature nan", "decode.sampling.temperature must be "),
        ("--temperature 1 --top-p 0", "decode.sampling.top_p must be above 0 and at most 1"),
        ("--temperature 1 --seed -2", "decode.sampling.seed must be -1, or 0 to 2^63 - 1"),
        ("--temperature 1 --top-k -1", "decode.sampling.top_k must be "),
    ],
)
def test_sampling_that_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], words: str, rule: str
) -> None:
    line = ("generate", *COMMANDS["generate"].split())
    assert refused(capsys, *line, *words.split()).startswith(rule)


# ---- what is checked before the package is opened; in these tests there is no package
@pytest.mark.parametrize(
    ("args", "what"),
    [
        ("check --golden none.npz", "none.npz must be a readable file"),
        ("generate --messages role.json", "messages[0].role must be one of system"),
        ("generate --prompt \udcff", "--prompt must be UTF-8"),
        ("score --tokens ids.json --out pkg/x.npz", "--out must be outside any package"),
    ],
)
def test_inputs_are_checked_before_the_package(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: str,
    what: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("role.json").write_text('[{"role": "robot", "content": "a"}]')
    Path("ids.json").write_text("[1]")
    Path("pkg").mkdir()
    Path("pkg/manifest.toml").write_text(MAGIC)
    command, *rest = args.split()
    assert refused(capsys, command, "--package", "none", *rest).startswith(what)


# ---- options that leave others without a meaning
@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("check --package p --golden g --tokens t", "--tokens"),
        ("check --package p --operators none", "--operators none"),
        ("bench --package p --ready --engine cuda", "--engine"),
        ("serve --package p --mock-cycle-ms 5", "--mock-cycle-ms"),
    ],
)
def test_an_option_that_would_mean_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], line: str, option: str
) -> None:
    assert refused(capsys, *line.split()).startswith(f"{option} must ")


NAMES = ("2026", "true", "[a]", "'it is'", "a=b", "back\\slash", "ü \udcff", "\x7f", "\t\x01\x85")


@pytest.mark.parametrize("name", NAMES)
def test_an_option_that_is_a_text_is_that_text(name: str) -> None:
    """A directory may have any name, also one that is a number in TOML."""
    words = ["serve", "--mock", "--events", name, "--prefix-dir", name, "--bind", f"ipc://{name}"]
    settings = load(None, main.overrides(parser.parse(words))).serve
    assert (settings.events, settings.prefix_dir, settings.bind) == (name, name, (f"ipc://{name}",))


@pytest.mark.parametrize(
    "args",
    [
        "X",
        "generate --package p --prompt a -s build.X=3",
        "check --package p --operators X",
    ],
)
def test_a_value_that_is_refused_does_not_rule_the_terminal(
    args: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("a\x1b[31mred\x07", "x" * 5000):
        message = refused(capsys, *(word.replace("X", value) for word in args.split()))
        assert message.isprintable()
        assert len(message) <= (400 if args.startswith("check") else 2200)


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("pln x", "plan"), ("sreve --mock", "serve"), ("gen --package p", "generate"),
        ("help", "known: "),
        ("plan x --servr y", "--server"), ("plan x --deadline=5", "--deadline-ms"),
        ("serve --mock --mock-cycle 3", "--mock-cycle-ms"),
    ],
)  # fmt: skip
def test_a_mistyped_command_or_option_is_answered_with_what_was_meant(
    line: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hint = meant if meant.startswith("known") else f"did you mean {meant}?"
    assert hint in refused(capsys, *line.split())
