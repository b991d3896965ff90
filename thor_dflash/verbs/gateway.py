"""`thor-dflash gateway`: the plan socket for programs that speak OpenAI's HTTP."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from argparse import Namespace
from types import FrameType

from thor_dflash import streams
from thor_dflash.config import Config
from thor_dflash.progress import Progress, say

DRAIN_S = 30
"""From the first signal to the end of requests that are still open, as `serve.drain_s`: a client
that stalls must not keep a gateway alive that was told to end."""


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Serve HTTP until SIGTERM, SIGINT or SIGHUP."""
    from thor_dflash.extras import extra

    with extra("http"):
        import uvicorn

        from thor_dflash.serving import fleet, gateway

    fleet.check(config.gateway)
    listener = gateway.listener(config.gateway)
    app = gateway.application(config.gateway)
    server = uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=DRAIN_S
        )
    )

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    # Of a signal before uvicorn has handlers of its own, and once it has ended in order: it puts
    # these back then, and raises again what it heard.
    for number in streams.endings():
        signal.signal(number, stop)
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    progress.close()
    host, port = config.gateway.listen.rpartition(":")[0], listener.getsockname()[1]
    say(sys.stderr, f"listening on http://{host}:{port}/v1")
    server.run(sockets=[listener])
    assert server.started, "what can be refused was, before"


def _is_news(record: logging.LogRecord) -> bool:
    """All but traces of what the end has cut short, which is no fault: a request's is an exception,
    that of the application itself a text.
    """
    error = record.exc_info[1] if record.exc_info else None
    name = asyncio.CancelledError.__name__
    return not (isinstance(error, asyncio.CancelledError) or name in record.getMessage())
