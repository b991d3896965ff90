"""The directory of compiled kernels: whatever its state, an engine starts or reports why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stand_ins.fake_driver import OK, FakeCuda, fake

from thor_dflash.core.errors import EngineError
from thor_dflash.plugins.cuda import compile as compiler
from thor_dflash.plugins.cuda import kernel_cache
from thor_dflash.plugins.cuda.compile import ROOT, Cubin
from thor_dflash.plugins.cuda.driver import DriverCalls
from thor_dflash.plugins.cuda.kernel_cache import Kernels
from thor_dflash.plugins.launch import H100, Launch

SOURCE = ROOT / "cuda" / "bandwidth.cu"
LAUNCH = Launch("read_memory", (1, 1, 1), 512, ())
WHOLE = b"\x7fELF"
"""First bytes of a cubin."""


def status(code: str) -> Any:
    return type("Status", (int,), {"name": code})(200)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A fake device that loads only images that begin like a cubin. Kernels really are compiled."""
    made = fake(monkeypatch)

    def take(image: bytes) -> Any:
        return (OK, "module") if image.startswith(WHOLE) else (status("CUDA_ERROR_INVALID_IMAGE"),)

    monkeypatch.setattr(made, "cuModuleLoadData", take)
    monkeypatch.setattr(made, "cuGetErrorString", lambda _: (0, b"invalid"), raising=False)
    monkeypatch.setattr(kernel_cache, "load", compiler.load)
    return made


def start(cubins: Path) -> None:
    """Compile and load a kernel as an engine that starts does."""
    assert Kernels(DriverCalls(), H100, cubins).function(SOURCE, LAUNCH) == "kernel"


@pytest.mark.usefixtures("device")
def test_compiled_kernels_are_kept_and_readable_by_everybody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start(tmp_path / "new" / "cubins")
    [kept] = (tmp_path / "new" / "cubins").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o644
    monkeypatch.setattr(compiler, "compile_source", lambda *_: 1 / 0)
    start(tmp_path / "new" / "cubins")


def flipped(whole: bytes) -> bytes:
    middle = len(whole) // 2
    return whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]


@pytest.mark.parametrize("damage", [flipped, lambda whole: whole[: len(whole) // 2]])
def test_a_damaged_file_is_compiled_again(
    device: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    damage: Callable[[bytes], bytes],
) -> None:
    start(tmp_path)
    [kept] = tmp_path.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    taken: list[bytes] = []

    def take(image: bytes) -> Any:
        taken.append(image)
        return OK, "module"

    monkeypatch.setattr(device, "cuModuleLoadData", take)
    start(tmp_path)
    assert taken == [whole[: -compiler.SEAL]]
    assert kept.read_bytes() == whole
    assert [*tmp_path.iterdir()] == [kept]


@pytest.mark.usefixtures("device")
def test_a_whole_kernel_under_the_name_of_another_is_not_run(tmp_path: Path) -> None:
    start(tmp_path / "cubins")
    [kept] = (tmp_path / "cubins").iterdir()
    whole = kept.read_bytes()
    compiler._keep(tmp_path / "other", b"another")
    (tmp_path / "other").replace(kept)
    start(tmp_path / "cubins")
    assert kept.read_bytes() == whole


def test_what_several_launches_need_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake(monkeypatch)
    made: list[tuple[Path, dict[str, int]]] = []

    def load(source: Path, defines: dict[str, int], *_: object) -> Cubin:
        made.append((source, defines))
        return Cubin(WHOLE, "")

    monkeypatch.setattr(kernel_cache, "load", load)
    other = replace(LAUNCH, defines={"ROWS": 16})
    progress: list[int] = []
    launches = [(SOURCE, LAUNCH), (SOURCE, other), (SOURCE, LAUNCH), (SOURCE, other)]
    found = Kernels(DriverCalls(), H100, tmp_path)
    with found.compiling(launches) as images:
        assert len(images) == 2
        images.load(progress.append)
    assert progress == [1, 1]
    for source, launch in launches:
        assert found.function(source, launch) == "kernel"
    assert sorted(made, key=str) == [(SOURCE, {"ROWS": 16}), (SOURCE, {})]


def test_the_compilers_words_are_reported(
    tmp_path: Path,
) -> None:
    (tmp_path / "wrong.cu").write_text("__global__ void f() { such_a_name(); }")
    with pytest.raises(EngineError, match=r"wrong.cu must compile for sm_90 \(got: .*such_a_name"):
        compiler.compile_source(tmp_path / "wrong.cu", {}, "sm_90")


def test_all_that_determines_a_kernel_is_in_the_name_of_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [
        compiler.digest(SOURCE, {}, "sm_90"),
        compiler.digest(SOURCE, {}, "sm_110"),
        compiler.digest(SOURCE, {"N": 1}, "sm_90"),
        compiler.digest(ROOT / "standard" / "fill.cu", {}, "sm_90"),
    ]
    for what, value in (("_headers", lambda: (("a.cuh", b""),)), ("OPTIONS", ("--std=c++20",))):
        with monkeypatch.context() as patch:
            patch.setattr(compiler, what, value)
            names.append(compiler.digest(SOURCE, {}, "sm_90"))
    assert len({*names}) == len(names)
    assert compiler.digest(SOURCE, {}, "sm_90") == names[0]
