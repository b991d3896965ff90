"""Server, ROS 2 node and robot as processes of their own, for tests/ros2."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.server_process import RUN

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-ros/bin/python"
NODE = ROOT / "serving/ros2/thor_dflash_ros"
ROBOT = ROOT / "tests/ros2/robot.py"
Table = dict[str, Any]


def environment(worker: str, logs: Path) -> list[str]:
    """What starts a process of ROS. Those of one test worker see each other, and no other ROS on
    this network.
    """
    domain = 1 + int(worker.removeprefix("gw") or 0) if worker != "master" else 90
    # With these two set, the wheels would not look for their libraries.
    unset = ["-u", "LD_LIBRARY_PATH", "-u", "_ROS_WHEELS_BOOTSTRAP_COMPLETE"]
    return [
        "env", *unset, "ROS_AUTOMATIC_DISCOVERY_RANGE=LOCALHOST", f"ROS_DOMAIN_ID={domain}",
        "RMW_IMPLEMENTATION=rmw_fastrtps_cpp", f"ROS_LOG_DIR={logs}",
        f"PYTHONPATH={ROOT}:{NODE}", "PYTHONUNBUFFERED=1", str(PYTHON),
    ]  # fmt: skip


class Robotics:
    """Starts servers, nodes and robots; ends them after the test."""

    def __init__(self, directory: Path, worker: str) -> None:
        self.directory = directory
        self.endpoint = f"ipc://{directory}/plan"
        self.python = environment(worker, directory)
        self.children: list[subprocess.Popen[str]] = []

    def start(self, command: list[Any], **more: Any) -> subprocess.Popen[str]:
        child = subprocess.Popen([str(word) for word in command], text=True, **more)
        self.children.append(child)
        return child

    def server(self, cycle_ms: int = 20) -> subprocess.Popen[str]:
        serve = [sys.executable, "-c", RUN, "serve", "--mock", "--mock-cycle-ms", cycle_ms]
        child = self.start([*serve, "--bind", self.endpoint], stderr=subprocess.PIPE)
        assert child.stderr
        assert any(" ready after " in line for line in child.stderr)
        return child

    def node(self, *arguments: str, **parameters: object) -> subprocess.Popen[str]:
        given = {"endpoint": self.endpoint, **parameters}
        words = [word for name, value in given.items() for word in ("-p", f"{name}:={value}")]
        log = (self.directory / "node.log").open("a")
        command = ["-m", "thor_dflash_ros.node", "--ros-args", *words, *arguments]
        return self.start([*self.python, *command], stdout=log, stderr=log)

    def robot_process(self, mode: str, *arguments: object, action: str) -> subprocess.Popen[str]:
        command = [*self.python, ROBOT, mode, action, *arguments]
        return self.start(command, stdout=subprocess.PIPE)

    def robot(self, mode: str, *arguments: object, action: str = "/thor_dflash/plan") -> Any:
        child = self.robot_process(mode, *arguments, action=action)
        out, _ = child.communicate(timeout=300)
        assert child.returncode == 0, f"{out}\n{self.log()}"
        return json.loads(out.splitlines()[-1])["value"]

    def plan(self, **fields: object) -> Table:
        (value,) = self.robot("plans", json.dumps([fields]))
        return dict(value)

    def log(self) -> str:
        path = self.directory / "node.log"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        for child in self.children:
            child.send_signal(signal.SIGINT)
        for child in self.children:
            try:
                child.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.communicate()
        assert "Traceback" not in self.log(), self.log()
