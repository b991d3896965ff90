"""The configuration: its defaults, files and --set; docs/configuration.md; the bounds of values."""

from __future__ import annotations

import argparse
import re
import tomllib
from dataclasses import fields
from functools import reduce
from pathlib import Path

import pytest

from thor_dflash.cli import main
from thor_dflash.cli.parser import parser
from thor_dflash.config.serving import ServeConfig
from thor_dflash.config.tree import BudgetConfig, BuildConfig, Config, keys, load
from thor_dflash.core import strict_records
from thor_dflash.core.errors import ConfigError


def test_no_file_is_the_defaults() -> None:
    assert load() == Config()


def test_file_then_overrides_and_the_last_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[build]\nkv = "fp8"\nchunk = 8\n[decode]\nignore_eos = true\n')
    config = load(path, ("build.chunk=4", "build.chunk = 5", "decode.thinking=off"))
    assert (config.build.kv, config.build.chunk) == ("fp8", 5)
    assert (config.decode.ignore_eos, config.decode.thinking) == (True, "off")


def test_a_file_is_utf_8_wherever_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes('[serve]\ncurve = "schlüssel"\n'.encode())
    assert load(path).serve.curve == "schlüssel"


@pytest.mark.parametrize("key", ["engine.cubins", "build.tensorrt.timings"])
def test_a_directory_may_lie_in_a_home_that_is_known(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # a container's user may have none

    def named(text: str) -> object:
        return reduce(getattr, f"{key}_directory".split("."), load(None, (f"{key}={text}",)))

    assert named("~/made") == tmp_path / "made"
    assert named("made") == Path("made")
    with pytest.raises(
        ConfigError, match=rf"^{key} must begin with a home that is known \(got ~no"
    ):
        named("~nobody-of-this-name/made")


def test_an_override_is_toml_or_a_bare_word() -> None:
    assert load(None, ('build.kv="bf16"',)) == load(None, ("build.kv=bf16",))
    assert load(None, ("build.capacity=1_000",)).build.capacity == 1000


PAGE = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
ROWS = re.findall(r"^\| `([a-z_.]+)` \| `(.*?)` \| (.*?) ?\|$", PAGE, re.M)


def test_the_page_has_every_key_and_its_default() -> None:
    assert [key for key, _, _ in ROWS] == list(keys())
    for key, default, _ in ROWS:
        value: object = reduce(getattr, key.split("."), Config())
        told = tomllib.loads(f"v = {default}")["v"]
        assert (tuple(told) if isinstance(told, list) else told) == value, key


def test_the_page_has_every_option_that_spells_a_key() -> None:
    (verbs,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    spelled = {
        (action.dest, option)
        for verb in verbs.choices.values()
        for action in verb._actions
        for option in action.option_strings
        if "." in action.dest
    }
    told = {(key, option) for key, _, text in ROWS for option in re.findall(r"`(--\S+)`", text)}
    assert told == spelled


def test_keys_are_all_settable() -> None:
    """Each refuses a value of a wrong type by its own rule, so --set knows it."""
    assert "build.kv" in keys()
    for key in keys():
        with pytest.raises(ConfigError, match=rf"{key}(\[0\])? must be"):
            load(None, (f"{key}=[{{}}]",))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("build.kvv=1", "unknown key build.kvv (did you mean build.kv?)"),
        ("bild.kv=1", "unknown key bild (did you mean build?)"),
        ("build.xyzzy=1", "unknown key build.xyzzy (known: build.activations, build.block, "),
        ("engine." + "x" * 500 + "y=1", "unknown key engine." + "x" * 55 + " ... xxx"),
        ("build.block=4.5", "build.block must be an integer (got 4.5)"),
        ("build.block=true", "build.block must be an integer (got true)"),
        ("build.block=1", "build.block must be 0 or >= 2 (got 1)"),
        ("build.block=-3", "build.block must be >= 0 (got -3)"),
        ("build.chunk=-1", "build.chunk must be >= 0 (got -1)"),
        ("build.chunks=[64, 0]", "build.chunks must be >= 1, each once (got [64, 0])"),
        ("build.chunks=[64, 64]", "build.chunks must be >= 1, each once (got [64, 64])"),
        ("build.widths=[8, 6]", "build.widths must be multiples of 4, each once (got [8, 6])"),
        ("build.widths=[0]", "build.widths must be multiples of 4, each once (got [0])"),
        ("build.widths=[8, 8]", "build.widths must be multiples of 4, each once (got [8, 8])"),
        ("build.capacity=-1", "build.capacity must be >= 0 (got -1)"),
        ("build.kv=int4", 'build.kv must be "auto" or "f32" or "bf16" or "fp8" (got "int4")'),
        ("build.kv=", 'build.kv must be "auto" or "f32" or "bf16" or "fp8" (got "")'),
        ("build.engine=tpu", 'build.engine must be "ort" or "cuda" or "tensorrt" (got "tpu")'),
        ("build.tensorrt.level=6", "build.tensorrt.level must be 0 to 5 (got 6)"),
        ("build.tensorrt.workspace_mib=0", "build.tensorrt.workspace_mib must be >= 1 (got 0)"),
        ("engine.threads=-1", "engine.threads must be >= 0 (got -1)"),
        ("engine.capacity=-1", "engine.capacity must be >= 0 (got -1)"),
        ("build.card.close=foo", 'build.card.close must hold </think> once (got "foo")'),
        ("build.card.close=</think></think>", "build.card.close must hold </think> once (got"),
        ("decode.max_tokens=0", "decode.max_tokens must be >= 1 (got 0)"),
        ("decode.ignore_eos=1", "decode.ignore_eos must be true or false (got 1)"),
        ("decode.drafter=true", 'decode.drafter must be "auto" or "dflash" or "none" (got true)'),
        ("decode", '--set must be section.key=value (got "decode")'),
        ("kv=fp8", '--set must be section.key=value (got "kv=fp8"); did you mean build.kv?'),
        ("capacity=9", "did you mean build.capacity or engine.capacity?"),
        ("decode.budget={tokens=5}", "--set must be of a key, not of a section (got "),
        ("build.card=3", '--set must be of a key, not of a section (got "build.card=3")'),
        ("decode.max_tokens=" + "9" * 5000, 'decode.max_tokens must be an integer (got "999'),
        ("decode.thinking=" + "[" * 5000, 'decode.thinking must be "on" or "off" (got "[[['),
        ("decode.relaxed.k=2147483648", "decode.relaxed.k must be 0 to 2147483647 (got 2147483648"),
        ("decode.relaxed.k=-1", "decode.relaxed.k must be 0 to 2147483647 (got -1)"),
        (
            "decode.relaxed.margin=1e300",
            "decode.relaxed.margin must be -1, or 0 to 2147483647 (got",
        ),
        ("serve.max_queue=0", "serve.max_queue must be 1 to 2147483647 (got 0)"),
        ("serve.max_message=1023", "serve.max_message must be 1024 to 2147483647 (got 1023)"),
        ("serve.watchdog_s=0", "serve.watchdog_s must be above 0 and at most 86400 (got 0.0)"),
        ("serve.watchdog_s=nan", "serve.watchdog_s must be above 0 and at most 86400 (got nan)"),
        ("serve.watchdog_s=1e300", "serve.watchdog_s must be above 0 and at most 86400 (got"),
        (
            "serve.yield_us=10000000",
            "serve.yield_us must be below serve.watchdog_s, 10 s (got 10000000)",
        ),
        ("serve.drain_s=-1", "serve.drain_s must be 0 to 86400 (got -1.0)"),
        ("serve.drain_s=nan", "serve.drain_s must be 0 to 86400 (got nan)"),
        ("gateway.plan_timeout_s=nan", "gateway.plan_timeout_s must be > 0 (got nan)"),
        ("build.kv.x=9", "unknown key build.kv.x (did you mean build.kv?)"),
        ("decode.max_tokens=5\n[x]", 'decode.max_tokens must be an integer (got "5\\n[x]")'),
        ("decode.budget.ratio=true", "decode.budget.ratio must be a number (got true)"),
        ("serve.bind=[]", "serve.bind must have at least one endpoint (got none)"),
        ("gateway.servers=[]", "gateway.servers must have at least one endpoint (got none)"),
    ],
)
def test_refusals_name_the_key_and_the_value(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(None, (override,))
    assert str(error.value).startswith(message) or str(error.value).endswith(message)


COUNTS = [key for key, default, _ in ROWS if re.fullmatch("-?[0-9]+", default)]


@pytest.mark.parametrize("key", COUNTS)
def test_no_count_may_be_minus_3(key: str) -> None:
    """-1 stands for something in some keys; no smaller number does."""
    with pytest.raises(ConfigError, match=rf"^{key} must be .* \(got -3\)$"):
        load(None, (f"{key}=-3",))


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("build.block", (0, 2), (-1, 1)),
        ("build.tensorrt.level", (0, 5), (-1, 6)),
        ("build.tensorrt.workspace_mib", (1,), (0,)),
        ("engine.device", (0, 2**31 - 1), (-1, 2**31)),
        ("decode.budget.tokens", (-1, 0), (-2,)),
        ("decode.budget.ratio", (1e-9, 1), (-0.1, 0, 1.001, "nan")),
        ("decode.budget.soften", (1e-9, 1), (-0.1, 0, 1.001, "nan")),
        ("decode.relaxed.margin", (-1, 0), (-1.5, -0.5, "nan")),
        ("decode.draft.window", (0,), (-1,)),
    ],
)
def test_a_number_goes_as_far_as_it_means_something(
    key: str, good: tuple[float, ...], bad: tuple[float | str, ...]
) -> None:
    for value in good:
        found: object = reduce(getattr, key.split("."), load(None, (f"{key}={value}",)))
        assert found == value
    for wrong in bad:
        with pytest.raises(ConfigError, match=rf"^{key} must be "):
            load(None, (f"{key}={wrong}",))


