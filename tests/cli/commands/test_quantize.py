"""`thor-dflash quantize` as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import GEOMETRIES, write_target

from thor_dflash.cli import main


def test_a_plan_writes_nothing_and_a_run_prints_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_target(tmp_path / "source", GEOMETRIES["27b"], 1), tmp_path / "out"
    args = ["quantize", "--target", str(source), "--out", str(out), "--preset", "all-nvfp4"]
    assert main.main([*args, "--plan"]) == 0
    planned = capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert "predicted from its bandwidth alone" in planned
    assert "may cost quality" in planned
    assert main.main(args) == 0
    made = capsys.readouterr().out
    assert f"{out}: 1 file" in made
    # All but the measured time is the same.
    assert set(planned.splitlines()) - set(made.splitlines()) <= {
        line for line in planned.splitlines() if line.startswith("arithmetic")
    }
    assert main.main(args) == 2
    assert "--out must be a new directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ((), "--out must be given"),
        (("--preset", "int4"), "quantize.preset must be"),
        (("--class", "mlp"), "quantize.classes must be"),
        (("--out", "{source}/inside"), "--out must be outside"),
    ],
)
def test_what_cannot_be_done_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], error: str
) -> None:
    source = write_target(tmp_path / "source", GEOMETRIES["27b"], 1)
    args = [part.format(source=source) for part in more]
    plan = () if not more or "--out" in more else ("--plan",)
    assert main.main(["quantize", "--target", str(source), *args, *plan]) == 2
    assert error in capsys.readouterr().err
