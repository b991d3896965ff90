"""docs/examples/nginx.conf: TLS in front of a gateway, where nginx is installed."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import create_server
from typing import Any

import pytest
from openai import APIConnectionError, AuthenticationError, DefaultHttpxClient, OpenAI
from support.http_gateway import CHAT, gateway
from support.waiting import until

from thor_dflash.serving.planner.mock_backend import PLAN

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin") or shutil.which("nginx")
EXAMPLE = Path(__file__).parents[3] / "docs/examples/nginx.conf"
KEY = "k" * 40


@contextmanager
def proxy(address: str, folder: Path) -> Iterator[int]:
    """nginx with the example, on a free port, before a gateway; its port."""
    make = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=a"
    )
    files = ["-addext", "subjectAltName=DNS:localhost", "-keyout", "robot.key", "-out", "robot.pem"]
    subprocess.run([*make.split(), *files], cwd=folder, check=True, capture_output=True)
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "\n".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    text = EXAMPLE.read_text()
    for old, new in (
        (r"^pid .*;", f"pid {folder}/pid; daemon off; master_process off;"),
        (r"listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        (r"/etc/ssl/(certs|private)/", f"{folder}/"),
        (r"http://127\.0\.0\.1:8000", address),
        (r"access_log off;", f"access_log off;\n{temporary}"),
    ):
        text, count = re.subn(old, new, text, flags=re.M)
        assert count, old
    (folder / "nginx.conf").write_text(text)
    command = [NGINX or "", "-e", "stderr", "-p", str(folder), "-c", str(folder / "nginx.conf")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: (folder / "pid").exists() or process.poll() is not None)
            assert process.poll() is None, process.stderr and process.stderr.read()
            yield port
        finally:
            process.terminate()


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_the_example_adds_tls_to_a_gateway(house: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text(KEY)
    server, held = house.held()

    def client(key: str, **tls: Any) -> Any:
        web = DefaultHttpxClient(verify=ssl.create_default_context(**tls))
        return OpenAI(
            base_url=f"https://localhost:{port}/v1", api_key=key, http_client=web, max_retries=0
        )

    with (
        gateway(server.endpoints[0], api_key_file=str(keys)) as address,
        proxy(address, tmp_path) as port,
        client(KEY, cafile=tmp_path / "robot.pem") as openai,
        client("another", cafile=tmp_path / "robot.pem") as stranger,
        client(KEY) as careful,
    ):
        held.let(2)
        pieces = iter(openai.chat.completions.create(model="", messages=CHAT, stream=True))
        first = [next(pieces)]
        assert held.waiting.wait(20), "the stream goes on, and its beginning is here"
        held.let()
        text = "".join(piece.choices[0].delta.content or "" for piece in [*first, *pieces])
        assert text.rstrip() == PLAN
        with pytest.raises(AuthenticationError):
            stranger.models.list()
        with pytest.raises(APIConnectionError):
            careful.models.list()
