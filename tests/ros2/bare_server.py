"""An action server of rclpy alone, which waits as long as the mock plans: what of the node's cost
is ROS's. Started by measure.py with the Python of .venv-ros.
"""

import time

import rclpy
from rclpy.action import ActionServer
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.executors import ExternalShutdownException, MultiThreadedExecutor
from rclpy.node import Node
from thor_dflash_msgs.action import Plan


def execute(goal: object) -> object:
    """Three steps in 0.3 s."""
    began = time.monotonic()
    time.sleep(0.2)
    for index in range(3):
        time.sleep(0.035)
        goal.publish_feedback(Plan.Feedback(kind=Plan.Feedback.STEP, index=index))
    goal.succeed()
    return Plan.Result(e2e_ms=1e3 * (time.monotonic() - began))


def main() -> None:
    rclpy.init()
    node = Node("bare")
    ActionServer(node, Plan, "~/plan", execute, callback_group=ReentrantCallbackGroup())
    executor = MultiThreadedExecutor(8)
    executor.add_node(node)
    try:
        executor.spin()
    except (KeyboardInterrupt, ExternalShutdownException):
        return


if __name__ == "__main__":
    main()
