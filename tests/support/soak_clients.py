"""Clients that ask for plans, cancel them, disconnect and reconnect at random, with checks of every
answer.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
import zmq

PROMPTS = ("Pick the mug.", "Wait.", "Put the red cup on the shelf.", "Bring tray a.", "Stop it.")
LENGTH = 24
"""Tokens of the longest answer."""
PATIENCE_S = 60.0


@dataclass
class Robot:
    """A client: its connection and the requests that are not answered yet."""

    context: zmq.Context[zmq.Socket[bytes]]
    endpoint: str
    name: str
    pending: dict[str, dict[str, Any]] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(0)

    def connect(self) -> None:
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(self.endpoint)

    def send(self, fields: dict[str, Any]) -> None:
        self.socket.send_multipart([b"", msgspec.msgpack.encode(fields)])

    def receive(self) -> dict[str, Any]:
        assert self.socket.poll(1e3 * PATIENCE_S)
        reply: dict[str, Any] = msgspec.msgpack.decode(self.socket.recv_multipart()[-1])
        return reply

    def drain(self, ms: int = 20) -> None:
        """Read and drop messages until none comes for `ms` milliseconds."""
        while self.socket.poll(ms):
            self.socket.recv_multipart()

    def leave(self) -> None:
        """Disconnect, whatever is pending, and reconnect; the pending answers are given up."""
        self.socket.close(0)
        self.pending.clear()
        self.connect()


@dataclass
class Soak:
    """Many random requests of several clients to one server."""

    endpoint: str
    seed: int
    robots: int = 3
    tally: Counter[str] = field(default_factory=Counter)
    late: list[float] = field(default_factory=list)
    """Times from a cancel to the plan's answer `cancelled`, ms."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.fleet = [Robot(self.context, self.endpoint, f"r{i}") for i in range(self.robots)]
        self.asked = 0
        self.cancelled: dict[str, float] = {}
        self.expected = {prompt: self._alone(prompt) for prompt in PROMPTS}

    def run(self, count: int) -> None:
        """Ask for `count` plans and check that each is answered once, unless its robot left."""
        while self.asked < count:
            self._act(self.rng.choice(self.fleet))
            self._collect(self.rng.choice((0, 0, 5, 20)))
        end = time.monotonic() + PATIENCE_S
        while any(robot.pending for robot in self.fleet):
            assert time.monotonic() < end, [robot.pending for robot in self.fleet]
            self._collect(50)
        self._collect(100)  # a second answer would come now

    def close(self) -> None:
        for robot in self.fleet:
            robot.socket.close(0)
        self.context.term()

    def _alone(self, prompt: str) -> list[int]:
        robot = self.fleet[0]
        robot.send(self._plan("alone", prompt, LENGTH) | {"session": "alone"})
        assert robot.socket.poll(1e3 * PATIENCE_S)
        reply = msgspec.msgpack.decode(robot.socket.recv_multipart()[-1])
        tokens: list[int] = reply["tokens"]
        return tokens

    @staticmethod
    def _plan(id: str, prompt: str, length: int) -> dict[str, Any]:
        fields: dict[str, Any] = {"v": 1, "op": "plan", "id": id, "prompt": prompt}
        return {**fields, "thinking": "off", "max_tokens": length, "return": ["tokens"]}

    def _act(self, robot: Robot) -> None:
        roll = self.rng.random()
        if roll < 0.02:
            robot.leave()
            self.tally["left"] += 1
        elif roll < 0.08 and robot.pending:
            target = self.rng.choice(list(robot.pending))
            self.cancelled.setdefault(target, time.monotonic())
            robot.send({"v": 1, "op": "cancel", "id": f"k{self.asked}", "target": target})
        elif len(robot.pending) < 2:
            self._ask(robot)
        else:
            self._collect(20)

    def _ask(self, robot: Robot) -> None:
        rng = self.rng
        fields = self._plan(f"{robot.name}-{self.asked}", rng.choice(PROMPTS), rng.randint(1, 24))
        fields["session"] = rng.choice((robot.name, f"{robot.name}-arm", "shared"))
        fields["preempt"] = rng.choice(("none", "none", "same_session", "lower"))
        fields["priority"] = rng.choice((5, 5, 5, rng.randint(0, 9)))
        fields["stream"] = rng.choice((False, False, "text", "all"))
        if rng.random() < 0.25:
            fields["deadline_ms"] = rng.choice((1, 100, 300, 5000))
            fields["on_deadline"] = rng.choice(("partial", "error"))
        robot.send(fields)
        robot.pending[fields["id"]] = fields
        self.asked += 1

    def _collect(self, ms: int) -> None:
        for robot in self.fleet:
            while robot.socket.poll(ms):
                ms = 0
                self._heard(robot, msgspec.msgpack.decode(robot.socket.recv_multipart()[-1]))

    def _heard(self, robot: Robot, reply: dict[str, Any]) -> None:
        id = reply["id"]
        if reply["type"] == "ack":
            return
        assert id not in robot.answered, f"answered twice: {reply}"
        asked = robot.pending.get(id)
        assert asked is not None, f"not asked for: {reply}"
        if reply["type"] == "chunk":
            return
        del robot.pending[id]
        robot.answered.add(id)
        if id in self.cancelled and reply.get("code") == "cancelled":
            self.late.append(1e3 * (time.monotonic() - self.cancelled[id]))
        self.tally[reply.get("code") or reply["finish_reason"]] += 1
        if reply["type"] == "result":
            self._same(asked, reply)

    def _same(self, asked: dict[str, Any], reply: dict[str, Any]) -> None:
        """Check that the tokens are those that the prompt gets when nothing else is running."""
        whole = self.expected[asked["prompt"]][: asked["max_tokens"]]
        tokens = list(reply["tokens"])
        if reply["finish_reason"] == "deadline":
            assert tokens == whole[: len(tokens)], asked
        else:
            assert tokens == whole, asked
