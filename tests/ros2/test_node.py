"""The ROS 2 node with real rclpy over a real DDS; server, node and robot are processes.

Needs .venv-ros, which `make ros` makes from wheels (x86-64); skipped without it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.image_files import file_of
from support.plan_formats import ROBOT
from support.ros_processes import PYTHON, Robotics
from support.waiting import until

from thor_dflash.core.tensors import Array
from thor_dflash.runtime.vision.decoder import RawSize, read_picture
from thor_dflash.serving.client import RemotePlanner
from thor_dflash.serving.planner.mock_images import LIMITS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-ros: make ros"),
]
Table = dict[str, Any]


@pytest.fixture
def ros(tmp_path: Path, worker_id: str) -> Iterator[Robotics]:
    it = Robotics(tmp_path, worker_id)
    yield it
    it.close()


def test_a_goal_gets_steps_and_a_plan_and_refused_goals_say_why(ros: Robotics) -> None:
    ros.server()
    (ros.directory / "schemas").mkdir()
    (ros.directory / "schemas/any.json").write_text('{"type": "object"}')
    node = ros.node(schema_dir=f"{ros.directory}/schemas", feedback="all")
    plan = ros.plan(schema="any")
    assert (plan["state"], plan["error_code"], plan["code"]) == ("succeeded", 0, "")
    assert plan["steps"] == [step["skill"] for step in plan["plan"]["steps"]]
    assert len(plan["steps"]) == 3
    assert plan["first_step_s"] < plan["s"] - 0.05  # a step comes while the plan goes on
    assert plan["progress"] > 0
    assert plan["session"] == "thor_dflash"
    assert ros.robot("latest", "/thor_dflash/latest_plan") == plan["plan"]
    late = ros.plan(deadline_ms=40, whole=True)
    assert (late["state"], late["error_code"]) == ("aborted", 900)
    assert late["code"] == "deadline_infeasible"
    assert "min_ms" in late["error_msg"]
    cut = ros.plan(deadline_ms=250)
    assert (cut["state"], cut["status"]) == ("succeeded", "partial")
    whole = ros.plan(deadline_ms=250, whole=True)
    assert (whole["state"], whole["error_code"], whole["code"]) == ("aborted", 901, "deadline")
    tree = ros.plan(skills_json=json.dumps(ROBOT), plan_format="bt_cpp_xml")
    assert (tree["state"], tree["plan"]["format"]) == ("succeeded", "bt_cpp_xml")
    assert tree["steps"] == [step["skill"] for step in tree["plan"]["steps"]]
    impossible = ros.plan(json_schema='{"type": "object", "required": ["nothing"]}')
    assert (impossible["state"], impossible["error_code"]) == ("aborted", 908)
    wrong: list[Table] = [
        {"prompt": ""}, {"schema": "none"}, {"messages_json": "[]"}, {"options_json": "[1]"},
        {"options_json": '{"priority": 1}'}, {"thinking": "maybe"}, {"preempt": 7},
        {"plan_format": "bt_cpp_xml"}, {"skills_json": "{}"},
    ]  # fmt: skip
    replies = ros.robot("plans", json.dumps(wrong))
    assert [reply["state"] for reply in replies] == ["rejected"] * len(wrong)
    assert ros.log().count("goal rejected") == 9
    fresh, old = ros.robot("stale")
    assert (fresh["state"], old["state"], old["error_code"]) == ("succeeded", "aborted", 904)
    node.send_signal(signal.SIGTERM)
    assert node.wait(10) == 0


def test_newer_goals_displace_and_cancels_are_fast(ros: Robotics) -> None:
    ros.server()
    ros.node()
    first, second, other = ros.robot("displace")
    assert (first["state"], first["error_code"]) == ("aborted", 903)
    assert second["state"] == other["state"] == "succeeded"
    assert [plan["state"] for plan in ros.robot("two")] == ["succeeded", "succeeded"]
    found = ros.robot("cancels", 20, 1)
    assert set(found["states"]) <= {"canceled", "succeeded"}
    assert found["states"]["canceled"] > 5
    assert found["worst_s"] < 0.1 * slack()


def test_a_node_that_is_managed(ros: Robotics) -> None:
    ros.server()
    ros.node(autostart="false")
    first, ended, again, again_ended = ros.robot("lifecycle")
    assert (ended, again_ended) == ("aborted", "aborted")
    assert first["state"] == again["state"] == "succeeded"


def test_a_node_in_a_namespace_with_skills_of_its_own(ros: Robotics) -> None:
    ros.server()
    (ros.directory / "robot.json").write_text(json.dumps(ROBOT))
    ros.node("-r", "__ns:=/arm0", skills_file=ros.directory / "robot.json")
    goals = json.dumps([{"plan_format": "nav2_waypoints"}, {"json_schema": '{"type": "object"}'}])
    way, plan = ros.robot("plans", goals, action="/arm0/thor_dflash/plan")
    assert [step["args"]["pose_id"] for step in way["plan"]["steps"]] == ["dock", "shelf"]
    assert (plan["state"], plan["session"]) == ("succeeded", "arm0_thor_dflash")


def test_goals_show_the_newest_frames_of_cameras(ros: Robotics) -> None:
    ros.server()
    raw = [f"/{name}/image" for name in ("front", "grey", "depth", "stopped", "silent")]
    files = ["/side/image/compressed", "/depth/image/compressedDepth"]
    ros.node(image_topics=raw, compressed_topics=files, max_image_age_s=60.0)
    chat = [{"role": "user", "content": [{"type": "image", "image": "/grey/image"}]}]
    goals: list[Table] = [
        {"images": ["/front/image", "/grey/image"]},
        {"images": ["/side/image/compressed"]},
        {"images": ["/grey/image"], "prompt": "", "messages_json": json.dumps(chat)},
        *({"images": ["/front/image", f"/{name}"]} for name in ("depth/image", "stopped/image",
          "silent/image", "depth/image/compressedDepth", "else")),
        {"images": ["/front/image"], "messages_json": json.dumps(chat)},
    ]  # fmt: skip
    jpeg = file_of(Image.new("RGB", (64, 48), "red"), "JPEG").hex()
    front, side, chatted, depth, stopped, silent, other, unknown, both = ros.robot(
        "cameras", jpeg, json.dumps(goals)
    )
    assert front["state"] == "succeeded", front
    assert [image["id"] for image in front["images"]] == ["/front/image", "/grey/image"]
    grey = np.repeat(np.arange(64, dtype=np.uint8)[None, :, None], 48, axis=0).repeat(3, axis=2)
    black = np.zeros((48, 64, 3), np.uint8)
    assert [image["sha256"] for image in front["images"]] == [digest(black), digest(grey)]
    assert "2 images" in front["plan"]["goal"]
    assert [image["tokens"] for image in side["images"]] == [70]
    assert chatted["images"][0]["sha256"] == digest(grey)
    assert [reply["state"] for reply in (unknown, both)] == ["rejected"] * 2
    assert "images[1]" in ros.log()
    refused = [
        (reply["error_code"], reply["retryable"]) for reply in (depth, other, stopped, silent)
    ]
    assert refused == [(900, False), (900, False), (906, True), (906, True)]
    words = ("16UC1", "compressedDepth", "/stopped/image", "/silent/image")
    for reply, word in zip((depth, other, stopped, silent), words, strict=True):
        assert reply["error_msg"].startswith("images[1]")
        assert word in reply["error_msg"]


def digest(pixels: Array) -> str:
    """The identity of a picture that a model's server makes of these pixels."""
    height, width, _ = pixels.shape
    size = {"width": width, "height": height}
    return read_picture(pixels.tobytes(), "rgb8", LIMITS, RawSize(**size)).digest.hex()


