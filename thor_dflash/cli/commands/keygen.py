"""`thor-dflash keygen`: makes the keys of an encrypted server."""

from __future__ import annotations

from argparse import Namespace
from shlex import quote

from thor_dflash.config.tree import Config
from thor_dflash.core.progress import Progress


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Make the keys and print where each belongs."""
    from thor_dflash.serving.transport import curve

    curve.keygen(args.directory)
    d = args.directory
    print(f"server: thor-dflash serve --curve {quote(str(d))} --bind tcp://0.0.0.0:5571 ...")
    print(f"client: copy {d}/client.secret, {d}/client.public and {d}/server.public, then")
    print('        RemotePlanner("tcp://SERVER:5571", Options(keys="DIRECTORY"))')
    print(f"further clients: put their .public files into {d}/clients")
