"""`thor-dflash template`: prints the files that running a server needs."""

from __future__ import annotations

import sys
from argparse import Namespace
from importlib.resources import files

from thor_dflash.config.tree import Config
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.message_text import nearest
from thor_dflash.core.progress import Progress

TEMPLATES = {
    "thor-dflash.service": "systemd unit of the plan server",
    "thor-dflash-gateway.service": "systemd unit of the HTTP gateway",
    "thor-clocks.service": "systemd unit of a Jetson's power mode and clocks",
    "robot.toml": "configuration of a robot that plans over a socket file",
    "lan.toml": "configuration of a server for other machines, encrypted",
    "gateway.toml": "configuration of the HTTP gateway",
    "grafana.json": "Grafana dashboard of /metrics",
    "Dockerfile": "images for a CPU, an NVIDIA GPU and JetPack 7; builds in a checkout",
}


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Print one file, or what there is."""
    if args.name is None:
        wide = max(map(len, TEMPLATES))
        print("\n".join(f"{name:<{wide}}  {text}" for name, text in TEMPLATES.items()))
        return
    if args.name not in TEMPLATES:
        raise ConfigError(
            f"NAME must be a template (got {args.name!r}): {nearest(args.name, TEMPLATES)}"
        )
    path = files("thor_dflash.serving.deploy") / args.name
    sys.stdout.write(path.read_text(encoding="utf-8"))
