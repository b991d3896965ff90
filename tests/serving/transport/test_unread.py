"""A peer that leaves while its messages are still unread must not end the process that got them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

SERVER = """
import time
import zmq
from thor_dflash.config.serving import ServeConfig
from thor_dflash.serving.transport.router_socket import ReceivedMessage, RouterSocket

router = RouterSocket(ServeConfig(bind=("tcp://127.0.0.1:*",)))
client = zmq.Context().socket(zmq.DEALER)
client.linger = 1000
client.connect(router.endpoints[0])
for _ in range(500):
    client.send(b"{}")
time.sleep(0.3)
client.close()
time.sleep(2.0)  # as long as the interpreter may be held up by something else
messages, end = 0, time.monotonic() + 20
while messages < 64 and time.monotonic() < end:
    messages += sum(type(one) is ReceivedMessage for one in router.wait(0.05))
assert messages >= 64, messages
router.close()
"""
CLIENT = """
import threading
import time
import msgspec
import zmq
from thor_dflash.core.errors import PlanError
from thor_dflash.serving.client import PlanRequest, RemotePlanner

context = zmq.Context()
server = context.socket(zmq.ROUTER)
server.sndhwm = 0
server.linger = 0
port = server.bind_to_random_port("tcp://127.0.0.1")

def serve():
    *envelope, body = server.recv_multipart()
    id = msgspec.msgpack.decode(body)["id"]
    for seq in range(20000):
        chunk = {"v": 1, "id": id, "type": "chunk", "kind": "text", "seq": seq, "text": "word"}
        server.send_multipart([*envelope, msgspec.msgpack.encode(chunk)])

thread = threading.Thread(target=serve)
thread.start()
with RemotePlanner(f"tcp://127.0.0.1:{port}") as planner:
    try:
        request = PlanRequest(prompt="Bring the cup.", stream="all")
        for number, _ in enumerate(planner.stream(request)):
            if number == 5:  # the robot acts on a step
                thread.join()
                time.sleep(0.5)
                server.close()
                time.sleep(2.0)
    except PlanError as e:
        assert e.code == "unreachable", e
        assert number > 500, number
    else:
        raise AssertionError("the server is gone")
"""


def run(*scripts: str) -> Sequence[subprocess.Popen[str]]:
    """Start each script in a process of its own, side by side."""
    return [
        subprocess.Popen([sys.executable, "-c", s], stderr=subprocess.PIPE, text=True)
        for s in scripts
    ]


def test_a_process_outlives_a_peer_whose_messages_it_has_not_read() -> None:
    for process in run(SERVER, CLIENT):
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
