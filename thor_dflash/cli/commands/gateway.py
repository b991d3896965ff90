"""`thor-dflash gateway`: serves OpenAI's HTTP API in front of plan servers."""

from __future__ import annotations

import logging
import signal
import sys
from argparse import Namespace
from types import FrameType

from thor_dflash.cli import stdio
from thor_dflash.config.tree import Config
from thor_dflash.core.progress import Progress, print_line

DRAIN_S = 30
"""Seconds that open requests get to finish after the first signal, as `serve.drain_s`: a stalled
client must not keep the gateway alive."""


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Serve HTTP until SIGTERM, SIGINT or SIGHUP."""
    from thor_dflash.core.extras import extra

    with extra("http"):
        from thor_dflash.serving.gateway import auth, http_server, server_pool

    server_pool.check(config.gateway)
    server = http_server.http_server(config.gateway, DRAIN_S)
    listener = http_server.listener(config.gateway)

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    # For a signal before uvicorn installs its own handlers, and after it has shut down: it then
    # restores these and raises the signals it caught again.
    for number in stdio.shutdown_signals():
        signal.signal(number, stop)
    # Below that it only warns of each write to a client that is gone, which is no news either.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    progress.close()
    host, port = auth.listen_at(config.gateway)[0], listener.getsockname()[1]
    print_line(sys.stderr, f"listening on {_url(host, port)}")
    server.run(sockets=[listener])
    assert server.started, "what can be refused was, before"


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
