"""Memory does not grow with the model: full-size checkpoints of holes, which need no disk."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import PREFIXES, write_config, write_hollow

from thor_dflash.builders.checkpoint.shards import read_header
from thor_dflash.builders.checkpoint.target import target_layout
from thor_dflash.builders.synthetic import QWEN36_27B
from thor_dflash.calib.quantize.quantize import MOST_PROCESSES
from thor_dflash.calib.synthetic.shapes import target_config

pytestmark = pytest.mark.slow
MEASURED = f"""
PROCESSES = {MOST_PROCESSES}
import pathlib, re, resource, sys
from thor_dflash.cli.main import main
status = main(sys.argv[1:])
own = int(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])
others = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(own + PROCESSES * others << 10)
sys.exit(status)
"""
"""A process's ru_maxrss begins with that of the process that started it: with pytest's."""


def hollow(directory: Path, layers: int) -> Path:
    """A 27B with fewer layers. Each matrix has one number that is not zero, so that none is left
    out.
    """
    directory.mkdir()
    dims = replace(QWEN36_27B, layers=QWEN36_27B.layers[:layers])
    layout = target_layout(dims)
    write_config(directory, target_config(dims))
    shapes = {f"{PREFIXES[0]}{n}": shape for n, shape in layout.tensors.items()}
    shapes |= {
        f"{'' if n == 'lm_head' else PREFIXES[0]}{n}.weight": shape
        for n, shape in layout.matrices.items()
    }
    path = directory / "model.safetensors"
    write_hollow(path, shapes)
    with path.open("r+b") as file:
        for entry in read_header(path).values():
            file.seek(entry.begin)
            file.write(b"\x80\x3f")  # 1.0 in bf16
    return directory


def peak(*arguments: str | Path) -> int:
    """Run a command; return its resident memory at the most, bytes: that of the largest of its
    processes counts for as many as a machine can have.
    """
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, arguments)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_quantising_ten_gigabytes_needs_less_than_one(tmp_path: Path, method: str) -> None:
    source = hollow(tmp_path / "bf16", 8 if method == "rtn" else 4)
    size = (source / "model.safetensors").stat().st_size
    assert size > (10e9 if method == "rtn" else 8e9)
    classes = ("--class", "head=keep") if method == "mse" else ()  # the search takes a minute
    out = tmp_path / "out"
    most = peak("quantize", "--target", source, "--out", out, "--method", method, *classes)
    assert most < 1e9, f"{most / 1e6:.0f} MB"


def test_calibrating_a_large_model_needs_less_than_six_gigabytes(tmp_path: Path) -> None:
    source = hollow(tmp_path / "bf16", 4)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"tokens": [1, 2, 3]}')
    out = tmp_path / "s.safetensors"
    most = peak("calibrate", "--target", source, "--prompts", prompts, "--out", out)
    assert most < 6e9, f"{most / 1e6:.0f} MB"
