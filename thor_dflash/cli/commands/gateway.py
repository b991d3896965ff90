"""`thor-dflash gateway`: serves OpenAI's HTTP API in front of plan servers."""

from __future__ import annotations

import asyncio
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
        import uvicorn

        from thor_dflash.serving.gateway import app as gateway
        from thor_dflash.serving.gateway import server_pool

    server_pool.check(config.gateway)
    listener = gateway.listener(config.gateway)
    app = gateway.application(config.gateway)
    server = uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=DRAIN_S
        )
    )

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    # For a signal before uvicorn installs its own handlers, and after it has shut down: it then
    # restores these and raises the signals it caught again.
    for number in stdio.shutdown_signals():
        signal.signal(number, stop)
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    # Below that it only warns of each write to a client that is gone, which is no news either.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    progress.close()
    host, port = gateway.listen_at(config.gateway)[0], listener.getsockname()[1]
    print_line(sys.stderr, f"listening on {_url(host, port)}")
    server.run(sockets=[listener])
    assert server.started, "what can be refused was, before"


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def _is_news(record: logging.LogRecord) -> bool:
    """Whether to log a record: not the tracebacks of requests cancelled by the shutdown, which are
    no errors. A request's is an exception; the application's own is only a text.
    """
    error = record.exc_info[1] if record.exc_info else None
    message = record.getMessage()
    return not (
        isinstance(error, asyncio.CancelledError) or asyncio.CancelledError.__name__ in message
    )
