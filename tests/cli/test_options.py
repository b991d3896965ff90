"""Options and --set: what a command accepts, and what it refuses instead of ignoring it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from support.samples import MANIFEST

from thor_dflash.cli import main, parser
from thor_dflash.config.tree import keys, load
from thor_dflash.core.errors import ConfigError
from thor_dflash.package.manifest import MAGIC, render

COMMANDS = {
    "build": "--target t --out o",
    "generate": "--package p --prompt a",
    "profile": "--package p --prompt a",
    "score": "--package p --tokens t --out x.npz",
    "check": "--package p",
    "doctor": "",
    "demo": "",
    "bench": "--package p",
    "serve": "--package p",
    "plan": "a",
    "gateway": "",
    "keygen": "d",
}
"""Verb -> the least that it must be given."""
READERS = [
    command for command in COMMANDS if command not in ("plan", "keygen")
]  # of the configuration


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
        ("generate --package p --prompt a -s build.capacity=5", "build.capacity"),
        ("score --package p --tokens t --out x.npz -s decode.accept=relaxed", "decode.accept"),
        ("bench --package p --ready -s build.chunk=8", "build.chunk"),
        ("serve --mock -s engine.device=1", "engine.device"),
        ("demo -s engine.device=1", "engine.device"),
        ("demo -s build.tensorrt.level=1", "build.tensorrt.level"),
        ("serve --mock --bind no://where --yield-us 5", "serve.yield_us"),
        ("serve --mock --bind no://where -s serve.prefix_mb=9", "serve.prefix_mb"),
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
        ("check", "engine.cubins=d", "cuda or tensorrt"),
        ("serve", "engine.threads=1", "ort"),
        ("bench", "engine.threads=1", "ort"),
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


@pytest.mark.parametrize("other", ["ort", "cuda"])
def test_a_setting_for_the_reference_alone_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    engines: tuple[Literal["ort", "cuda"], ...] = ("ort", "cuda")
    for engine in engines:
        (tmp_path / engine).mkdir()
        made = replace(MANIFEST, engine=engine)
        (tmp_path / engine / "manifest.toml").write_text(render(made))
    reference = other if other == "ort" else str(tmp_path / other)
    line = ("check", "--package", str(tmp_path / "ort"), "-s", "engine.graphs=false")
    assert main.main([*line, "--reference", reference]) == 2
    message = capsys.readouterr().err
    assert ("engine.graphs must go with engine" in message) == (other == "ort"), message


def test_every_option_of_a_command_is_of_a_section_it_reads() -> None:
    sections = {key.partition(".")[0] for key in keys()}
    for command, least in COMMANDS.items():
        args = parser.parser().parse_args([command, *least.split()])
        assert {dest.partition(".")[0] for dest in vars(args) if "." in dest} <= set(args.reads)
        assert set(args.reads) <= sections


# ---- options
@pytest.mark.parametrize(
    "args",
    [
        "score --package p --tokens t --out x.npz -c a.toml --config b.toml",
        "generate --package p --prompt a --max-tokens 3 --max-tokens 3",
        "generate --package p --prompt a --thinking off -s decode.thinking=on",
        "check --package p --operators auto --operators all",
        "serve --mock --mock-cycle-ms 0 --mock-cycle-ms 1 --bind no://where",
        "build --target t --out o -s build.chunk=8 -s build.chunk=4",
    ],
)
def test_a_second_value_does_not_win(capsys: pytest.CaptureFixture[str], args: str) -> None:
    assert "must be given once (got" in refused(capsys, *args.split())


def test_a_key_is_the_same_with_spaces_around_it(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("build", *COMMANDS["build"].split(), "-s", " build.chunk = 8", "-s", "build.chunk=4")
    assert refused(capsys, *line) == "build.chunk must be given once (got --set 2 times)"


def test_a_text_that_begins_like_an_option_is_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", "--package", "p", "--prompt", "--no robot may move"]
    assert parser.parse(line).prompt == "--no robot may move"
    assert parser.parse(["plan", "--", "--stop"]).prompt == "--stop"
    assert refused(capsys, *line[:3], "--prompt", "a", "--sche=b c").startswith("unrecognized")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_without_a_name_is_not_the_working_directory(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    least = ["" if word in ("p", "d", "o") else word for word in COMMANDS[command].split()]
    line = least if "" in least else [*least, "-c" if command in READERS else "--keys", ""]
    assert "must be a path (got an empty name)" in refused(capsys, command, *line)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        "gateway --keys",
        "serve --mock --curve",
        "serve --mock --events",
        "serve --mock --prefix-dir",
    ],
)
def test_an_empty_name_switches_nothing_off(line: str) -> None:
    """As from a variable that is not set."""
    with pytest.raises(ConfigError, match=rf"^argument {line.split()[-1]}: must be a path "):
        parser.parser().parse_args([*line.split(), ""])


@pytest.mark.parametrize("how", ["--thinking=off", "-sdecode.thinking=off"])
def test_ids_have_no_template_that_turns_thinking_off(
    capsys: pytest.CaptureFixture[str], how: str
) -> None:
    message = refused(capsys, "generate", "--package", "p", "--tokens", "t", how)
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
    ("line", "good", "bad"),
    [
        ("check --package p --golden none --tolerance", (0, 0.5), (-1, "nan", "inf")),
        ("serve --mock --bind no://where --mock-cycle-ms", (0, 86_400_000), (-5, "nan", 1e300)),
        ("plan x --server no://where --deadline-ms", (1, 86_400_000), (-5, 0)),
    ],
)
def test_a_number_has_bounds(
    capsys: pytest.CaptureFixture[str], line: str, good: tuple[float, ...],
    bad: tuple[float | str, ...],
) -> None:  # fmt: skip
    for value in (*good, *bad):
        message = refused(capsys, *f"{line}={value}".split())
        assert message.startswith(f"{line.split()[-1]} must be ") is (value in bad)


# ---- what is checked before the package is opened; in these tests there is no package
@pytest.mark.parametrize(
    ("args", "what"),
    [
        ("check --golden none.npz", "none.npz must be a readable file"),
        ("generate --messages role.json", "messages[0].role must be one of system"),
        ("generate --messages half.json", "messages[0].content must be UTF-8"),
        ("generate --prompt \udcff", "--prompt must be UTF-8"),
        ("score --tokens ids.json --out pkg/x.npz", "--out must be outside any package"),
        ("check --make-golden pkg/x.npz", "--make-golden must be outside any package"),
        ("score --tokens ids.json --out /proc/x.npz", "/proc/x.npz must be writable"),
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
    Path("half.json").write_text('[{"role": "user", "content": "\\ud800"}]')
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
        ("check --package p --make-golden g.npz --tolerance 0", "--tolerance"),
        ("check --package p --make-golden g.npz --operators all", "--operators"),
        ("check --package p --operators none", "--operators none"),
        ("check --package p --tolerance 0.5", "--tolerance"),
        ("check --package p --reference=", "--reference"),
        ("bench --package p --ready --engine cuda", "--engine"),
        ("bench --shape s --random-weights --ready --out d --quick", "--quick"),
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
        "generate --X",
        "generate --package p --prompt X --prompt b",
        "generate --package p --prompt a -s build.X=3",
        "generate --package p --prompt a -c X",
        "check --package p --operators X",
        "plan a --server X",
    ],
)
def test_a_value_that_is_refused_does_not_rule_the_terminal(
    args: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("a\x1b[31mred\x07", "x" * 5000):
        message = refused(capsys, *(word.replace("X", value) for word in args.split()))
        assert message.isprintable()
        assert len(message) <= (400 if args.startswith("check") else 2200)