@pytest.mark.parametrize("good", ["", "x", "nvidia/Qwen3.6 27B (ü)", "x" * 100])
def test_a_name_is_any_that_can_be_printed(good: str) -> None:
    assert BuildConfig(name=good).name == good


@pytest.mark.parametrize("bad", ["x" * 101, "a\nb", "\x1b[2J", "\udcff", "\x00"])
def test_a_name_that_cannot_be_printed_is_refused(bad: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^build.name must be at most 100 printable char.* \(got "
    ):
        BuildConfig(name=bad)


@pytest.mark.parametrize("key", ["decode.budget.ratio", "decode.relaxed.margin", "engine.threads"])
@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("1" + "0" * 400, "1" + "0" * 76 + "..."),
        ("-9223372036854775809", "-9223372036854775809"),
        ("9223372036854775808", "9223372036854775808"),
        ("0x1" + "0" * 5000, "a number of thousands of digits"),
    ],
)
def test_a_number_that_64_bits_do_not_hold_is_refused(key: str, value: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(None, (f"{key}={value}",))
    assert str(error.value) == f"{key} must be a number of 64 bits (got {told})"


def test_a_number_in_a_json_file_that_64_bits_do_not_hold_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text('{"ratio": 1%s}' % ("0" * 400))
    with pytest.raises(ConfigError, match=r"/r.json: ratio must be a number of 64 bits \(got 1000"):
        strict_records.load(BudgetConfig, path, ConfigError)


SERVED = [f.name for f in fields(ServeConfig) if type(f.default) in (int, float)]


@pytest.mark.parametrize("key", [f"serve.{name}" for name in SERVED])
@pytest.mark.parametrize("value", ["9223372036854775807", "86400000001"])
def test_every_number_of_a_server_has_an_upper_bound(key: str, value: str) -> None:
    """A day for times, by the unit that ends the key's name; 2^31 - 1 for all others."""
    day = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000}.get(key.rpartition("_")[2])
    most = day or 2**31 - 1
    with pytest.raises(ConfigError, match=rf"^{key} must be .* {most} \(got "):
        load(None, (f"{key}={value}",))
    less = key == "serve.yield_us"  # below serve.watchdog_s, which is a day at most
    assert load(None, ("serve.watchdog_s=86400", f"{key}={most - less}"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[build\n", "must be TOML in UTF-8"),
        (b"\xff", "must be TOML in UTF-8"),
        (b"x = " + b"[" * 5000, "must be TOML (got lists nested too deep)"),
        (b"build = 3\n", "build must be a section (got 3)"),
        (b"[build]\ncapacity = '9'\n", 'build.capacity must be an integer (got "9")'),
        (b"[build]\ncapacity = 1979-05-27\n", "build.capacity must be an integer (got"),
    ],
)
def test_refuses_a_bad_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert message in str(error.value)


def test_a_file_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thor_dflash.core.strict_records.TEXT_LIMIT", 1000)
    with pytest.raises(ConfigError, match=r"^/dev/zero must be .* \(got: more than 1000 bytes\)"):
        load(Path("/dev/zero"))


def test_a_section_that_is_a_value_cannot_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("build = 3\n")
    with pytest.raises(ConfigError, match=r"build must be a section \(got 3\)"):
        load(path, ("build.kv=fp8",))


def test_refuses_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.toml"):
        with pytest.raises(ConfigError, match="must be a readable file"):
            load(path)


@pytest.mark.parametrize("line", ["plan x", "keygen d"])
@pytest.mark.parametrize("words", ["-c no.toml", "-s decode.thinking=off"])
def test_a_verb_that_reads_no_section_has_no_options_for_them(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verb = line.split()[0]
    assert main.main([*line.split(), *words.split()]) == 2
    rule = f"unrecognized arguments: {words} (see thor-dflash {verb} --help)"
    assert capsys.readouterr().err == f"thor-dflash: {rule}\n"
    with pytest.raises(SystemExit):
        main.main([verb, "--help"])
    assert "--config" not in capsys.readouterr().out
