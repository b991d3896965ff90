"""Images are decoded beside everything else: what waits for them, and what does not."""

from __future__ import annotations

import threading
import time
from base64 import b64encode
from typing import Any

import pytest
from support.image_files import HOSTILE
from support.waiting import PATIENCE_S, until

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import PlanError
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.server.workers import IMAGE_THREADS

TEXT = {"op": "plan", "prompt": "x", "max_tokens": 4}


def picture(data: bytes = bytes(3 * 64 * 64), kind: str = "rgb8", **more: Any) -> dict[str, Any]:
    """A plan that shows an image."""
    size = {"width": 64, "height": 64} if kind == "rgb8" else {}
    image = {"id": "cam", "format": kind, "data": b64encode(data).decode(), **size}
    parts = [{"type": "text", "text": "x"}, {"type": "image", "image": "cam"}]
    messages = [{"role": "user", "content": parts}]
    return {"op": "plan", "messages": messages, "images": [image], "max_tokens": 4, **more}


class SlowDecoder(MockBackend):
    """A mock whose images are decoded when the test lets them."""

    def __init__(self) -> None:
        super().__init__(ServeConfig())
        self.begun: list[str] = []
        self.go = threading.Semaphore(0)

    def read_images(self, ask: Any, scope: str = "") -> Any:
        if ask.images:
            self.begun.append(ask.id)
            assert self.go.acquire(timeout=PATIENCE_S)
        if "broken" in ask.id:
            raise PlanError("bad_request", "no image", field="images[0].data")
        return super().read_images(ask, scope)


@pytest.fixture
def slow(house: Any) -> tuple[SlowDecoder, Any]:
    backend = SlowDecoder()
    server = house.serve(backend)
    peer = house.peer(server)
    house._stack.callback(lambda: backend.go.release(100))
    return backend, peer


def test_nothing_waits_for_an_image_of_another_session(slow: tuple[SlowDecoder, Any]) -> None:
    backend, peer = slow
    for id in "abc":
        peer.send(**picture(id=id, session=id))
    until(lambda: len(backend.begun) == IMAGE_THREADS)
    assert peer.ask(op="health", id="h")["waiting"] == 3
    assert peer.ask(op="validate", id="v", prompt="x")["prompt_tokens"] == 1
    peer.send(**TEXT, id="text", session="text")
    assert peer.final("text")["type"] == "result"
    assert len(backend.begun) == IMAGE_THREADS
    for id in "acb":  # one that decodes, one that waits for a thread
        if id != "b":
            assert peer.ask(op="cancel", id="k", target=id)["cancelled"] is True
            assert peer.final(id)["code"] == "cancelled"
    backend.go.release(3)
    assert peer.final("b")["images"][0]["tokens"] == 64
    assert backend.begun == ["a", "b"], "what was cancelled is not decoded"
    counts = peer.ask(op="stats", id="s")["images"]
    assert (counts["plans"], counts["images"], counts["tokens"], counts["cached"]) == (1, 1, 64, 0)


@pytest.mark.parametrize("id", ["seen", "broken"])
def test_a_session_s_plans_keep_their_order(slow: tuple[SlowDecoder, Any], id: str) -> None:
    backend, peer = slow
    peer.send(**picture(id=id, session="arm"))
    peer.send(**TEXT, id="text", session="arm", preempt="none")
    assert peer.ask(op="validate", id="v", prompt="x")["type"] == "result", "the text is checked"
    assert peer.silent()
    backend.go.release()
    assert peer.final(id)["type"] == ("result" if id == "seen" else "error")
    assert peer.final("text")["type"] == "result"


def test_a_deadline_passes_while_an_image_is_decoded(slow: tuple[SlowDecoder, Any]) -> None:
    backend, peer = slow
    began = time.monotonic()
    reply = peer.ask(**picture(id="a", deadline_ms=60))
    assert reply["code"] == "deadline"
    assert time.monotonic() - began < PATIENCE_S / 2
    assert backend.begun == ["a"]


@pytest.mark.parametrize("name", ["bomb", "huge by its header", "line", "truncated", "polyglot"])
def test_a_server_outlives_hostile_files(house: Any, name: str) -> None:
    peer = house.peer(house.mock())
    data, kind = HOSTILE[name]()
    reply = peer.ask(**picture(data, kind, id="a"))
    assert (reply["code"], reply["field"]) == ("bad_request", "images[0].data")
    assert peer.ask(**picture(id="b"))["images"][0]["id"] == "cam"
    assert any(" id=b " in line and " images=1 " in line for line in house.log)
