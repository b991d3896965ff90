"""The lifecycle node `thor_dflash`: action `~/plan`, `~/latest_plan`, `/diagnostics`.

An asyncio loop in a thread of its own holds the client; each goal runs on a thread of rclpy's
executor, which waits for the loop.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rcl_interfaces.msg import ParameterDescriptor
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup, ReentrantCallbackGroup
from rclpy.executors import MultiThreadedExecutor
from rclpy.lifecycle import LifecycleNode, TransitionCallbackReturn
from rclpy.qos import DurabilityPolicy, QoSProfile
from rclpy.signals import SignalHandlerOptions
from std_msgs.msg import String
from thor_dflash_msgs.action import Plan

from thor_dflash.cli.skill_file import read_skills
from thor_dflash.core.errors import ConfigError, PlanError, ThorError
from thor_dflash.serving.client import AsyncPlanner, Chunk, Options, Result
from thor_dflash.serving.protocol.skills import SkillSet
from thor_dflash.serving.transport import access
from thor_dflash_ros.cameras import Cameras
from thor_dflash_ros.goal import failure_of, feedback_of, request_of, result_of

PARAMETERS: dict[str, tuple[Any, str]] = {
    "endpoint": ("tcp://127.0.0.1:5571", "where the plan server is"),
    "keys_dir": ("", "directory of a client's CURVE keys; empty: not encrypted"),
    "token_file": ("", "file with the secret of a server that has serve.token_file"),
    "session": ("", "session of goals that name none; empty: the node's full name"),
    "schema_dir": ("", "directory of the schemas NAME.json that goals name"),
    "skills_file": ("", "skills (.yaml, .toml, .json) of goals that have no schema of their own"),
    "image_topics": ([""], "topics of sensor_msgs/Image that goals may name"),
    "compressed_topics": ([""], "topics of sensor_msgs/CompressedImage that goals may name"),
    "max_image_age_s": (1.0, "oldest frame of a goal; 0: any"),
    "max_message": (
        1 << 20,
        "longest request, bytes beside its images: the server's serve.max_message",
    ),
    "connect_timeout_s": (1.0, "longest wait for a connection"),
    "plan_timeout_s": (120.0, "longest wait for a plan without a deadline, or its next step"),
    "max_goals": (4, "goals at once; more are rejected"),
    "feedback": ("steps", "steps, or all: also how far a plan is"),
    "diagnostics_period_s": (1.0, "period of /diagnostics"),
    "autostart": (True, "configure and activate at the start"),
}
"""Parameter -> default, description. They are read when the node is configured."""
HEALTH_S = 0.8
"""Longest wait for the server's health."""
CANCEL_S = 1.0
"""Longest wait for a goal to be in the state CANCELING."""
STOP_S = 2.0
"""Longest wait for the goals that a deactivation ends."""
SPIN_S = 0.1
"""Longest wait of the executor before it looks whether the node ends."""
ANSWER_S = 0.2
"""Time for rclpy to send the results of goals that have ended: it does so after their callbacks."""
LEVELS = {"OK": DiagnosticStatus.OK, "WARN": DiagnosticStatus.WARN, "ERROR": DiagnosticStatus.ERROR}


