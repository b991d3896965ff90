"""Skills as data: the schema takes what the ranges, lengths and sets allow, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from support.serving_fixtures import House

from thor_dflash.cli import main
from thor_dflash.core.errors import PlanError, RequestError
from thor_dflash.runtime.grammar.schema import read as read_grammar
from thor_dflash.serving.planner.plan_schema import from_skills
from thor_dflash.serving.planner.skill_schema import schema_of
from thor_dflash.serving.protocol.codec import convert
from thor_dflash.serving.protocol.skills import SkillSet

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs/examples/skills.yaml"
SKILLS: dict[str, Any] = {
    "format": "tdp.skills.v1",
    "ids": {"object": ["cup", "mug"], "place": ["table"], "nothing": []},
    "poses": {"dock": {"x": 1.0}},
    "skills": {
        "goto": {"about": "Drive.", "args": {"target": "pose"}},
        "place": {"args": {"object": "object", "on": "place"}},
        "move": {"args": {"x": {"type": "number", "min": -2.0, "max": 2.0, "unit": "m"}}},
        "turn": {"args": {"n": {"type": "integer", "min": 0, "max": 9}}},
        "say": {"args": {"text": {"type": "text", "max_chars": 3}}},
        "grip": {"args": {"hand": {"type": "choice", "values": ["left"]},
                          "closed": {"type": "boolean"}}},
        "open": {"args": {"what": "nothing"}},
    },
}  # fmt: skip


def read(table: dict[str, Any]) -> SkillSet:
    return convert(table, SkillSet)


def plan(skill: str, **args: Any) -> dict[str, Any]:
    step = {"id": 1, "skill": skill, "args": args, "on_fail": "retry"}
    return {"goal": "g", "steps": [step], "needs_clarification": None}


@pytest.mark.parametrize(
    ("skill", "fine", "wrong"),
    [
        ("goto", {"target": "dock"}, {"target": "table"}),
        ("place", {"object": "mug", "on": "table"}, {"object": "mug", "on": "mug"}),
        ("move", {"x": 2.0}, {"x": 2.25}),
        ("turn", {"n": 9}, {"n": 10}),
        ("turn", {"n": 0}, {"n": 0.5}),
        ("say", {"text": "abc"}, {"text": "abcd"}),
        ("say", {"text": "a"}, {"text": ""}),
        ("grip", {"hand": "left", "closed": True}, {"hand": "right", "closed": True}),
    ],
)
def test_a_plan_has_values_of_the_skills_only(skill: str, fine: Any, wrong: Any) -> None:
    schema = schema_of(read(SKILLS))
    read_grammar(schema)  # a schema that a server takes
    checker = jsonschema_rs.validator_for(schema)
    assert checker.is_valid(plan(skill, **fine))
    assert not checker.is_valid(plan(skill, **wrong))
    assert not checker.is_valid(plan("open", what="x"))  # nothing is there to be opened


def test_sets_of_ids_alone_make_the_schema_of_from_skills() -> None:
    skills = {"pick": {"object": "object"}, "place": {"object": "object", "on": "place"}}
    ids = {"object": ["cup"], "place": ["table"]}
    table = {"format": "tdp.skills.v1", "ids": ids, "numbered": False,
             "skills": {name: {"args": args} for name, args in skills.items()}}  # fmt: skip
    assert schema_of(read(table)) == from_skills(skills, ids, numbered=False)


@pytest.mark.parametrize(
    ("where", "argument"),
    [
        ("max, min, unit", {"type": "number", "min": 0, "max": 1}),
        ("max, min", {"type": "integer", "min": 0}),
        ("whole", {"type": "integer", "min": 0, "max": 1.5}),
        ("min <= max", {"type": "integer", "min": 2, "max": 1}),
        ("max_chars", {"type": "text"}),
        ("no further field", {"type": "boolean", "unit": "m"}),
        ("values", {"type": "choice", "values": []}),
        ("object", "objekt"),
        ("type", {"type": "float"}),
        ("minimum", {"type": "integer", "minimum": 0, "maximum": 1}),
    ],
)
def test_a_wrong_argument_is_named(where: str, argument: Any) -> None:
    table = {**SKILLS, "skills": {"turn": {"args": {"n": argument}}}}
    with pytest.raises(
        (RequestError, PlanError), match=r"^skills\.turn\.(args\.)?n\b.* must"
    ) as caught:
        schema_of(read(table))
    assert where in str(caught.value)


def test_a_schema_that_would_be_endless_is_not_made() -> None:
    many = {f"s{i}": {"args": {}} for i in range(200)}
    with pytest.raises(RequestError, match="max_steps"):
        schema_of(read({"format": "tdp.skills.v1", "skills": many}))
    schema_of(read({"format": "tdp.skills.v1", "skills": many, "numbered": False}))


def test_a_server_takes_skills_in_place_of_a_schema(house: House) -> None:
    peer = house.peer(house.mock())
    taken = peer.ask(op="plan", prompt="x", skills=SKILLS)
    assert (taken["type"], taken["plan_valid"]) == ("result", False)  # the mock ignores schemas
    able = {"goto": {"args": {"target": "place"}}, "pick": {"args": {"object": "object"}},
            "place": {"args": {"object": "object", "on": "place"}}}  # fmt: skip
    ids = {"object": ["cup"], "place": ["shelf", "table"]}
    fits = {"format": "tdp.skills.v1", "ids": ids, "skills": able}
    assert peer.ask(op="plan", prompt="x", skills=fits)["plan_valid"]
    assert peer.ask(op="validate", skills=fits)["warnings"] == []
    for wrong in (
        {"skills": {**fits, "format": "v2"}}, {"skills": {**fits, "skills": {}}},
        {"skills": fits, "json_schema": {}},
    ):  # fmt: skip
        refused = peer.ask(op="plan", prompt="x", **wrong)
        assert refused["code"] == "bad_request"
        assert refused["field"].startswith("skills")


def test_the_command_reads_yaml_toml_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(path: Path, status: int = 0) -> str:
        assert main.main(["schema", str(path)]) == status
        out, err = capsys.readouterr()
        return out or err

    schema = json.loads(printed(EXAMPLE))
    assert list(schema["$defs"]["args.place"]["properties"]) == ["object", "on"]
    assert schema["$defs"]["ids.pose"] == {"enum": ["dock", "window"]}
    (file := tmp_path / "s.json").write_text(json.dumps(SKILLS))
    made = json.loads(printed(file))
    assert made == schema_of(read(SKILLS))
    (file := tmp_path / "s.toml").write_text(
        'format = "tdp.skills.v1"\nids.object = ["a"]\nskills.pick.args.object = "object"\n'
    )
    assert json.loads(printed(file))["$defs"]["ids.object"] == {"enum": ["a"]}
    for name, text, word in (
        ("a.yaml", "format: [", "YAML"), ("b.yaml", "a: 1\na: 2", "twice"), ("c.toml", "=", "TOML"),
        ("d.txt", "x", ".yaml"), ("e.yaml", "- 1", "table"), ("f.yaml", "format: x", "skills"),
    ):  # fmt: skip
        (file := tmp_path / name).write_text(text)
        assert word in printed(file, 2)
    assert "readable" in printed(tmp_path / "none.yaml", 2)
