"""`thor-dflash build`: what it refuses before any work, and its notes on a checkpoint without a
tokenizer, a chat template or stop ids.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.samples import MANIFEST

from thor_dflash.builders import build as builder
from thor_dflash.builders.build import make_plan
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.cli import main
from thor_dflash.config.build import BLOCK, CAPACITY, BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import CheckpointError, ConfigError, PackageError
from thor_dflash.core.model_dims import MIN_CONVERSATION
from thor_dflash.core.progress import Silent
from thor_dflash.package import manifest
from thor_dflash.package.tokenizer_files import addressed_ids
from thor_dflash.runtime.session import session

NANO = Path(__file__).parents[3] / "models/planner-nano/target"
TEMPLATE = "chat_template.jinja"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A copy of planner-nano's target, whose weights are links to the original file."""
    (tmp_path / "target").mkdir()
    for path in NANO.iterdir():
        if path.suffix == ".safetensors":
            (tmp_path / "target" / path.name).symlink_to(path)
        else:
            shutil.copy(path, tmp_path / "target")
    return tmp_path / "target"


def build(target: Path, *more: str) -> int:
    out = str(target.parent / "package")
    return main.main(["build", "--target", str(target), "--out", out, *more])


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (TEMPLATE, b"{% for", "must be valid jinja"),
        ("tokenizer.json", b"{}", "tokenizer.json must be a tokenizer"),
    ],
)  # fmt: skip
def test_a_tokenizer_or_template_that_no_session_can_use_is_refused_before_the_build_begins(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    name: str, content: bytes, expected: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(builder, "build", lambda *a: pytest.fail("built"))
    (target / name).write_bytes(content)
    assert build(target) == 2
    line = capsys.readouterr().err.strip()
    assert expected in line.replace('"', "'")
    assert line.count("\n") == 0
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_a_package_with_a_template_of_no_use_is_refused_before_its_weights_are_read(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (target / TEMPLATE).write_text("{% for")
    out = target.parent / "package"
    builder.build(target, None, out, BuildConfig(capacity=128), Silent())
    monkeypatch.setattr(session, "_ENGINES", {"ort": lambda *a: pytest.fail("weights are read")})
    with pytest.raises(PackageError, match="must be valid jinja"):
        session.open_session(out, EngineConfig(), Silent())


def test_a_setting_on_the_command_line_that_no_part_of_the_package_reads_is_refused(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "build", lambda *a: pytest.fail("built"))
    assert build(target, "-s", "build.draft_ids=ids.json") == 2
    assert "build.draft_ids must go with --drafter (got none)" in capsys.readouterr().err


LONGEST = read_target(NANO).dims.max_position


@pytest.mark.parametrize(
    ("key", "most", "more"),
    [
        ("chunk", LONGEST, LONGEST + 1),
        ("chunks", (LONGEST,), (LONGEST + 1,)),
        ("capacity", LONGEST, LONGEST + 1),
        ("widths", (12,), (16,)),
    ],
)
def test_a_size_is_taken_up_to_its_bound(key: str, most: object, more: object) -> None:
    make_plan(read_target(NANO), None, BuildConfig(**{key: most}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"^build\.{key} must be .* \(got "):
        make_plan(read_target(NANO), None, BuildConfig(**{key: more}))  # type: ignore[arg-type]


def test_the_shortest_context_and_the_default_one() -> None:
    whole = read_target(NANO)
    assert make_plan(whole, None, BuildConfig(capacity=BLOCK + MIN_CONVERSATION)).capacity == 18
    longer = replace(whole, dims=replace(whole.dims, max_position=2 * CAPACITY))
    assert make_plan(longer, None, BuildConfig()).capacity == CAPACITY


def test_prefill_steps_are_of_sizes_that_the_model_has_and_of_each_once() -> None:
    whole = read_target(NANO)
    short = replace(whole, dims=replace(whole.dims, max_position=100))
    config = BuildConfig(engine="cuda", chunk=64)
    assert make_plan(whole, None, config).chunks == (256, 128, 32)
    assert make_plan(short, None, config).chunks == (32,)
    short = replace(whole, dims=replace(whole.dims, max_position=128))
    assert make_plan(short, None, config).chunks == (128, 32)
    assert make_plan(short, None, BuildConfig(engine="cuda")).shape.chunk == 128
    assert make_plan(whole, None, replace(config, chunks=(64, 128))).chunks == (128,)


def test_eight_stop_ids_below_the_vocabulary_are_taken(target: Path) -> None:
    def stop(*ids: int) -> tuple[int, ...]:
        (target / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        return builder.describe(make_plan(read_target(target), None, BuildConfig())).stop_tokens

    vocab = addressed_ids(target)
    assert vocab < read_target(target).dims.vocab
    own = set(stop(0)) - {0}  # the tokenizer's eos_token
    assert len(own) == 1
    assert set(stop(*range(6), vocab - 1)) == {*range(6), vocab - 1, *own}
    with pytest.raises(CheckpointError, match=rf"must be below {vocab} \(got {vocab}\)"):
        stop(vocab)


def test_a_package_is_replaced_only_with_force_which_says_what_it_was(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []

    def pretend(source: Path, drafter: None, out: Path, *_: object) -> manifest.Manifest:
        built.append(out)
        return MANIFEST

    monkeypatch.setattr(builder, "build", pretend)
    assert build(target) == 0
    assert build(target, "--force") == 0, "a force that is not needed is accepted"
    assert "\nreplaced " not in capsys.readouterr().out
    (out := target.parent / "package").mkdir()
    (out / manifest.NAME).write_text(manifest.render(replace(MANIFEST, name="arm")))
    assert build(target) == 2
    assert "--force" in capsys.readouterr().err
    assert len(built) == 2
    assert build(target, "--force") == 0
    replaced = f"replaced {out}, a package of arm of {MANIFEST.created}: "
    assert replaced in capsys.readouterr().out
    (out / manifest.NAME).write_text(manifest.MAGIC)  # damaged
    assert build(target) == 2
    assert build(target, "--force") == 0
    assert f"replaced {out}, a package of another version or a damaged one" in (
        capsys.readouterr().out
    )
