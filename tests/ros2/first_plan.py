"""Measures the way from a checkout to an action answered with a plan, with tests/ on the path:

    python tests/ros2/first_plan.py

It installs ROS from wheels into .venv-ros, which must not be there, then runs three commands: a
plan server, the node, a robot with a goal. On a machine with ROS the last two are `ros2 launch` and
`ros2 action send_goal`, which wheels do not have.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.ros_processes import PYTHON, ROOT, Robotics


def main() -> None:
    venv = PYTHON.parents[1]
    if venv.exists():
        sys.exit(f"{venv} must not exist")
    began = time.monotonic()
    setup = [str(ROOT / "tests/ros2/setup.sh"), str(venv), sys.executable]
    subprocess.run(setup, check=True, stdout=sys.stderr)
    installed = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        ros = Robotics(Path(directory), "master")
        ros.server()
        served = time.monotonic()
        ros.node()
        plan = ros.plan()
        planned = time.monotonic()
        ros.close()
    assert plan["state"] == "succeeded", plan
    rows = [
        ["what", "s"],
        ["installation: rclpy, Fast DDS, messages", round(installed - began, 1)],
        ["1: server, until it is ready", round(served - installed, 1)],
        ["2, 3: node and goal, until the plan", round(planned - served, 1)],
    ]
    print(json.dumps({"first plan": rows}))


if __name__ == "__main__":
    main()
