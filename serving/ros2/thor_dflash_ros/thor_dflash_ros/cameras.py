"""The newest frame of each camera topic, as an image of a request."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.time import Time
from sensor_msgs.msg import CompressedImage, Image

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.protocol.errors import bad_request

NEWEST = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
"""Takes what reliable and best-effort publishers send."""
RAW = ("rgb8", "bgr8", "mono8")
"""Encodings of sensor_msgs/Image that are sent on as they are."""
FILES = {"jpeg": "jpeg", "jpg": "jpeg", "png": "png"}
"""Words in the format of sensor_msgs/CompressedImage -> format of TDP/1."""
Frame = Any
"""A message of either kind."""


@dataclass(frozen=True, slots=True)
class _Received:
    message: Frame
    at: float
    """Monotonic, s."""


class Cameras:
    """Subscriptions that keep the newest frame of each topic. Thread-safe."""

    def __init__(self, node: Node, images: Sequence[str], compressed: Sequence[str]) -> None:
        self._node = node
        self._newest: dict[str, _Received | None] = {}
        self._lock = threading.Lock()
        group, self._subscriptions = ReentrantCallbackGroup(), list[Any]()
        for kind, topics in ((Image, images), (CompressedImage, compressed)):
            for topic in filter(None, topics):
                self._newest[topic] = None
                keep = partial(self._keep, topic)
                self._subscriptions.append(
                    node.create_subscription(kind, topic, keep, NEWEST, callback_group=group)
                )

    def _keep(self, topic: str, message: Frame) -> None:
        with self._lock:
            self._newest[topic] = _Received(message, time.monotonic())

    def check(self, topics: Sequence[str]) -> None:
        """Refuse topics that the node does not listen to.

        Raises:
            PlanError: bad_request, naming the field.
        """
        for i, topic in enumerate(topics):
            if topic not in self._newest:
                known = ", ".join(self._newest) or "none"
                rule = f"a topic of the parameters image_topics or compressed_topics: {known}"
                raise bad_request(f"images[{i}] must be {rule} (got {topic})", f"images[{i}]")

    def take(self, topics: Sequence[str], max_age_s: float) -> dict[str, dict[str, Any]]:
        """Return the newest frames as `images` of a request, without ids. `max_age_s`: 0: any age.

        Raises:
            PlanError: bad_request, a frame has an encoding that is not sent; not_ready, there is
                none yet, or none that is new enough.
        """
        self.check(topics)
        found: dict[str, dict[str, Any]] = {}
        for i, topic in enumerate(topics):
            with self._lock:
                newest = self._newest[topic]
            if newest is None:
                text = f"images[{i}] must have a frame (got none from {topic} yet)"
                raise PlanError("not_ready", text, field=f"images[{i}]")
            age = self._age_s(newest)
            if max_age_s and age > max_age_s:
                rule = f"a frame of at most {max_age_s:g} s, max_image_age_s"
                text = f"images[{i}] must have {rule} (got one of {age:.2f} s from {topic})"
                raise PlanError("not_ready", text, field=f"images[{i}]")
            found[topic] = image_of(newest.message, f"images[{i}]")
        return found

    def _age_s(self, frame: _Received) -> float:
        """Since it came or, if that is longer, since its stamp: it may have come late, or again."""
        ages, stamp = [time.monotonic() - frame.at], frame.message.header.stamp
        if stamp.sec or stamp.nanosec:
            ages.append((self._node.get_clock().now() - Time.from_msg(stamp)).nanoseconds / 1e9)
        return max(ages)

    def close(self) -> None:
        """End the subscriptions."""
        for one in self._subscriptions:
            self._node.destroy_subscription(one)


def image_of(message: Frame, where: str) -> dict[str, Any]:
    """Return a frame as an image of a request, without an id. `where`: the field of errors.

    Raises:
        PlanError: bad_request, it has an encoding that is not sent.
    """
    if isinstance(message, CompressedImage):
        # "jpeg", "png", or as image_transport writes it: "rgb8; jpeg compressed bgr8".
        words = message.format.rpartition(";")[2].split()
        kind = FILES.get(words[0].lower()) if words else None
        if kind is None:
            rule = "of the format jpeg or png"
            raise bad_request(f"{where} must be {rule} (got {message.format!r})", where)
        return {"format": kind, "data": bytes(message.data)}
    if message.encoding not in RAW:
        rule = f"of the encoding {', '.join(RAW[:-1])} or {RAW[-1]}"
        raise bad_request(f"{where} must be {rule} (got {message.encoding!r})", where)
    size = {"width": message.width, "height": message.height, "step": message.step}
    return {"format": message.encoding, "data": bytes(message.data), **size}
