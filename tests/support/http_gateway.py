"""An HTTP gateway in a thread of this process, and OpenAI's own client for it."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from openai import OpenAI

from thor_dflash.config.serving import GatewayConfig
from thor_dflash.serving.gateway.app import application

CHAT: list[Any] = [{"role": "user", "content": "Bring the cup."}]
JSON = {"Content-Type": "application/json"}


@contextmanager
def gateway(*servers: str, **config: Any) -> Iterator[str]:
    """Run a gateway to these servers and yield its address."""
    app = application(GatewayConfig(servers=servers, **config))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    end = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < end
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)


def client(address: str) -> Any:
    return OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as reply:
        text: str = reply.read().decode()
    return text
