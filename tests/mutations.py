"""Plants mistakes and runs the quick tests that must notice them: see mutations.toml.

    python tests/mutations.py [words of the entries to run]

Each is made in a copy of the repository. Exits with 1 if a mistake is missed.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUICK = "not slow and not emulator and not gpu"


def copied(to: Path) -> None:
    """Copy what git knows, and what is new and not ignored; links stay links."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in listed:
        if (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)


def outcome(tree: Path, tests: str) -> str:
    """Runs tests in a tree, whose packages come first on the path.

    Returns "caught" if they fail, "missed" if they pass, else why they did not run.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", QUICK, "--no-header"]
    command += ["-p", "no:cacheprovider", "--tb=no", *shlex.split(tests)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        return "caught"  # it crashed
    known = {0: "missed", 1: "caught"}
    return known.get(done.returncode) or f"not run: {done.stdout[-2000:]}{done.stderr[-2000:]}"


def main(words: list[str]) -> int:
    """Run the entries whose law has one of the words; all without any."""
    entries = tomllib.loads((ROOT / "tests/mutations.toml").read_text(encoding="utf-8"))["mutation"]
    chosen = [e for e in entries if not words or any(word in e["law"] for word in words)]
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copied(tree)
        for entry in chosen:
            path = tree / entry["file"]
            text = path.read_text(encoding="utf-8")
            found = "not planted: its text must occur once"
            if text.count(entry["old"]) == 1:
                path.write_text(text.replace(entry["old"], entry["new"]), encoding="utf-8")
                found = outcome(tree, entry["tests"])
                path.write_text(text, encoding="utf-8")
            counts[found[:6]] = counts.get(found[:6], 0) + 1
            print(f"{found}: {entry['law']}", flush=True)
    print(f"{counts.get('caught', 0)} of {len(chosen)} mistakes are caught")
    return int(counts.get("caught", 0) != len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
