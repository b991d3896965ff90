"""Options and --set: what a verb accepts, and what it refuses instead of ignoring it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from support.samples import MANIFEST

from thor_dflash.cli import main, parser
from thor_dflash.config.tree import keys, load
from thor_dflash.package.manifest import MAGIC, render

VERBS = {
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
READERS = [verb for verb in VERBS if verb not in ("plan", "keygen")]  # of the configuration


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Run a command that must exit with 2, and return its one line on stderr."""
    assert main.main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.removeprefix("thor-dflash: ").rstrip()


# ---- sections


@pytest.mark.parametrize(
    ("verb", "item", "reads"),
    [
        ("serve", "decode.gate=on", "engine, serve"),
        ("serve", "decode.max_tokens=5", "engine, serve"),
        ("generate", "build.capacity=5", "engine, decode"),
        ("build", "engine.threads=1", "build"),
        ("score", "decode.accept=relaxed", "engine"),
    ],
)
def test_a_verb_refuses_a_setting_it_does_not_read(
    capsys: pytest.CaptureFixture[str], verb: str, item: str, reads: str
) -> None:
    key = item.partition("=")[0]
    assert refused(capsys, verb, *VERBS[verb].split(), "-s", item) == (
        f"{key} must be a setting of {verb} (got --set {item}; {verb} reads {reads})"
    )


def test_a_file_may_hold_sections_of_other_verbs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "all.toml").write_text("[decode]\ngate = 'on'\n[build]\ncapacity = 5\n")
    args = ("--package", str(tmp_path / "none"), "-c", str(tmp_path / "all.toml"))
    assert "must be a package directory (got nothing" in refused(capsys, "check", *args)


@pytest.mark.parametrize(
    ("item", "readers"), [("engine.device=1", "cuda or tensorrt"), ("engine.threads=1", "ort")]
)
@pytest.mark.parametrize("verb", ["generate", "profile", "score", "check", "serve", "bench"])
def test_a_setting_that_the_engine_of_the_package_does_not_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, item: str, readers: str
) -> None:
    made = replace(MANIFEST, engine="cuda" if readers == "ort" else "ort")
    (tmp_path / "manifest.toml").write_text(render(made))
    words = [str(tmp_path) if word == "p" else word for word in VERBS[verb].split()]
    rule = f"must go with engine {readers} (got {made.engine})"
    assert refused(capsys, verb, *words, "-s", item) == f"{item.partition('=')[0]} {rule}"


