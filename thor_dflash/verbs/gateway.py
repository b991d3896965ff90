"""`thor-dflash gateway`: the plan socket for programs that speak OpenAI's HTTP."""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import suppress

from thor_dflash.config import Config
from thor_dflash.progress import Progress, say


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Serve HTTP until SIGTERM or SIGINT."""
    from thor_dflash.extras import extra

    with extra("http"):
        import uvicorn

        from thor_dflash.serving import fleet, gateway

    fleet.check(config.gateway)
    listener = gateway.listener(config.gateway)
    app = gateway.application(config.gateway)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    progress.close()
    host, port = config.gateway.listen.rpartition(":")[0], listener.getsockname()[1]
    say(sys.stderr, f"listening on http://{host}:{port}/v1")
    with suppress(KeyboardInterrupt):  # uvicorn raises it again once it has ended in order
        server.run(sockets=[listener])
        assert server.started, "what can be refused was, before"
