"""The plan server that a command line names."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thor_dflash.cli.report.server_facts import ServerReport
    from thor_dflash.serving.client import RemotePlanner


def connect(args: Namespace, **options: Any) -> RemotePlanner:
    """Begin to connect to `--server`, with `--keys` and `--token-file`. `options` are further
    fields of the client's Options.

    Raises:
        ConfigError: the endpoint is malformed, a file cannot be read, or an option is out of range.
    """
    from thor_dflash.serving.client import Options, RemotePlanner, connection
    from thor_dflash.serving.transport import access

    token = None if args.token_file is None else access.read_token(str(args.token_file))
    keys = "" if args.keys is None else str(args.keys)
    given = Options(keys=keys, token=token, **options)
    connection.check(args.server, given, "--server")
    return RemotePlanner(args.server, given)


def report(planner: RemotePlanner) -> ServerReport:
    """Ask a server how it is.

    Raises:
        PlanError: it does not answer, or refuses to.
    """
    from thor_dflash.cli.report.server_facts import ServerReport

    return ServerReport(planner.health(), planner.hello(), planner.stats())
