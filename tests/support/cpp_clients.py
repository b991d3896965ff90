"""Compiles programs that use the C++ client. Without compiler or headers, tests are skipped."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "serving/client/tdp.hpp"
SYSTEM = [Path("/usr/include", name) for name in ("zmq.hpp", "nlohmann/json.hpp")]
needs_cpp = pytest.mark.skipif(
    shutil.which("g++") is None or not all(path.is_file() for path in SYSTEM),
    reason="needs g++, libzmq3-dev, cppzmq-dev and nlohmann-json3-dev",
)


def program(source: Path, config: pytest.Config, tmp_path: Path) -> Path:
    """The compiled program. nlohmann's header takes seconds to compile, so it is kept until the
    source or the client changes.
    """
    digest = hashlib.sha256(source.read_bytes() + HEADER.read_bytes()).hexdigest()[:16]
    kept = config.pluginmanager.has_plugin("cacheprovider") and config.cache
    made = (kept.mkdir("thor-dflash-examples") if kept else tmp_path) / digest
    if not made.exists():
        new = tmp_path / "program"
        flags = ["-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-I", HEADER.parent]
        command = ["g++", *flags, source, "-lzmq", "-lpthread", "-o", new]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        shutil.copy(new, f"{made}.{os.getpid()}")
        Path(f"{made}.{os.getpid()}").rename(made)
    return made
