"""`thor-dflash gateway`: the plan socket for programs that speak OpenAI's HTTP."""

from __future__ import annotations

import sys
from argparse import Namespace

from thor_dflash.config import Config
from thor_dflash.progress import Progress


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Serve HTTP until SIGTERM."""
    from thor_dflash.extras import extra

    with extra("http"):
        import uvicorn

        from thor_dflash.serving.gateway import application, listen_at

    host, port = listen_at(config.gateway)
    progress.close()
    app = application(config.gateway)
    print(f"listening on http://{host}:{port}/v1", file=sys.stderr, flush=True)
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False)
