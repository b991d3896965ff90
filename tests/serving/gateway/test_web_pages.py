"""The gateway and those who are not meant to use it: web pages, and clients that never finish."""

from __future__ import annotations

import http.client
import socket
import time
from base64 import b64encode
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image
from support.http_gateway import CHAT, JSON, gateway
from support.image_files import file_of

from thor_dflash.serving.gateway import app as gateways

BODY = msgspec.json.encode({"messages": CHAT})


def asked(address: str, host: str, path: str = "/v1/chat/completions") -> tuple[int, bytes]:
    """Status and body of the answer to a request whose Host header is `host`."""
    page = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
    post = path.endswith("completions")
    page.request("POST" if post else "GET", path, BODY if post else None, {**JSON, "Host": host})
    reply = page.getresponse()
    body = reply.read()
    page.close()
    return reply.status, body


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/health", "/metrics"])
def test_a_page_whose_name_leads_here_is_refused(house: Any, path: str) -> None:
    server = house.mock()
    wrong = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "8.8.8.8:80", "[::", "")
    with gateway(server.endpoints[0]) as address:
        for host in wrong:
            status, body = asked(address, host, path)
            assert status == 421, host
            message = msgspec.json.decode(body)["error"]["message"]
            assert message.endswith(f"one of gateway.hosts (got {host or 'none'})")
        for host in ("localhost", "LOCALHOST:1", "127.1.2.3:9", "[::1]:8000"):
            assert asked(address, host, "/v1/models")[0] == 200, host
    assert "plan" not in house.peer(server).ask(op="stats", id="s")["requests"]


def test_a_gateway_takes_bodies_as_long_as_it_is_set_to(house: Any) -> None:
    server = house.mock(max_message=4 << 20)
    for most, status in ((3 << 20, 200), (1 << 20, 413)):
        with gateway(server.endpoints[0], max_body=most) as address:
            page = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
            page.request("POST", "/v1/chat/completions", BODY + b" " * (2 << 20), JSON)
            assert page.getresponse().status == status


def test_images_are_beside_the_longest_body(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (720, 1280, 3), np.uint8)
    data = b64encode(file_of(Image.fromarray(pixels), compress_level=1)).decode()
    assert len(data) > 2 << 20
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    body = msgspec.json.encode({"messages": [{"role": "user", "content": [part]}]})
    with gateway(house.mock().endpoints[0]) as address:
        for sent, large, code in (
            (body, 1, None),
            (body + b" " * (1 << 20), 1, "too_large"),
            (body, 0, "busy"),
            (BODY, 0, None),
            (body, 1, None),
        ):
            monkeypatch.setattr(gateways, "LARGE", large)
            page = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
            page.request("POST", "/v1/chat/completions", sent, JSON)
            found = msgspec.json.decode(page.getresponse().read())
            assert found.get("error", {}).get("code") == code, found.get("error")
            page.close()


@pytest.mark.parametrize(
    ("kind", "size", "status"),
    [("text/plain", 8 << 20, 413), ("application/json", 8 << 20, 413), ("text/plain", 9, 400)],
)
def test_a_client_finds_its_answer_when_it_has_sent_all(
    house: Any, kind: str, size: int, status: int
) -> None:
    """A connection that closes while a client still sends is reset, and the answer lost."""
    server = house.mock()
    with gateway(server.endpoints[0]) as address:
        for _ in range(2):
            page = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
            sent = BODY + b" " * size
            page.request("POST", "/v1/chat/completions", sent, {"Content-Type": kind})
            reply = page.getresponse()
            assert reply.status == status
            assert reply.getheader("connection") is None, "it goes on"
            reply.read()
            page.close()


def test_a_body_that_never_ends_is_refused(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "BODY_S", 0.2)
    server = house.mock()
    with gateway(server.endpoints[0]) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as slow:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
            slow.sendall(head.encode() + BODY[:5])
            begun = time.monotonic()
            body = b"".join(iter(lambda: slow.recv(1 << 16), b""))
            assert time.monotonic() - begun < 4, "nobody waits for the rest"
            assert body.startswith(b"HTTP/1.1 400 ")
            assert b"the body must come within 0.2 s (got 5 bytes of it)" in body
        assert asked(address, host)[0] == 200