class PlannerNode(LifecycleNode):
    """A client of one plan server."""

    def __init__(self) -> None:
        super().__init__("thor_dflash")
        for name, (value, text) in PARAMETERS.items():
            self.declare_parameter(name, value, ParameterDescriptor(description=text))
        self._set = {name: self.get_parameter(name).value for name in PARAMETERS}
        self._group = ReentrantCallbackGroup()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._planner: AsyncPlanner | None = None
        self._skills: SkillSet | None = None
        self._cameras: Cameras | None = None
        self._server: ActionServer | None = None
        self._timer: Any = None
        self._futures: dict[bytes, Future[Result]] = {}
        self._accepted = 0
        self._closing = False
        self._lock = threading.Lock()

    @property
    def setting(self) -> dict[str, Any]:
        """The parameters, as of the last configuration."""
        return self._set

    # --- lifecycle

    def on_configure(self, state: Any) -> TransitionCallbackReturn:
        """Read the parameters and make the client. The server may start later."""
        self._set = {name: self.get_parameter(name).value for name in PARAMETERS}
        try:
            file = self._set["skills_file"]
            self._skills = read_skills(Path(file)) if file else None
            self._planner = self._wait(self._connect())
        except ThorError as e:
            self.get_logger().error(str(e))
            return TransitionCallbackReturn.FAILURE
        self._cameras = Cameras(self, self._set["image_topics"], self._set["compressed_topics"])
        kept = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self._latest = self.create_publisher(String, "~/latest_plan", kept)
        self._diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", 10)
        self._timer = self.create_timer(
            self._set["diagnostics_period_s"], self._diagnose, MutuallyExclusiveCallbackGroup()
        )
        return TransitionCallbackReturn.SUCCESS

    async def _connect(self) -> AsyncPlanner:
        if self._set["feedback"] not in ("steps", "all"):
            raise ConfigError(f"feedback must be steps or all (got {self._set['feedback']})")
        name = self.get_fully_qualified_name().strip("/").replace("/", "_")
        file = self._set["token_file"]
        options = Options(
            timeout_s=float(self._set["connect_timeout_s"]),
            plan_timeout_s=float(self._set["plan_timeout_s"]),
            retries=0,  # a goal that was displaced must not come back
            session=self._set["session"] or name[-64:],
            keys=self._set["keys_dir"],
            token=access.read_token(file) if file else None,
            max_message=self._set["max_message"],
        )
        return AsyncPlanner(self._set["endpoint"], options)

    def on_activate(self, state: Any) -> TransitionCallbackReturn:
        """Take goals."""
        self._server = ActionServer(
            self,
            Plan,
            "~/plan",
            self._execute,
            goal_callback=self._goal,
            cancel_callback=self._cancel,
            callback_group=self._group,
        )
        return super().on_activate(state)

    def on_deactivate(self, state: Any) -> TransitionCallbackReturn:
        """End the goals, and take no more."""
        self.end_goals()
        if self._server is not None:
            self._server.destroy()
            self._server = None
        return super().on_deactivate(state)

    def on_cleanup(self, state: Any) -> TransitionCallbackReturn:
        """Close the client."""
        if self._timer is not None:
            self.destroy_timer(self._timer)
            self.destroy_publisher(self._latest)
            self.destroy_publisher(self._diagnostics)
            self._timer = None
        if self._cameras is not None:
            self._cameras.close()
            self._cameras = None
        planner, self._planner = self._planner, None
        if planner is not None:
            self._wait(planner.close())
        return TransitionCallbackReturn.SUCCESS

    def on_shutdown(self, state: Any) -> TransitionCallbackReturn:
        """Deactivate and clean up."""
        self.on_deactivate(state)
        return self.on_cleanup(state)

    def end_goals(self) -> None:
        """Cancel the plans of all goals; they end as aborted, with the code `cancelled`."""
        if not self._accepted:
            return
        until = time.monotonic() + STOP_S
        while self._accepted and time.monotonic() < until:
            for future in list(self._futures.values()):
                future.cancel()
            time.sleep(0.005)
        time.sleep(ANSWER_S)

    def _wait(self, coroutine: Any) -> Any:
        """Run a coroutine on the client's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # --- goals

    def _goal(self, goal: Any) -> GoalResponse:
        """Check what needs no server: the sender waits for this answer."""
        try:
            self._camera_topics.check(goal.images)
            request_of(goal, self._set, self._skills)
        except PlanError as e:
            self.get_logger().warning(f"goal rejected: {e.message}")
            return GoalResponse.REJECT
        with self._lock:
            if self._accepted >= self._set["max_goals"]:
                self.get_logger().warning(f"goal rejected: max_goals is {self._accepted}")
                return GoalResponse.REJECT
            self._accepted += 1
        return GoalResponse.ACCEPT

    def _cancel(self, handle: Any) -> CancelResponse:
        # The goal is CANCELING only after this returns: see _canceled.
        if (future := self._futures.get(bytes(handle.goal_id.uuid))) is not None:
            future.cancel()
        return CancelResponse.ACCEPT

    def _execute(self, handle: Any) -> Any:
        key = bytes(handle.goal_id.uuid)
        future: Future[Result] = asyncio.run_coroutine_threadsafe(self._follow(handle), self._loop)
        self._futures[key] = future
        try:
            if handle.is_cancel_requested:  # before there was a future
                future.cancel()
            return self._end(handle, future)
        finally:
            del self._futures[key]
            with self._lock:
                self._accepted -= 1

    async def _follow(self, handle: Any) -> Result:
        assert self._planner is not None, "an active node has a client"
        frames = self._camera_topics.take(handle.request.images, self._set["max_image_age_s"])
        request = request_of(handle.request, self._set, self._skills, frames)
        async for event in self._planner.stream(request):
            if isinstance(event, Result):
                return event
            self._publish_feedback(handle, event)
        raise AssertionError("a stream ends with its result")

    @property
    def _camera_topics(self) -> Cameras:
        assert self._cameras is not None, "an active node has its subscriptions"
        return self._cameras

    def _publish_feedback(self, handle: Any, chunk: Chunk) -> None:
        message = feedback_of(chunk, self.get_clock().now().to_msg())
        if message is not None:
            handle.publish_feedback(message)

    def _end(self, handle: Any, future: Future[Result]) -> Any:
        """Wait for the plan and set the goal's final state."""
        try:
            message = result_of(future.result())
        except CancelledError:
            message = failure_of(PlanError("cancelled", "the goal was cancelled"))
            if self._canceled(handle):
                handle.canceled()
                return message
        except PlanError as e:
            message = failure_of(e)
        if message.error_code == Plan.Result.OK:
            self._latest.publish(String(data=message.plan_json))
            handle.succeed()
        else:
            handle.abort()
        return message

    def _canceled(self, handle: Any) -> bool:
        """Whether the client cancelled the goal, and not the node. rclpy moves a goal to CANCELING
        after the callback that ends its plan, and `canceled` is no transition before.
        """
        until = time.monotonic() + CANCEL_S
        while not handle.is_cancel_requested:
            if self._server is None or time.monotonic() > until:
                return False
            time.sleep(0.001)
        return True

    # --- diagnostics

    def _diagnose(self) -> None:
        status = DiagnosticStatus(
            name=f"{self.get_name()}: plan server", hardware_id=self._set["endpoint"]
        )
        try:
            health = asyncio.wait_for(self._health(), HEALTH_S)
            # With a limit of its own: the loop may have been stopped before it began.
            values = asyncio.run_coroutine_threadsafe(health, self._loop).result(2 * HEALTH_S)
            status.level, status.message = LEVELS[values["level"]], values["state"]
            status.values = [KeyValue(key=k, value=str(v)) for k, v in values.items()]
        except (PlanError, TimeoutError, CancelledError) as e:
            status.level = DiagnosticStatus.ERROR
            status.message = e.code if isinstance(e, PlanError) else "unreachable"
        if self._closing:
            return
        array = DiagnosticArray(status=[status])
        array.header.stamp = self.get_clock().now().to_msg()
        self._diagnostics.publish(array)

    async def _health(self) -> dict[str, Any]:
        assert self._planner is not None, "a configured node has a client"
        health, stats = await self._planner.health(), await self._planner.stats()
        spec, e2e = stats["spec"], stats["percentiles"]["e2e_ms"] or {}
        envelope = ("v", "id", "type", "seq")
        return {
            **{key: value for key, value in health.items() if key not in envelope},
            "accept_len": accept_len(spec),
            "e2e_ms p50": e2e.get("p50"),
            "e2e_ms p90": e2e.get("p90"),
            "refused": sum(stats["refused"].values()),
        }

    def close(self) -> None:
        """End the goals, the timer and the client, before rclpy is shut down."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        self.end_goals()
        if self._planner is not None:
            with suppress(PlanError):
                self._wait(self._planner.close())
        self._wait(_cancel_others())  # diagnostics that wait for an answer
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)


async def _cancel_others() -> None:
    """Cancel every other task of this loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def accept_len(spec: dict[str, Any]) -> float | None:
    """Committed tokens per cycle since the server's start."""
    cycles = spec.get("cycles", 0)
    return round(1 + spec.get("accepted", 0) / cycles, 2) if cycles else None


def main() -> None:
    """Run the node until SIGINT or SIGTERM."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    # Its own handlers would shut the context down under goals that are being ended.
    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
    node = PlannerNode()
    executor = MultiThreadedExecutor(num_threads=max(1, node.setting["max_goals"]) + 4)
    executor.add_node(node)
    ended = threading.Event()
    spinning = threading.Thread(target=_spin, args=(executor, ended))
    spinning.start()
    if node.setting["autostart"]:
        node.trigger_configure()
        node.trigger_activate()
    stop.wait()
    node.close()
    # Before the executor is shut down: that frees handles which a spinning thread waits on.
    ended.set()
    spinning.join()
    executor.shutdown(timeout_sec=STOP_S)
    node.destroy_node()
    rclpy.shutdown()


def _spin(executor: MultiThreadedExecutor, ended: threading.Event) -> None:
    while not ended.is_set():
        executor.spin_once(timeout_sec=SPIN_S)


if __name__ == "__main__":
    main()