def test_a_server_that_ends_and_starts_again(ros: Robotics) -> None:
    ros.node(diagnostics_period_s=0.2)
    gone = ros.plan()
    assert (gone["state"], gone["error_code"]) == ("aborted", 907)
    assert gone["retryable"]
    server = ros.server()
    watch = ros.robot_process("watch", 600, action="/thor_dflash/plan")
    assert watch.stdout
    assert json.loads(watch.stdout.readline())[0] == 0
    assert ros.plan()["state"] == "succeeded"
    server.kill()
    server.wait()
    until_level(watch, 2)
    assert ros.plan()["code"] == "unreachable"
    ros.server()
    until_level(watch, 0)
    assert ros.plan()["state"] == "succeeded"
    watch.kill()


def until_level(watch: subprocess.Popen[str], level: int) -> None:
    assert watch.stdout
    assert any(json.loads(line)[0] == level for line in watch.stdout)


def test_a_node_that_is_killed_leaves_no_plan_behind(ros: Robotics) -> None:
    server = ros.server(cycle_ms=400)
    node = ros.node()
    robot = ros.robot_process("plans", action="/thor_dflash/plan")
    with RemotePlanner(ros.endpoint) as planner:
        until(lambda: bool(planner.health()["running"]))
    node.kill()
    assert server.stderr
    assert any("ended=cancelled" in line for line in server.stderr)
    robot.kill()


def test_the_node_imports_no_engine(ros: Robotics) -> None:
    script = (
        "import sys, thor_dflash_ros.node; "
        "assert not [m for m in sys.modules if m.startswith('thor_dflash.runtime.session')]; "
        "assert not {'tokenizers', 'jinja2', 'onnxruntime', 'cuda', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run([*ros.python, "-c", script], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_two_hundred_goals_with_cancels_at_random_moments(ros: Robotics) -> None:
    ros.server()
    ros.node()
    found = ros.robot("cancels", 200, 49)
    assert sum(found["states"].values()) == 200
    assert set(found["states"]) <= {"canceled", "succeeded"}
    assert found["median_s"] < 0.1


def slack() -> float:
    """How much slower than alone this machine may be: its waiting processes per core."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
