"""Measures what the node adds: python tests/ros2/measure.py COUNT, with tests/ on the path."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from support.ros_processes import Robotics


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        ros = Robotics(Path(directory), "master")
        began = time.monotonic()
        ros.server()
        ros.node()
        plan = ros.plan()
        ready = time.monotonic() - began
        assert plan["state"] == "succeeded"
        ros.start([*ros.python, Path(__file__).parent / "bare_server.py"])
        rows = ros.robot("overhead", sys.argv[1], "/bare/plan")
        rows.append(["server, node and robot started, first plan answered, s", round(ready, 1), ""])
        ros.close()
    print(json.dumps({"ros2": rows}))


if __name__ == "__main__":
    main()
