"""Starts a plan server on a package that was never tuned: the first start tunes it, the second does
not, the third has `engine.tune = "off"`. Then doctor and profile must name the choices.

    python tests/gpu/serve_tuning.py --package PKG

Prints JSON: name -> table. What is not as it should be stands there under "wrong", and on stderr.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from thor_dflash.serving.client import PlanRequest, RemotePlanner

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "thor_dflash.cli.main"]
LONGEST = 300.0
"""Seconds until a server must be ready."""
PROMPT = (ROOT / "docs" / "examples" / "task.txt").read_text(encoding="utf-8")


@dataclass
class Start:
    """One start of the server."""

    seconds: float = 0.0
    """From the start of the process until it was ready."""
    measured: str = ""
    """The line of `tune` that says what was measured; empty: nothing was."""
    status: str = ""
    valid: bool | None = None
    tokens: int = 0
    plan: Any = None
    log: list[str] = field(default_factory=list[str])


def start(package: Path, endpoint: str, options: Sequence[str]) -> Start:
    """Start a server, ask it for a plan, end it."""
    command = [*COMMAND, "serve", "--package", str(package), "--bind", endpoint, *options]
    found, begun = Start(), time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        reading = Thread(target=found.log.extend, args=(server.stderr,), daemon=True)
        reading.start()
        try:
            while not any(" ready after " in line for line in found.log):
                if server.poll() is not None or time.monotonic() - begun > LONGEST:
                    sys.exit(f"the server did not get ready:\n{''.join(found.log)}")
                time.sleep(0.01)
            found.seconds = time.monotonic() - begun
            with closing(RemotePlanner(endpoint)) as planner:
                result = planner.plan(PlanRequest(prompt=PROMPT))
            found.status, found.valid, found.plan = result.status, result.plan_valid, result.plan
            found.tokens = result.usage.output_tokens if result.usage else 0
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
            reading.join(10)
    lines = [line.partition("tune: ")[2].strip() for line in found.log]
    measured = (line.partition(":")[0] for line in lines if " measured now in " in line)
    found.measured = next(measured, "")
    return found


def printed(*arguments: str) -> Any:
    """What a command prints as JSON; nothing if it fails: the figures so far are worth keeping."""
    done = subprocess.run([*COMMAND, *arguments], cwd=ROOT, stdout=subprocess.PIPE, check=False)
    return json.loads(done.stdout or "{}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--package", type=Path, required=True, metavar="PKG")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ["--set", f"engine.tunings={folder / 'tunings'}"]
        endpoint = f"ipc://{folder / 'socket'}"
        starts = {
            "first": start(args.package, endpoint, options),
            "second": start(args.package, endpoint, options),
            "off": start(args.package, endpoint, [*options, "--set", "engine.tune=off"]),
        }
        [file] = (folder / "tunings").glob("*.json")
        record = json.loads(file.read_text(encoding="utf-8"))
        doctor = printed("doctor", "--package", str(args.package), *options, "--json")
        profile = printed(
            "profile", "--package", str(args.package), "--prompt", PROMPT, "--max-tokens",
            "256", "--runs", "1", "--warmup", "1", *options, "--json",
        )  # fmt: skip
    about = {one["item"]: one for one in doctor.get("items", ())}
    launches = about.get("launches", {"state": "", "text": "nothing"})
    device, notes = profile.get("subject", {}).get("device", ""), profile.get("warnings", ())
    named = sum(note.startswith("tuned launch: ") for note in notes)
    chosen = sum(one["chosen"] > 0 for one in record["launches"].values())
    first, second, off = starts.values()
    wrong = {
        "the first start must tune": not first.measured,
        "the second start must not": bool(second.measured or off.measured),
        "both must give the same plan": first.plan is None or first.plan != second.plan,
        "the doctor must be content": launches["state"] != "ok",
        "profile must name what was chosen": bool(chosen) != bool(named and "tuned " in device),
    }
    for rule in (rule for rule, broken in wrong.items() if broken):
        print(f"serve_tuning: {rule}", file=sys.stderr)
    rows = [
        [name, round(one.seconds, 2), one.measured, one.status, one.valid, one.tokens,
         one.plan == first.plan]
        for name, one in starts.items()
    ]  # fmt: skip
    header = ["start", "ready, s", "tuned", "status", "plan valid", "tokens", "plan of the first"]
    facts = [
        ["what", "says"], ["device", device], ["launches measured", len(record["launches"])],
        ["not the rules'", chosen], ["doctor", launches["text"]], ["notes of profile", named],
        ["wrong", "; ".join(rule for rule, broken in wrong.items() if broken)],
    ]  # fmt: skip
    print(json.dumps({"serve": [header, *rows], "named": facts}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
