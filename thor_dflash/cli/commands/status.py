"""`thor-dflash status`: whether a server takes plans, and how its last ones went."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from thor_dflash.config.tree import Config
from thor_dflash.core.progress import Progress

WIDE = 15
"""Width of the first column."""
AT_WORK = ("ready", "busy")


def run(args: Namespace, config: Config, progress: Progress) -> int:
    """Print the state; return 0 if the server takes plans, else 1."""
    from thor_dflash.serving.client import Options, RemotePlanner, connection
    from thor_dflash.serving.transport import access

    token = None if args.token_file is None else access.read_token(str(args.token_file))
    keys = "" if args.keys is None else str(args.keys)
    options = Options(keys=keys, token=token, retries=0, timeout_s=args.wait)
    connection.check(args.server, options, "--server")
    with RemotePlanner(args.server, options) as planner:
        health, hello, stats = planner.health(), planner.hello(), planner.stats()
    if args.json:
        print(json.dumps({"health": health, "hello": hello, "stats": stats}))
    elif not args.quiet:
        print("\n".join(f"{name:<{WIDE}}{value}" for name, value in facts(health, hello, stats)))
    return 0 if health["state"] in AT_WORK else 1


def facts(
    health: dict[str, Any], hello: dict[str, Any], stats: dict[str, Any]
) -> list[tuple[str, str]]:
    """Name and text of each line."""
    model: dict[str, Any] = hello["model"] or {}
    server, spec = hello["server"], stats["spec"]
    cycles = spec.get("cycles", 0)
    ended = ", ".join(f"{count} {name}" for name, count in stats["finished"].items())
    refused = ", ".join(f"{count} {code}" for code, count in stats["refused"].items())
    speeds = [plan["tok_s"] for plan in stats["last"] if plan["tok_s"]]
    lines = [
        ("state", health["state"] + (f": {health['error']}" if health["error"] else "")),
        ("server", f"{server['name']} {server['version']}, up {health['uptime_s']:.0f} s"),
        ("model", f"{model.get('model', 'none yet')} ({model.get('engine') or 'no engine'})"),
        ("queue", f"{health['running']} running, {health['waiting']} waiting"),
        ("plans", ended or "none yet"),
        ("refused", refused or "none"),
    ]
    if cycles:
        lines.append(("accept length", f"{1 + spec['accepted'] / cycles:.2f}"))
    if speeds:
        lines.append(("tokens/s", f"{sorted(speeds)[len(speeds) // 2]:.1f} (median of the last)"))
    if (e2e := stats["percentiles"]["e2e_ms"]) is not None:
        lines.append(("end to end", f"p50 {e2e['p50']:.0f} ms, p90 {e2e['p90']:.0f} ms"))
    return lines
