"""Fetches TensorRT's published Python bindings and makes typing stubs from them.

TensorRT itself is not needed: the bindings can be imported with a stand-in for each library that
they link. This shows every class, signature and enumeration of a version.

    python tests/stand_ins/trt_stubs.py

fetches the bindings once; then the tests need no network.
"""

from __future__ import annotations

import ast
import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

VERSIONS = ("10.13.3.9", "10.16.1.11", "11.4.0.106")
"""The TensorRT of JetPack 7.1, that of 7.2 (the last 10.16 whose bindings are published), and the
newest that is supported."""
PACKAGE = "tensorrt_cu13_bindings"
STORE = Path(sys.prefix) / "tensorrt-bindings"
"""In the virtual environment, so that it goes when that goes."""
FETCH_SECONDS = 120
SYMBOLS = {
    "nvinfer": (
        "createInferBuilder_INTERNAL",
        "createInferRefitter_INTERNAL",
        "createInferRuntime_INTERNAL",
        "getBuilderPluginRegistry",
        "getPluginRegistry",
    ),
    "nvinfer_plugin": ("initLibNvInferPlugins",),
    "nvonnxparser": (
        "createNvOnnxParser_INTERNAL",
        "createNvOnnxParserRefitter_INTERNAL",
        "getNvOnnxParserVersion",
    ),
}
"""Library -> the C functions that the bindings link to. All else are virtual methods."""

_INSPECT = """
import ctypes, sys
site, out, *libraries = sys.argv[1:]
for library in libraries:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
sys.path.insert(0, site)
from pybind11_stubgen import main
main(["tensorrt_bindings", "-o", out, "--ignore-all-errors"])
"""


def bindings(version: str) -> Path:
    """Returns a directory from which `tensorrt_bindings` of a version can be imported. Skips the
    test if it cannot be fetched.
    """
    site = STORE / version
    if not (site / "tensorrt_bindings").is_dir():
        try:
            _fetch(version, site)
        except (subprocess.SubprocessError, OSError) as e:
            why = str(getattr(e, "stderr", None) or e).strip().splitlines()[-1]
            pytest.skip(f"{PACKAGE}=={version} must be fetched once, by {__file__} (got: {why})")
    return site


def _fetch(version: str, site: Path) -> None:
    STORE.mkdir(parents=True, exist_ok=True)
    # Tests may run in parallel: each fetches its own copy, and the first that is complete is kept.
    with tempfile.TemporaryDirectory(dir=STORE) as name:
        partial = Path(name) / "site"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
        what = ["download", "--no-deps", "--only-binary=:all:", f"--dest={name}"]
        subprocess.run(
            [*pip, *what, f"{PACKAGE}=={version}"],
            check=True,
            timeout=FETCH_SECONDS,
            capture_output=True,
            text=True,
        )
        [wheel] = Path(name).glob("*.whl")
        zipfile.ZipFile(wheel).extractall(partial)
        with contextlib.suppress(OSError):
            partial.rename(site)


def libraries(version: str, directory: Path) -> list[Path]:
    """Compiles a stand-in for each library that the bindings link, whose functions return null."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("a C compiler must be there to stand in for TensorRT's libraries (got none)")
    made: list[Path] = []
    for name, symbols in SYMBOLS.items():
        file = f"lib{name}.so.{version.partition('.')[0]}"
        source, library = directory / f"{name}.c", directory / file
        source.write_text("".join(f"void *{s}(void) {{ return 0; }}\n" for s in symbols))
        options = ["-shared", "-fPIC", f"-Wl,-soname,{file}", "-o", str(library), str(source)]
        subprocess.run([compiler, *options], check=True, capture_output=True)
        made.append(library)
    return made


def write_stubs(version: str, directory: Path) -> Path:
    """Write `directory`/typings/tensorrt/__init__.pyi of a version; gives `directory`/typings."""
    site, raw = bindings(version), directory / "raw"
    made = [str(path) for path in libraries(version, directory)]
    command = [sys.executable, "-c", _INSPECT, str(site), str(raw), *made]
    subprocess.run(command, check=True, capture_output=True, timeout=FETCH_SECONDS)
    text = (raw / "tensorrt_bindings" / "tensorrt.pyi").read_text()
    package = directory / "typings" / "tensorrt"
    package.mkdir(parents=True)
    (package / "__init__.pyi").write_text(mend(text))
    return package.parent


MENDS = (
    (r"typing\.SupportsInt", "int"),
    (r"(->|:) \.\.\.(?=[,)=:]|$)", r"\1 typing.Any"),
    (r": Dims(?=[,)])", ": Dims | collections.abc.Sequence[int]"),
    (r"PluginFieldCollection_", "PluginFieldCollection"),
    (r": FallbackString", ": str | FallbackString"),
    (r"(?<=[ \[])bool(?=[,)\]:=| ]|$)", "builtins.bool"),
    (r"(: )([\w.\[\], ]+?)( = None)", r"\1\2 | None\3"),
    # Methods that Python overrides take or return bytes; the signatures are those of C++.
    (r"def write\(self, data: [\w.]+, size: int\)", "def write(self, data: bytes)"),
    (
        r"def read\(self, destination: [\w.]+, num_bytes: int, stream: int\) -> int",
        "def read(self, num_bytes: int, stream: int) -> bytes",
    ),
)
"""What the generator of stubs derives wrongly from docstrings (patterns), and what is right."""
PROTOCOLS = {
    "Dims": "def __iter__(self) -> collections.abc.Iterator[int]: ...",
    "IHostMemory": "def __buffer__(self, flags: int, /) -> memoryview: ...",
}
"""Methods that classes have but no docstring mentions."""
_HEAD = "import builtins\nimport collections.abc\n__version__: str\n"


def mend(text: str) -> str:
    """Returns a generated stub with its errors mended, so that type checkers can read it."""
    lines: list[str] = []
    for line in text.splitlines():
        if re.match(r"\s*(def |\w+: )", line):
            for pattern, put in MENDS:
                line = re.sub(pattern, put, line)
        lines.append(_signature(line) if re.match(r"\s*def ", line) else _member(line))
    for name, member in PROTOCOLS.items():
        [at] = [i for i, line in enumerate(lines) if re.match(rf"class {name}[(:]", line)]
        lines.insert(at + 1, f"    {member}")
    first = lines.index("from __future__ import annotations") + 1
    return "\n".join([*lines[:first], _HEAD, *lines[first:]]) + "\n"


def _signature(line: str) -> str:
    """Mend a signature that is not valid Python; if that fails, make it one that takes anything."""
    if _parses(f"{line.strip()} ..."):
        return line
    head, _, rest = line.partition("(")
    seen, parts = False, re.split(r", (?=\*{0,2}\w+:? )", rest.rpartition(")")[0])
    for i, part in enumerate(parts):
        parts[i] = f"{part} = ..." if seen and "=" not in part and ":" in part else part
        seen = seen or "=" in part
    result = line.rpartition(")")[2]
    mended = f"{head}({', '.join(parts)}){result}"
    if _parses(f"{mended.strip()} ..."):
        return mended
    return f"{head}(self, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:"


def _member(line: str) -> str:
    if re.match(r"\s*\w+: ", line) and not _parses(line.strip()):
        return f"{line.partition(':')[0]}: typing.Any"
    return line


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


if __name__ == "__main__":
    for wanted in VERSIONS:
        print(bindings(wanted))
