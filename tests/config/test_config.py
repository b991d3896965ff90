"""The configuration: its defaults, files and --set; its reference page; the bounds of values."""

from __future__ import annotations

import argparse
import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest

from thor_dflash.cli.parser import parser
from thor_dflash.config import reference
from thor_dflash.config.tree import Config, fields, keys, load
from thor_dflash.core.errors import ConfigError


def value_of(key: str, config: Config) -> object:
    return reduce(getattr, key.split("."), config)


def test_file_then_overrides_and_the_last_one_counts(tmp_path: Path) -> None:
    assert load() == Config()
    path = tmp_path / "c.toml"
    path.write_bytes('[build]\nkv = "fp8"\nchunk = 8\n[serve]\ncurve = "schlüssel"\n'.encode())
    config = load(path, ("build.chunk=4", "build.chunk = 5", "decode.thinking=off"))
    assert (config.build.kv, config.build.chunk) == ("fp8", 5)
    assert (config.serve.curve, config.decode.thinking) == ("schlüssel", "off")


@pytest.mark.parametrize("key", ["engine.cubins", "build.tensorrt.timings"])
def test_a_directory_may_lie_in_a_home_that_is_known(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # a container's user may have none

    def named(text: str) -> object:
        return value_of(f"{key}_directory", load(None, (f"{key}={text}",)))

    assert named("~/made") == tmp_path / "made"
    assert named("made") == Path("made")
    with pytest.raises(ConfigError, match=rf"^{key} must .* \(got ~no"):
        named("~nobody-of-this-name/made")


# ---- reference page and options ----------------------------------------------------------------
def test_the_reference_page_is_current() -> None:
    """Otherwise: python -m thor_dflash.config.reference > docs/reference/configuration.md"""
    page = Path(__file__).parents[2] / "docs/reference/configuration.md"
    command = [sys.executable, "-m", reference.__name__]
    assert subprocess.check_output(command, text=True) == page.read_text()


def test_every_key_has_a_line_and_nearly_every_one_a_text() -> None:
    lines = [line for line in reference.page() if line.startswith("| `")]
    assert sorted(line.split("`")[1] for line in lines) == sorted(keys())
    silent = {line.split("`")[1] for line in lines if line.endswith("|  |")}
    assert silent == {f"build.card.{effort}" for effort in ("medium", "high", "x_high", "max")}


def test_every_option_of_a_key_is_in_the_page_and_has_help() -> None:
    (verbs,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    used = {
        (action.dest, option)
        for verb in verbs.choices.values()
        for action in verb._actions
        for option in action.option_strings
        if "." in action.dest
    }
    assert used == {(key, option) for key, (option, _) in reference.OPTIONS.items()}
    helps = [action.help or "" for verb in verbs.choices.values() for action in verb._actions]
    assert all(helps)
    assert not [text for text in helps if "](" in text], "a terminal shows no links"


# ---- refusals ------------------------------------------------------------------------------------
def test_every_key_is_settable_and_refuses_a_value_of_another_type() -> None:
    for key in keys():
        with pytest.raises(ConfigError, match=rf"^{key}(\[0\])? must be .* \(got "):
            load(None, (f"{key}=[{{}}]",))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("build.kvv=1", "unknown key build.kvv (did you mean build.kv?)"),
        ("bild.kv=1", "unknown key bild (did you mean build?)"),
        ("build.block=true", "build.block must be an integer (got true)"),
        ("build.widths=[8, 6]", "build.widths must "),
        ("build.kv=int4", 'build.kv must be "auto" or "f32" or "bf16" or "fp8" (got "int4")'),
        ("build.card.close=</think></think>", "build.card.close must "),
        ("decode.ignore_eos=1", "decode.ignore_eos must be true or false (got 1)"),
        ("kv=fp8", '--set must be section.key=value (got "kv=fp8")'),
        ("decode.budget={tokens=5}", "--set must be of a key, not of a section (got "),
        ("decode.max_tokens=" + "9" * 5000, 'decode.max_tokens must be an integer (got "999'),
        ("decode.budget.ratio=1" + "0" * 400, "decode.budget.ratio must be a number of 64 bits"),
        ("serve.yield_us=10000000", "serve.yield_us must be below serve.watchdog_s, 10 s "),
    ],
)
def test_refusals_name_the_key_and_the_value(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(None, (override,))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("build.block", (0, 2), (-1, 1)),
        ("build.chunks", ("[1]",), ("[0]",)),
        ("engine.device", (0, 2**31 - 1), (-1, 2**31, "0x1" + "0" * 5000)),
        ("decode.max_tokens", (1,), (0,)),
        ("decode.budget.ratio", (1e-9, 1), (-0.1, 0, 1.001, "nan")),
        ("decode.relaxed.margin", (-1, 0), (-1.5, -0.5, "nan", 1e300)),
        ("serve.watchdog_s", (0.1, 86400), (0, "nan", "inf", 86401)),
        ("gateway.plan_timeout_s", (0.1,), (0, "nan")),
    ],
)
def test_a_number_has_bounds(
    key: str, good: tuple[float | str, ...], bad: tuple[float | str, ...]
) -> None:
    for value in good:
        load(None, (f"{key}={value}",))
    for wrong in bad:
        with pytest.raises(ConfigError, match=rf"^{key}(\[0\])? must be "):
            load(None, (f"{key}={wrong}",))


def test_no_integer_may_be_minus_3_or_more_than_32_bits_or_a_day_in_microseconds() -> None:
    integers = [key for key, _ in fields() if type(value_of(key, Config())) is int]
    integers.remove("decode.sampling.seed")  # of 63 bits
    assert len(integers) > 25
    for key in integers:
        for value in (-3, 86_400_000_001):
            with pytest.raises(ConfigError, match=rf"^{key} must be .* \(got {value}\)$"):
                load(None, (f"{key}={value}",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[build\n", "must be TOML in UTF-8"),
        (b"x = " + b"[" * 5000, "must be TOML in UTF-8"),
        (b"build = 3\n", "build must be a section (got 3)"),
        (b"[build]\ncapacity = '9'\n", 'build.capacity must be an integer (got "9")'),
    ],
)
def test_refuses_a_bad_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(content)
    for overrides in ((), ("build.kv=fp8",)):
        with pytest.raises(ConfigError) as error:
            load(path, overrides)
        assert message in str(error.value)


def test_a_file_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thor_dflash.core.strict_records.TEXT_LIMIT", 1000)
    with pytest.raises(ConfigError, match=r"^/dev/zero must be .* \(got: more than 1000 bytes\)"):
        load(Path("/dev/zero"))
