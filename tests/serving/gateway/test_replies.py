"""What OpenAI's clients are asked to send again, and what they must not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, get_args

import msgspec
import pytest
import zmq
from openai import APIStatusError, OpenAI
from support.http_gateway import CHAT, gateway

from thor_dflash.core.errors import Code, PlanError
from thor_dflash.serving.client import LostRequest
from thor_dflash.serving.gateway import replies


@pytest.mark.parametrize("code", get_args(Code))
def test_only_the_state_of_a_server_is_a_reason_to_send_a_request_again(code: Code) -> None:
    reply = replies.refused(PlanError(code, "x"))
    again = reply.headers["x-should-retry"]
    assert again == ("true" if code in ("busy", "not_ready", "unreachable") else "false")
    assert replies.refused(LostRequest(code, "x")).headers["x-should-retry"] == "false"


@contextmanager
def ending(plans: list[Any]) -> Iterator[str]:
    """A server that every plan ends, and that is started again each time; its endpoint."""
    over = threading.Event()
    with zmq.Context() as context:

        def bound(endpoint: str) -> zmq.Socket[bytes]:
            router = context.socket(zmq.ROUTER)
            router.linger = 0
            while True:
                with suppress(zmq.ZMQError):  # the socket before it is not closed at once
                    router.bind(endpoint)
                    return router

        def run(router: zmq.Socket[bytes]) -> None:
            endpoint = str(router.LAST_ENDPOINT.decode())
            while not over.is_set():
                if not router.poll(20):
                    continue
                *peer, body = router.recv_multipart()
                request = msgspec.msgpack.decode(body)
                if request["op"] == "plan":
                    plans.append(request)
                    router.close()
                    router = bound(endpoint)
                    continue
                reply = {"type": request["op"], "id": request["id"], "ready": True,
                         "model": {"model": "mock"}, "prefixes": [],
                         "limits": {"max_message": 1 << 20}}  # fmt: skip
                router.send_multipart([*peer, msgspec.msgpack.encode(reply)])
            router.close()

        router = bound("tcp://127.0.0.1:*")
        thread = threading.Thread(target=run, args=(router,))
        endpoint = router.LAST_ENDPOINT.decode()
        thread.start()
        yield endpoint
        over.set()
        thread.join(20)


def test_a_request_that_ends_its_server_is_sent_once() -> None:
    """By default OpenAI's client tries twice more, unless the reply tells it not to."""
    plans: list[Any] = []
    with (
        ending(plans) as first,
        ending(plans) as second,
        gateway(first, second) as address,
        OpenAI(base_url=f"{address}/v1", api_key="none") as openai,
    ):
        with pytest.raises(APIStatusError) as caught:
            openai.chat.completions.create(model="", messages=CHAT)
        assert (caught.value.status_code, caught.value.code) == (503, "unreachable")
    assert len(plans) == 1
