"""A robot of tests/ros2: runs one scenario against the node and prints one line of JSON. Started
with the Python of .venv-ros.
"""

import json
import random
import sys
import time

import rclpy
from action_msgs.msg import GoalStatus
from builtin_interfaces.msg import Duration
from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from rclpy.action import ActionClient
from rclpy.duration import Duration as DurationOf
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import String
from thor_dflash_msgs.action import Plan

STATES = {
    GoalStatus.STATUS_SUCCEEDED: "succeeded",
    GoalStatus.STATUS_CANCELED: "canceled",
    GoalStatus.STATUS_ABORTED: "aborted",
}
PATIENCE_S = 30.0
EXECUTOR: list[SingleThreadedExecutor] = []


class Robot(Node):
    """A client of the action."""

    def __init__(self, action: str = "/thor_dflash/plan") -> None:
        super().__init__(f"robot{random.randrange(10**9)}")
        self.client = ActionClient(self, Plan, action)

    def found(self) -> float:
        """Wait for the action server; the seconds it took."""
        began = time.monotonic()
        assert self.client.wait_for_server(PATIENCE_S), "no action server"
        return time.monotonic() - began

    def begin(self, **fields: object) -> "Goal":
        return Goal(self, Plan.Goal(**{"prompt": "Bring the cup.", **fields}))

    def plan(self, **fields: object) -> dict[str, object]:
        return self.begin(**fields).end()


class Goal:
    """A goal that was sent."""

    def __init__(self, robot: Robot, goal: Plan.Goal) -> None:
        self.began = time.monotonic()
        self.steps: list[tuple[str, float]] = []
        self.progress = 0
        self.handle = wait(robot.client.send_goal_async(goal, self._feedback))
        self.accepted_s = time.monotonic() - self.began

    def _feedback(self, message: object) -> None:
        if message.feedback.kind == Plan.Feedback.STEP:
            self.steps.append((message.feedback.skill, time.monotonic() - self.began))
        else:
            self.progress += 1

    def cancel(self) -> float:
        """Cancel; the seconds until the result is there."""
        began = time.monotonic()
        wait(self.handle.cancel_goal_async())
        self.reply = wait(self.handle.get_result_async())
        return time.monotonic() - began

    def end(self) -> dict[str, object]:
        """Wait for the result."""
        if not self.handle.accepted:
            return {"state": "rejected"}
        reply = wait(self.handle.get_result_async())
        took = time.monotonic() - self.began
        result = reply.result
        plan = json.loads(result.plan_json or "null")
        late = time.monotonic() + 0.5  # the last feedback may come after the result
        while plan and len(self.steps) < len(plan["steps"]) and time.monotonic() < late:
            rest(0.02)
        return {
            "state": STATES[reply.status], "error_code": result.error_code, "code": result.code,
            "error_msg": result.error_msg, "retryable": result.retryable, "status": result.status,
            "steps": [name for name, _ in self.steps], "plan_valid": result.plan_valid,
            "plan": plan, "s": took,
            "accepted_s": self.accepted_s, "first_step_s": self.steps[0][1] if self.steps else None,
            "e2e_ms": result.e2e_ms, "progress": self.progress,
            "session": json.loads(result.result_json or "{}").get("session"),
            "images": json.loads(result.result_json or "{}").get("images"),
        }  # fmt: skip


def wait(future: object) -> object:
    """The result of a future of rclpy. Nothing else spins: rclpy's action client loses an answer
    that another thread receives before the request is noted.
    """
    EXECUTOR[0].spin_until_future_complete(future, PATIENCE_S)
    assert future.done(), "no answer"
    return future.result()


