"""`check`: engines and weight types for which it works, and what it needs a reference for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import GEOMETRIES, write_target
from support.loop_models import session

from thor_dflash.builders.build import build
from thor_dflash.calib.check import compare as judging
from thor_dflash.calib.check.compare import compare, tracer
from thor_dflash.cli import main
from thor_dflash.config.build import BuildConfig
from thor_dflash.core.progress import Silent
from thor_dflash.package import manifest
from thor_dflash.runtime.session import Session, open_session


def test_weights_of_any_float_type_are_walked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The type matters, as the embedding gives rows of the table's own type."""
    target = write_target(tmp_path / "target", GEOMETRIES["0.8b"], 3, "f16")
    build(target, None, tmp_path / "p", BuildConfig(capacity=64), Silent())
    args = ["check", "--package", str(tmp_path / "p"), "-s", "engine.threads=1"]
    assert main.main(args) == 0, capsys.readouterr()


def built(path: Path, **options: Any) -> str:
    """Builds a small package without a drafter, of the same checkpoint each time; its directory."""
    target = path.parent / "target"
    if not target.exists():
        write_target(target, GEOMETRIES["0.8b"], 3, "bf16")
    build(target, None, path, replace(BuildConfig(capacity=64, chunk=32), **options), Silent())
    return str(path)


@pytest.mark.parametrize(("widths", "block"), [((8,), 8), ((4,), 16)])
@pytest.mark.slow
def test_a_reference_has_its_own_steps_and_the_block_if_it_has_that(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    widths: tuple[int, ...],
    block: int,
) -> None:
    opened: list[Session] = []

    def recorded(*of: Any, **more: Any) -> Session:
        opened.append(open_session(*of, **more))
        return opened[-1]

    monkeypatch.setattr("thor_dflash.runtime.session.open_session", recorded)
    one = built(tmp_path / "one", widths=(8,))
    two = built(tmp_path / "two", widths=widths, chunk=64)
    words = ["-s", "engine.block=8", "-s", "engine.chunk=32", "-s", "engine.threads=1"]
    assert main.main(["check", "--package", one, "--reference", two, *words]) == 0
    assert "the same within tolerance" in capsys.readouterr().out
    assert [(s.model.block, s.model.chunk) for s in opened] == [(8, 32), (block, 64)]


def test_a_reference_that_cannot_be_one_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = built(tmp_path / "one"), tmp_path / "of another checkpoint"
    target = write_target(tmp_path / "another", GEOMETRIES["27b"], 3, "bf16")
    build(target, None, other, BuildConfig(capacity=64, chunk=32), Silent())
    bare = tmp_path / "bare"  # as of engine cuda, which has no graphs
    bare.mkdir()
    found = manifest.read(Path(one))
    files = {name: entry for name, entry in found.files.items() if name != "verify.onnx"}
    (bare / manifest.NAME).write_text(manifest.render(replace(found, files=files)))
    monkeypatch.setattr(
        "thor_dflash.runtime.session.open_session", lambda *of, **more: pytest.fail("loaded")
    )
    for package, reference, expected in (
        (one, str(tmp_path / "none"), "none must be a package directory (got nothing there)"),
        (one, str(other), f"{other} must be made of the target of the package"),
        (str(bare), "ort", "--reference ort must be for a package that holds ONNX graphs"),
    ):
        assert main.main(["check", "--package", package, "--reference", reference]) == 2
        assert expected in capsys.readouterr().err


@pytest.mark.slow
def test_tokens_that_do_not_fit_are_refused_before_any_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With no reference nothing is scored, and a verify past the end of the cache would write into
    whatever is there.
    """
    s = session()
    path = tmp_path / "ids.json"
    package = str(s.model.engine.package)  # type: ignore[attr-defined]
    for count, code in ((s.model.limit, 0), (s.model.limit + 1, 2)):
        path.write_text(json.dumps([1] * count))
        args = ["check", "--package", package, "--tokens", str(path), "-s", "engine.threads=1"]
        assert main.main(args) == code
    assert f"tokens must be at most {s.model.limit}" in capsys.readouterr().err


@pytest.mark.parametrize(("tokens", "blocks"), [(16, [0]), (48, [0, 2])])
def test_the_first_block_and_the_last_are_walked(
    monkeypatch: pytest.MonkeyPatch, tokens: int, blocks: list[int]
) -> None:
    s = session()
    assert s.model.block == 16
    places: list[tuple[str, int]] = []
    monkeypatch.setattr(judging, "_walked", lambda *of: places.extend(of[4]) or [])
    show = tracer(s, Path(s.model.engine.package))  # type: ignore[attr-defined]
    compare(s, show, None, (1,) * tokens, "all", None, Silent())
    assert [at for graph, at in places if graph == "verify"] == blocks
