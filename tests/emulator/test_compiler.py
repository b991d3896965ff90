"""How the emulator's libraries are made of sources: read, compiled once, kept while in use."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from emulator.compiler import COMPILER, KEPT, MACHINE, cached, folder_of, signatures

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")


def test_signatures_are_read_from_the_source() -> None:
    found = signatures(MACHINE / "probes.cu", {})
    assert found["product"] == ("pointer",) * 4 + ("int",)
    assert found["wrong_wait_for_ever"] == ("pointer",)


def test_what_was_compiled_is_kept_while_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    old, used = (cached(key, ".so", lambda path: path.write_bytes(b"")) for key in ("old", "used"))
    for path in (old, used):
        os.utime(path, (0, time.time() - KEPT - 60))
    assert cached("used", ".so", pytest.fail) == used  # there already
    folder_of.cache_clear()
    folder_of(str(tmp_path))
    assert used.exists()
    assert not old.exists()