def rest(seconds: float) -> None:
    """Handle what comes meanwhile."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        EXECUTOR[0].spin_once(left)


def plans(robot: Robot, goals: str = "[{}]") -> object:
    """Plans one after another."""
    results = []
    for fields in json.loads(goals):
        if "deadline_ms" in fields:
            ms = fields.pop("deadline_ms")
            fields["deadline"] = Duration(sec=ms // 1000, nanosec=ms % 1000 * 10**6)
        results.append(robot.plan(**fields))
    return results


def cancels(robot: Robot, count: str, seed: str) -> object:
    """Plans that are cancelled at random moments: their states, and how long cancels took."""
    pick = random.Random(int(seed))
    states: dict[str, int] = {}
    took = []
    for _ in range(int(count)):
        goal = robot.begin()
        if pick.random() < 0.1:
            state = goal.end()["state"]
        else:
            rest(pick.uniform(0.0, 0.3))
            took.append(goal.cancel())
            state = STATES[goal.reply.status]
        states[state] = states.get(state, 0) + 1
    return {"states": states, "worst_s": max(took), "median_s": sorted(took)[len(took) // 2]}


def displace(robot: Robot) -> object:
    """A newer goal of the session, and one of another session at the same time."""
    first = robot.begin()
    rest(0.1)
    second, other = robot.begin(), robot.begin(session="other")
    return [first.end(), second.end(), other.end()]


def two(robot: Robot) -> object:
    """Two clients with sessions of their own, at once."""
    left, right = robot.begin(session="left"), robot.begin(session="right")
    return [left.end(), right.end()]


def stale(robot: Robot) -> object:
    """A generation, then an older one."""
    return [robot.plan(generation=2), robot.plan(generation=1)]


def lifecycle(robot: Robot) -> object:
    """A node that waits for its manager: a plan when it is active; what its deactivation ends;
    then all of it again.
    """
    service = robot.create_client(ChangeState, "/thor_dflash/change_state")
    assert service.wait_for_service(PATIENCE_S)

    def change(name: str) -> None:
        request = ChangeState.Request()
        request.transition.id = vars(Transition)[f"TRANSITION_{name}"]
        assert wait(service.call_async(request)).success, name

    results = []
    for _ in range(2):
        change("CONFIGURE")
        change("ACTIVATE")
        robot.found()
        results.append(robot.plan())
        goal = robot.begin()
        rest(0.1)
        ending = goal.handle.get_result_async()
        change("DEACTIVATE")
        change("CLEANUP")
        results.append(STATES[wait(ending).status] if ending.done() else "unanswered")
    return results


def overhead(robot: Robot, count: str, bare_action: str) -> object:
    """Rows of docs/performance: what the node adds to a plan, what rclpy alone adds in the same
    minute, and how long a cancel takes.
    """
    bare = Robot(bare_action)
    EXECUTOR[0].add_node(bare)
    bare.found()
    both = [(robot.plan(), bare.plan()) for _ in range(int(count))]
    done = [plan for plan, _ in both]
    own, ros = (sorted(1e3 * pair[i]["s"] - pair[i]["e2e_ms"] for pair in both) for i in range(2))
    accepted = sorted(1e3 * plan["accepted_s"] for plan in done)
    cancelled = []
    for _ in range(int(count)):
        goal = robot.begin()
        rest(0.1)
        cancelled.append(1e3 * goal.cancel())
    rows = {
        "goal accepted, ms": accepted,
        "a plan: the robot's time less the server's, ms": own,
        "the same of an action server of rclpy alone, ms": ros,
        "cancel to result, ms": sorted(cancelled),
    }
    middle = int(count) // 2
    head = [["what", "median", "most"]]
    return head + [[k, round(v[middle], 1), round(v[-1], 1)] for k, v in rows.items()]


def cameras(robot: Robot, jpeg: str, goals: str) -> object:
    """Plans with what cameras show: a sharp and a grey one, depth, one that has stopped, and JPEG
    files as image_transport writes them.
    """
    now = robot.get_clock().now()
    past = (now - DurationOf(seconds=99)).to_msg()
    raw = {"height": 48, "width": 64, "step": 200, "data": bytes(200 * 48)}
    grey = {"height": 48, "width": 64, "step": 64, "data": bytes(range(64)) * 48}
    frames = {
        "/front/image": Image(encoding="rgb8", **raw),
        "/grey/image": Image(encoding="mono8", **grey),
        "/depth/image": Image(encoding="16UC1", **raw),
        "/stopped/image": Image(encoding="bgr8", **raw),
        "/side/image/compressed": CompressedImage(
            format="rgb8; jpeg compressed bgr8", data=bytes.fromhex(jpeg)
        ),
        "/depth/image/compressedDepth": CompressedImage(format="16UC1; compressedDepth png"),
    }
    publishers = {}
    for topic, frame in frames.items():
        frame.header.stamp = past if "stopped" in topic else now.to_msg()
        publishers[topic] = robot.create_publisher(type(frame), topic, 1)
    until = time.monotonic() + PATIENCE_S
    while not all(p.get_subscription_count() for p in publishers.values()):
        assert time.monotonic() < until, "the node does not listen"
        rest(0.05)
    for _ in range(20):  # as cameras do: any frame may be lost
        for topic, publisher in publishers.items():
            publisher.publish(frames[topic])
        rest(0.05)
    return plans(robot, goals)


def watch(robot: Robot, seconds: str) -> object:
    """The states that /diagnostics reports meanwhile."""
    seen: list[tuple[int, str]] = []

    def keep(array: DiagnosticArray) -> None:
        status = array.status[0]
        now = (ord(status.level), status.message)
        if not seen or seen[-1] != now:
            seen.append(now)
            print(json.dumps(now), flush=True)

    robot.create_subscription(DiagnosticArray, "/diagnostics", keep, 10)
    rest(float(seconds))
    return seen


def latest(robot: Robot, topic: str) -> object:
    """The last plan, as a late subscriber gets it."""
    texts: list[str] = []
    kept = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
    robot.create_subscription(String, topic, lambda message: texts.append(message.data), kept)
    until = time.monotonic() + PATIENCE_S
    while not texts and time.monotonic() < until:
        rest(0.05)
    return json.loads(texts[-1])


def main() -> None:
    mode, action, *arguments = sys.argv[1:]
    rclpy.init()
    robot = Robot(action)
    EXECUTOR.append(SingleThreadedExecutor())
    EXECUTOR[0].add_node(robot)
    found = robot.found() if mode not in ("watch", "lifecycle") else 0.0
    value = globals()[mode](robot, *arguments)
    print(json.dumps({"found_s": found, "value": value}), flush=True)
    rclpy.shutdown()


if __name__ == "__main__":
    main()
