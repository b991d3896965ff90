"""An HTTP gateway in a thread of this process, and OpenAI's own client for it."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openai import OpenAI
from support.waiting import until

from thor_dflash.config.serving import GatewayConfig
from thor_dflash.serving.gateway.http_server import http_server, listener

CHAT: list[Any] = [{"role": "user", "content": "Bring the cup."}]
JSON = {"Content-Type": "application/json"}


@contextmanager
def gateway(*servers: str, **config: Any) -> Iterator[str]:
    """Run a gateway to these servers and yield its address."""
    settings = GatewayConfig(servers=servers, listen="127.0.0.1:0", **config)
    server, listening = http_server(settings, 30), listener(settings)
    port = listening.getsockname()[1]
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    until(lambda: server.started)
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