@pytest.mark.parametrize("other", ["ort", "cuda"])
def test_a_setting_for_the_reference_alone_is_taken(
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
    said = capsys.readouterr().err
    assert ("engine.graphs must go with engine" in said) == (other == "ort"), said


def test_every_option_of_a_verb_is_of_a_section_it_reads() -> None:
    sections = {key.partition(".")[0] for key in keys()}
    for verb, least in VERBS.items():
        args = parser.parser().parse_args([verb, *least.split()])
        assert {dest.partition(".")[0] for dest in vars(args) if "." in dest} <= set(args.reads)
        assert set(args.reads) <= sections


# ---- options


@pytest.mark.parametrize("verb", READERS)
def test_an_option_of_one_value_is_given_once(
    capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    least = VERBS[verb].split()
    assert refused(capsys, verb, *least, "-c", "a.toml", "--config", "b.toml") == (
        "-c/--config must be given once (got a.toml and b.toml)"
    )


@pytest.mark.parametrize(
    "args",
    [
        "generate --package p --prompt a --max-tokens 3 --max-tokens 3",
        "generate --package p --package p --prompt a",
        "check --package p --operators auto --operators all",
        "serve --mock --mock-cycle-ms 0 --mock-cycle-ms 1 --bind no://where",
        "plan a --deadline-ms 5 --deadline-ms 6 --server no://where",
    ],
)
def test_a_second_value_does_not_win(capsys: pytest.CaptureFixture[str], args: str) -> None:
    assert "must be given once (got" in refused(capsys, *args.split())


def test_a_key_is_the_same_with_spaces_around_it(capsys: pytest.CaptureFixture[str]) -> None:
    for item in ("build.chunk = 8", " build.chunk=8"):
        said = refused(capsys, "build", *VERBS["build"].split(), "-s", item, "-s", "build.chunk=4")
        assert said == "build.chunk must be given once (got --set 2 times)"


def test_a_text_that_begins_like_an_option_is_a_text() -> None:
    line = ["generate", "--package", "p", "--prompt", "--no robot may move"]
    assert parser.parse(line).prompt == "--no robot may move"
    assert parser.parse(["plan", "--", "--stop"]).prompt == "--stop"


def test_an_option_is_written_out_also_where_its_value_has_a_space(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = refused(capsys, "generate", "--package", "p", "--prompt", "a", "--sche=b c")
    assert said.startswith("unrecognized arguments: --sche=b c")


# ---- values


@pytest.mark.parametrize("wrong", ["-1", "nan", "inf"])
def test_a_tolerance_is_a_number_of_at_least_0(
    wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "check", "--package", "p", f"--tolerance={wrong}")
    assert "--tolerance must be a finite number of at least 0 (got" in said
    said = refused(capsys, "check", "--package", "p", "--tolerance=0")
    assert said == "--tolerance must go with --reference or --golden (got neither)"


def test_a_tolerance_of_logits_that_nobody_compares_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert refused(capsys, "check", "--package", "p", "--tolerance", "0.5") == (
        "--tolerance must go with --reference or --golden (got neither)"
    )


def test_a_reference_without_a_name_is_not_none(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "check", "--package", "p", "--reference", "")
    assert said == "--reference must be a package or ort (got an empty name)"


@pytest.mark.parametrize("verb", VERBS)
def test_a_path_without_a_name_is_not_the_working_directory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    least = ["" if word in ("p", "d", "o") else word for word in VERBS[verb].split()]
    line = least if "" in least else [*least, "-c" if verb in READERS else "--keys", ""]
    assert "must be a path (got an empty name)" in refused(capsys, verb, *line)
    assert list(tmp_path.iterdir()) == []


def test_keys_without_a_name_are_not_no_keys(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "plan", "a", "--keys", "", "--server", "no://where")
    assert said.startswith("argument --keys: must be a path (got an empty name)")


@pytest.mark.parametrize("verb", ["generate", "profile"])
@pytest.mark.parametrize("how", ["--thinking=off", "-sdecode.thinking=off"])
def test_ids_have_no_template_to_tell_of_thinking(
    capsys: pytest.CaptureFixture[str], verb: str, how: str
) -> None:
    said = refused(capsys, verb, "--package", "p", "--tokens", "t", how)
    assert said == "--thinking must go with --prompt or --messages (got --tokens)"


@pytest.mark.parametrize("verb", ["generate", "profile"])
@pytest.mark.parametrize(
    "budget", ["--thinking-budget 5", "--reasoning-effort low", "-s decode.budget.tokens=0"]
)
def test_a_budget_without_thinking_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str, budget: str
) -> None:
    said = "a thinking budget must go with decode.thinking on (got off)"
    line = (verb, *VERBS[verb].split())
    for off in ("--thinking off", "-s decode.thinking=off"):
        assert refused(capsys, *line, *off.split(), *budget.split()) == said
    file = tmp_path / "robot.toml"
    file.write_text('[decode]\nthinking = "off"\n')
    assert refused(capsys, *line, "-c", str(file), *budget.split()) == said
    file.write_text("[decode.budget]\ntokens = 5\n")
    assert refused(capsys, *line, "-c", str(file), "--thinking", "off") != said, "for others"
    none = ("--thinking", "off", "--reasoning-effort", "none")
    assert refused(capsys, *line, *none) == "p must be a package directory (got nothing there)"


def test_a_check_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "check", "--package", "p", "--operators", "none") == (
        "--operators none must go with --reference or --golden (got neither)"
    )


@pytest.mark.parametrize("wrong", ["-5", "nan", "inf", "1e300", "86400001"])
def test_a_mock_s_cycle_is_0_to_a_day(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "serve", "--mock", f"--mock-cycle-ms={wrong}", "--bind", "no://where")
    assert said.startswith("--mock-cycle-ms must be 0 to 86400000 (got")


@pytest.mark.parametrize("good", ["0", "86400000"])
def test_a_mock_s_cycle_may_be_0_or_a_day(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "serve", "--mock", f"--mock-cycle-ms={good}", "--bind", "no://where")
    assert said.startswith("serve.bind must be")


@pytest.mark.parametrize("wrong", ["-5", "0"])
def test_a_deadline_is_at_least_1(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "plan", "x", "--server", "no://where", f"--deadline-ms={wrong}")
    assert said == f"--deadline-ms must be an integer >= 1 (got {wrong})"


# ---- what is checked before the package is opened; in these tests there is no package


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("check --golden none.npz", "none.npz must be a readable file (got: No such file"),
        ("check --golden g.npz --tokens t", "--tokens must go without --golden"),
        ("generate --messages role.json", "messages[0].role must be one of system"),
        ("generate --messages half.json", "messages[0].content must be UTF-8 (got: surrogates"),
        ("generate --prompt \udcff", "--prompt must be UTF-8 (got: surrogates not allowed at 0)"),
        ("score --tokens ids.json --out pkg/x.npz", "--out must be outside any package (got pkg/"),
        ("check --make-golden pkg/x.npz", "--make-golden must be outside any package (got pkg/x."),
        ("score --tokens ids.json --out /proc/x.npz", "/proc/x.npz must be writable (got: "),
        ("check --make-golden /proc/x.npz", "/proc/x.npz must be writable (got: "),
    ],
)
def test_inputs_are_looked_at_before_the_package(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("role.json").write_text('[{"role": "robot", "content": "a"}]')
    Path("half.json").write_text('[{"role": "user", "content": "\\ud800"}]')
    Path("ids.json").write_text("[1]")
    Path("pkg").mkdir()
    Path("pkg/manifest.toml").write_text(MAGIC)
    verb, *rest = args.split()
    assert refused(capsys, verb, "--package", "none", *rest).startswith(message)


# ---- options that leave others without a meaning


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("check --package p --golden g --tokens t", "--tokens must go without --golden"),
        ("check --package p --make-golden g.npz --tolerance 0", "--tolerance must go without --m"),
        ("check --package p --make-golden g.npz --json", "--json must go without --make-golden"),
        ("check --package p --make-golden g.npz --operators all", "--operators must go without"),
        ("bench --package p --ready --quick", "--quick must go without --package"),
        ("bench --package p --ready --engine cuda", "--engine must go without --package"),
        ("bench --package p --ready --random-weights", "--random-weights must go without --p"),
        ("bench --package p --ready --out d", "--out must go without --package"),
        ("bench --shape s --random-weights --ready --out d --quick", "--quick must go without --r"),
        ("serve --package p --mock-cycle-ms 5", "--mock-cycle-ms must go without --package"),
        (
            "bench --package p --ready -s build.chunk=8",
            "build.chunk must be a setting of bench --package "
            "(got --set build.chunk=8; bench --package reads engine)",
        ),
        (
            "serve --mock -s engine.device=1",
            "engine.device must be a setting of serve --mock "
            "(got --set engine.device=1; serve --mock reads serve)",
        ),
        (
            "demo -s engine.device=1",
            "engine.device must go with engine cuda or tensorrt (got ort)",
        ),
        (
            "serve --mock --bind no://where --yield-us 5",
            "serve.yield_us must go without --mock (got both)",
        ),
        (
            "serve --mock --bind no://where -s serve.yield_us=0",
            "serve.yield_us must go without --mock (got both)",
        ),
        (
            "serve --mock --bind no://where -s serve.cancel_ms=9",
            "serve.cancel_ms must go without --mock (got both)",
        ),
        (
            "serve --mock --bind no://where -s serve.prefix_mb=9",
            "serve.prefix_mb must go without --mock (got both)",
        ),
    ],
)
def test_an_option_that_would_mean_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert refused(capsys, *line.split()).startswith(message)


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
        "generate --package p --prompt a -s engine.X=3",
        "generate --package p --prompt a -c X",
        "generate --package X --prompt a",
        "check --package p --operators X",
        "bench --shape X --random-weights",
        "gateway --listen X",
        "plan a --server X",
    ],
)
def test_a_value_that_is_refused_does_not_rule_the_terminal(
    args: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("a\x1b[31mred\x07", "x" * 5000):
        told = refused(capsys, *(word.replace("X", value) for word in args.split()))
        assert len(told) <= (400 if args.startswith("check") else 2200)
        assert told.isprintable(), told
