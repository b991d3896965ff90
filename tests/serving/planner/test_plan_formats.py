"""Plans that are no JSON steps: what the grammar takes, the reader takes, and nothing else."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from support.plan_formats import DOMAIN, ROBOT, format_of, skills
from support.serving_fixtures import House

from thor_dflash.cli import main
from thor_dflash.cli.arguments import PLAN_FORMATS
from thor_dflash.core.errors import PlanError
from thor_dflash.serving.planner.answer_rule import AnswerRule, rule_of
from thor_dflash.serving.protocol.messages import PlanRequest
from thor_dflash.serving.protocol.skills import PlanFormatName

HEAD = '<root BTCPP_format="4" main_tree_to_execute="Plan"><BehaviorTree ID="Plan">'
TAIL = "</BehaviorTree></root>"
BYTES = LLTokenizer("byte")
END = BYTES.eos_token
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def tree(inside: str) -> str:
    return HEAD + inside + TAIL


def nested(levels: int) -> str:
    return tree("<Sequence>" * levels + '<Pick object="cup"/>' + "</Sequence>" * levels)


@cache
def rule(name: PlanFormatName, given: str = "") -> AnswerRule:
    return rule_of(PlanRequest(prompt="x", skills=skills(given or name), plan_format=name))


@cache
def start(name: PlanFormatName) -> LLMatcher:
    made = rule(name)
    source = made.lark
    if made.schema is not None:
        source = LLMatcher.grammar_from_json_schema(
            made.schema.text, overrides={"whitespace_flexible": False}
        )
    matcher = LLMatcher(BYTES, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def grammar_takes(name: PlanFormatName, text: str) -> bool:
    matcher, data = start(name).deep_copy(), list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def reader_takes(name: PlanFormatName, text: str) -> bool:
    return rule(name).format.read(text, whole=True)[1]


RIGHT: dict[PlanFormatName, list[str]] = {
    "bt_cpp_xml": [
        nested(4),
        tree('<Pick object="mug_red"/>'),
        tree('<Pick object="&lt;&quot;it\'s&quot; &amp; &gt;"/>'),
        tree('<Fallback><MoveBy x="-1.5"/><Say text="l&apos;&#38;"/></Fallback>').replace(
            "&#38;", ""
        ),
        tree('<RetryUntilSuccessful num_attempts="3"><Wait/></RetryUntilSuccessful>'),
        tree('<Sequence><Grip hand="left" closed="true"/><Turn n="-3"/></Sequence>'),
        tree(f'<Say text="{"é&amp;" * 4}"/>'),
    ],
    "pddl_plan": ["(pick cup)\n", "(wait)\n(place cup table)\n(pick mug_red)\n"],
    "nav2_waypoints": [
        '{"frame_id":"map","waypoints":[{"pose_id":"dock"}]}',
        '{"frame_id":"map","waypoints":[{"x":1.5,"y":-2.0,"yaw":0.5},{"pose_id":"shelf"}]}',
    ],
}
WRONG: dict[PlanFormatName, list[str]] = {
    "bt_cpp_xml": [
        "", tree(""), tree("<Sequence></Sequence>"), tree("<Sequence/>"), nested(5),
        tree('<Pick object="plate"/>'), tree("<Pick/>"), tree('<Pick object="cup" on="table"/>'),
        tree('<Pick name="x" object="cup"/>'), tree('<Pick object="cup" _skipIf="true"/>'),
        tree('<Pick object="cup"/><Pick object="cup"/>'), tree('<Pick object="cup">x</Pick>'),
        tree("<Sequence>x<Wait/></Sequence>"), tree('<Place on="table" object="cup"/>'),
        tree('<Sequence name="a"><Pick object="cup"/></Sequence>'), tree('<MoveBy x="2.25"/>'),
        tree('<MoveBy x="1e999"/>'), tree('<MoveBy x=""/>'), tree('<MoveBy x="true"/>'),
        tree('<Turn n="0.5"/>'), tree('<Turn n="10"/>'), tree('<Grip hand="left" closed="True"/>'),
        tree('<Say text=""/>'), tree('<Say text="123456789"/>'), tree('<Say text="{a}"/>'),
        tree('<Say text="a&b"/>'), tree('<Say text="a\nb"/>'), tree('<Script code="x:=1"/>'),
        tree('<SubTree ID="Plan"/>'), tree("<!-- x --><Wait/>"), tree("<Wait/>")[:-1],
        '<?xml version="1.0"?>' + tree("<Wait/>"), "<!DOCTYPE a>" + tree("<Wait/>"),
        tree('<RetryUntilSuccessful num_attempts="0"><Wait/></RetryUntilSuccessful>'),
        tree('<RetryUntilSuccessful num_attempts="2"><Wait/><Wait/></RetryUntilSuccessful>'),
        tree("<Sequence>" + "<Wait/>" * 5 + "</Sequence>"), tree("<Wait/>").replace('"4"', '"3"'),
        tree("<Sequence><Wait/></Fallback>"), '{"steps":[]}',
    ],
    "pddl_plan": [
        "", "\n", "(pick cup", "(pick)\n", "(pick cup table)\n", "(pick plate)\n", "(PICK cup)\n",
        "(pick  cup)\n", "(wait)\n\n(wait)\n", "(wait)\n" * 5, " (wait)\n", "(wait) \n", "wait\n",
        "(wait)(wait)\n", "(open cup)\n", "; (wait)\n", "0.000: (wait)  [1.000]\n",
    ],
    "nav2_waypoints": [
        "", "{}", '{"frame_id":"odom","waypoints":[{"pose_id":"dock"}]}',
        '{"frame_id":"map","waypoints":[]}', '{"frame_id":"map","waypoints":[{"pose_id":"cup"}]}',
        '{"frame_id":"map","waypoints":[{"x":9.0,"y":0.0,"yaw":0.0}]}',
        '{"frame_id":"map","waypoints":[{"x":1.0,"y":0.0}]}',
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_grammar_and_reader_take_the_same_plans(name: PlanFormatName) -> None:
    for text in RIGHT[name]:
        assert grammar_takes(name, text), text
        assert reader_takes(name, text), text
    for text in WRONG[name]:
        assert not grammar_takes(name, text), text
        assert not reader_takes(name, text), text


def random_answer(name: PlanFormatName, seed: int) -> str:
    """A text of bytes that the grammar allows, drawn one by one."""
    rng, matcher, data = np.random.default_rng(seed), start(name).deep_copy(), bytearray()
    while True:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: END + 1])
        if END in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return data.decode()
        allowed = allowed[allowed != END]
        if (allowed < 128).any() and rng.random() < 0.9:  # most texts are ASCII
            allowed = allowed[allowed < 128]
        data.append(int(rng.choice(allowed)))
        assert matcher.consume_token(data[-1])


@pytest.mark.parametrize("name", RIGHT)
def test_any_answer_is_read_and_any_beginning_is_closed_to_a_legal_plan(
    name: PlanFormatName,
) -> None:
    form = rule(name).format
    for seed in range(8):
        text = random_answer(name, seed)
        plan, valid = form.read(text, whole=True)
        assert valid, text
        assert plan is not None
        reader = form.reader()
        assert [step for char in text for step in reader.feed(char)] == plan["steps"]
        assert form.reader().feed(text) == plan["steps"]
        for end in range(0, len(text), 7):
            part, valid = form.read(text[:end], whole=False)
            steps: Any = part["steps"] if part else []
            assert (part is not None) == valid
            assert steps == plan["steps"][: len(steps)]  # type: ignore[index]
            whole = len(form.reader().feed(text[:end]))
            # The last line of a PDDL plan may have all but its end.
            assert len(steps) - whole in ((0, 1) if name == "pddl_plan" else (0,)), text[:end]
            if part and name != "nav2_waypoints":  # whose body is made of the answer
                assert grammar_takes(name, str(part["body"])), part["body"]


def test_a_goal_of_follow_waypoints_has_poses_that_are_rotations() -> None:
    text = RIGHT["nav2_waypoints"][1]
    plan, _ = rule("nav2_waypoints").format.read(text, whole=True)
    assert plan is not None
    first, second = json.loads(str(plan["body"]))["poses"]
    for pose, (x, y, yaw) in ((first, (1.5, -2.0, 0.5)), (second, (2.0, 1.0, 1.57))):
        at, turn = pose["pose"]["position"], pose["pose"]["orientation"]
        assert pose["header"] == {"frame_id": "map"}
        assert (at["x"], at["y"], at["z"], turn["x"], turn["y"]) == (x, y, 0, 0, 0)
        assert math.isclose(2 * math.atan2(turn["z"], turn["w"]), yaw)
        assert math.isclose(math.hypot(turn["z"], turn["w"]), 1)


A = {"a": {"args": {"o": "o"}}}
UNTYPED = {"fine": {}, "a": {"args": {"o": "object", "x": {}}}}
NUMBER = {"type": "number", "min": -1, "max": 1, "unit": "m"}
BAD: list[tuple[str, str, dict[str, Any]]] = [
    ("bt_cpp_xml", "skills.a b", {"skills": {"a b": {}}}),
    ("bt_cpp_xml", "skills.sequence", {"skills": {"sequence": {}}}),
    ("bt_cpp_xml", "skills.a_b", {"skills": {"a-b": {}, "a_b": {}}}),
    ("bt_cpp_xml", "skills.é", {"skills": {"é": {}}}),
    ("bt_cpp_xml", "skills.<x>", {"skills": {"<x>": {}}}),
    ("bt_cpp_xml", "skills.a.args.name", {"skills": {"a": {"args": {"name": "o"}}}}),
    ("bt_cpp_xml", "skills.a.args._skipIf", {"skills": {"a": {"args": {"_skipIf": "o"}}}}),
    ("bt_cpp_xml", 'skills.a.args.x="y"', {"skills": {"a": {"args": {'x="y"': "o"}}}}),
    ("bt_cpp_xml", "skills.a.args.o", {"skills": A, "ids": {"o": ["{x}"]}}),
    ("bt_cpp_xml", "skills.a.args.o", {"skills": A, "ids": {"o": ["\ufffe"]}}),
    ("pddl_plan", "skills.Pick", {"skills": {"Pick": {}}}),
    ("pddl_plan", "skills.pick up", {"skills": {"pick up": {}}}),
    ("pddl_plan", "skills.a.args.o", {"skills": A, "ids": {"o": ["Cup"]}}),
    ("pddl_plan", "skills.a.args.o", {"skills": A, "ids": {"o": ["a b"]}}),
    ("pddl_plan", "skills.a.args.o", {"skills": A, "ids": {"o": ["x)"]}}),
    ("pddl_plan", "skills.a.args.x", {"skills": {"a": {"args": {"x": NUMBER}}}}),
    ("nav2_waypoints", "poses", {"skills": {"a": {}}}),
    ("nav2_waypoints", "poses.d.yaw", {"poses": {"d": {"x": 0, "y": 0}}}),
    ("nav2_waypoints", "poses.d.x", {"poses": {"d": {"x": math.nan, "y": 0, "yaw": 0}}}),
    ("nav2_waypoints", "poses.d.x", {"poses": {"d": {"x": True, "y": 0, "yaw": 0}}}),
    ("nav2_waypoints", "poses.d.frame", {"poses": {"d": {"x": 0, "y": 0, "yaw": 0, "frame": 3}}}),
    ("nav2_waypoints", "poses",
     {"poses": {"d": {"x": 0, "y": 0, "yaw": 0, "frame": "odom"}},
      "area": {"x": [0, 1], "y": [0, 1]}}),
    ("nav2_waypoints", "area.y", {"area": {"x": [0, 1], "y": [1, 0]}}),
    ("nav2_waypoints", "area.x", {"area": {"x": [-math.inf, math.inf], "y": [0, 1]}}),
    *(
        (name, where, change)
        for name in ("json_steps", "bt_cpp_xml", "pddl_plan")
        for where, change in (
            ("skills", {"skills": {"": {}}}),
            ("skills", {"skills": {"a\x00": {}}}),
            ("skills", {"skills": {"a" * 257: {}}}),
            ("skills.a.args", {"skills": {"a": {"args": {"": "o"}}}}),
            ("skills.a.x", {"skills": {"a": {"args": {"x": "nothing"}}}}),
            ("ids.o", {"skills": {"a": {}}, "ids": {"o": ["x", ""]}}),
            ("ids.o", {"skills": {"a": {}}, "ids": {"o": ["x", "x"]}}),
            ("skills.a.args.x", {"skills": {"a": {"args": {"x": {**NUMBER, "max": math.inf}}}}}),
            ("skills.a.args.x", {"skills": {"a": {"args": {"x": {**NUMBER, "min": math.nan}}}}}),
            ("skills.a.args.x", {"skills": {"a": {"args": {"x": {**NUMBER, "max": 1e17}}}}}),
            ("skills.a.args.c.values",
             {"skills": {"a": {"args": {"c": {"type": "choice", "values": ["\n"]}}}}}),
            ("skills", {"skills": {}}),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "where", "change"), BAD)
def test_skills_that_have_no_form_are_refused_by_name(
    name: PlanFormatName, where: str, change: dict[str, Any]
) -> None:
    table = {"format": "tdp.skills.v1", "skills": {}, "ids": {"o": ["x"]}, **change}
    request = PlanRequest(prompt="x", skills=skills(json.dumps(table)), plan_format=name)
    with pytest.raises(PlanError) as caught:
        rule_of(request)
    assert caught.value.code == "bad_request"
    assert caught.value.field == f"skills.{where}"
    assert caught.value.message.startswith(f"skills.{where} must ")


def test_what_xml_would_take_for_its_own_is_escaped() -> None:
    word = '"it\'s" <b>&amp; é\u2028</b>'
    table = {"format": "tdp.skills.v1", "ids": {"o": [word]},
             "skills": {"a": {"about": "<&>", "args": {"o": "o"}}}}  # fmt: skip
    request = PlanRequest(prompt="x", skills=skills(json.dumps(table)), plan_format="bt_cpp_xml")
    made = rule_of(request)
    text = format_of(made).sample()
    matcher = LLMatcher(BYTES, made.lark, log_level=0)
    assert matcher.try_consume_tokens(list(text.encode())) == len(text.encode())
    plan, valid = made.format.read(text, whole=True)
    assert valid
    assert plan is not None
    assert plan["steps"] == [{"id": 1, "skill": "a", "args": {"o": word}}]


def test_many_objects_are_taken_or_refused_and_soon() -> None:
    """10,000 ids of 7 bytes are less than a request may hold; of 20 bytes, more."""
    for name in ("bt_cpp_xml", "pddl_plan"):
        table = {"format": "tdp.skills.v1", "ids": {"o": [f"o{i:05}" for i in range(10_000)]},
                 "skills": {"a": {"args": {"o": "o"}}}}  # fmt: skip
        made = rule_of(
            PlanRequest(prompt="x", skills=skills(json.dumps(table)), plan_format=name)  # type: ignore[arg-type]
        )
        matcher = LLMatcher(BYTES, made.lark, log_level=0)
        text = format_of(made).sample().encode()
        assert matcher.try_consume_tokens(list(text)) == len(text)
    table["ids"] = {"o": [f"object_number_{i:05}" for i in range(10_000)]}
    with pytest.raises(PlanError) as caught:
        rule_of(PlanRequest(prompt="x", skills=skills(json.dumps(table)), plan_format="pddl_plan"))
    assert (caught.value.code, caught.value.field) == ("schema_unsupported", "skills")


def test_a_server_streams_the_steps_of_a_tree_and_returns_it(house: House) -> None:
    peer = house.peer(house.mock())
    assert {f"plan_format:{name}" for name in RIGHT} <= {*peer.ask(op="hello")["features"]}
    fields = {"op": "plan", "prompt": "x", "skills": ROBOT, "plan_format": "bt_cpp_xml"}
    peer.send(**fields, id="tree", stream="steps")
    chunks = []
    while (reply := peer.receive())["type"] == "chunk":
        chunks.append(reply["step"])
    assert chunks == reply["plan"]["steps"]
    assert reply["plan"]["body"] == reply["text"]
    assert (reply["status"], reply["plan_valid"]) == ("ok", True)
    assert len(chunks) == 3
    cut = peer.ask(**fields, max_tokens=6)
    assert (cut["status"], cut["plan_valid"]) == ("partial", True)
    assert cut["plan"]["steps"] == chunks[: len(cut["plan"]["steps"])]
    assert cut["plan"]["body"] != cut["text"]
    checked = peer.ask(op="validate", skills=ROBOT, plan_format="nav2_waypoints")
    assert checked["warnings"] == []


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"plan_format": "bt_cpp_xml"}, "plan_format"),
        ({"plan_format": "pddl", "skills": DOMAIN}, "plan_format"),
        ({"plan_format": "pddl_plan", "skills": DOMAIN, "tools": [TOOL]}, "plan_format"),
        ({"plan_format": "pddl_plan", "skills": ROBOT}, "skills.skills.pick.args.object"),
        ({"skills": {**DOMAIN, "skills": UNTYPED}}, "skills.skills.a.args.x.type"),
    ],
)
def test_a_server_names_what_is_wrong(house: House, fields: dict[str, Any], where: str) -> None:
    peer = house.peer(house.mock())
    for op in ("plan", "validate") if "tools" not in fields else ("plan",):
        refused = peer.ask(op=op, prompt="x", **fields)
        assert (refused["code"], refused["field"]) == ("bad_request", where)
    both = peer.ask(op="validate", skills=DOMAIN, json_schema={"type": "object"})
    assert both["field"] == "skills"


def test_the_commands_write_grammars_and_plans(
    house: House, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert get_args(PlanFormatName) == PLAN_FORMATS
    (file := tmp_path / "robot.json").write_text(json.dumps(ROBOT))
    endpoint, given = house.mock().endpoints[0], ["--plan-format", "bt_cpp_xml"]
    assert main.main(["schema", str(file), *given]) == 0
    assert capsys.readouterr().out == rule("bt_cpp_xml").lark + "\n"
    assert main.main(["schema", str(file), "--plan-format", "pddl_plan"]) == 2
    assert "skills.pick.args.object" in capsys.readouterr().err
    plan = ["plan", "--server", endpoint, "--skills", str(file), "Do it."]
    assert main.main([*plan, *given]) == 0
    assert capsys.readouterr().out == format_of(rule("bt_cpp_xml")).sample() + "\n"
    assert main.main([*plan, "--plan-format", "nav2_waypoints"]) == 0
    assert len(json.loads(capsys.readouterr().out)["poses"]) == 2
