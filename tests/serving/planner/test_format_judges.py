"""Plans of the formats before judges that nobody here wrote: BehaviorTree.CPP itself, a PDDL
validator, PyYAML. `make formats` installs them; skipped without.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.plan_formats import DOMAIN, ROBOT, format_of, skills

from thor_dflash.serving.planner.answer_rule import rule_of
from thor_dflash.serving.planner.formats.bt_cpp import RESERVED, node_name
from thor_dflash.serving.planner.formats.text_format import TextPlanFormat
from thor_dflash.serving.protocol.messages import PlanRequest
from thor_dflash.serving.protocol.skills import PlanFormatName

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[3] / "docs/examples"
BUILT_IN = """
    AlwaysFailure AlwaysSuccess AsyncFallback AsyncSequence Delay Fallback ForceFailure ForceSuccess
    IfThenElse Inverter KeepRunningUntilFailure LoopBool LoopDouble LoopInt LoopString Parallel
    ParallelAll Precondition ReactiveFallback ReactiveSequence Repeat RetryUntilSuccessful RunOnce
    Script ScriptCondition Sequence SequenceWithMemory SetBlackboard SkipUnlessUpdated Sleep SubTree
    Switch2 Switch3 Switch4 Switch5 Switch6 Timeout UnsetBlackboard WaitValueUpdate WasEntryUpdated
    WhileDoElse
""".split()


def form(name: PlanFormatName) -> TextPlanFormat:
    made = format_of(rule_of(PlanRequest(prompt="x", skills=skills(name), plan_format=name)))
    assert isinstance(made, TextPlanFormat)
    return made


def executed(library: Any, text: str) -> list[tuple[str, dict[str, str]]]:
    """The leaves that BehaviorTree.CPP runs, with their ports as it read them. Each leaf is made a
    subtree, as the bindings declare no ports of actions, and a subtree takes any.
    """
    factory, seen = library.BehaviorTreeFactory(), list[tuple[str, dict[str, str]]]()
    for skill in ROBOT["skills"]:
        node = node_name(skill)

        def act(leaf: Any, node: str = node) -> Any:
            board = leaf.config().blackboard
            seen.append((node, {key: board.get_string(key) for key in board.get_keys()}))
            return library.NodeStatus.SUCCESS

        factory.register_simple_action(f"{node}Leaf", act)
        factory.register_behavior_tree_from_text(
            f'<root BTCPP_format="4"><BehaviorTree ID="{node}"><{node}Leaf/></BehaviorTree></root>'
        )
        text = text.replace(f"<{node} ", f'<SubTree ID="{node}" ')
        text = text.replace(f"<{node}/", f'<SubTree ID="{node}"/')
    factory.register_behavior_tree_from_text(text)
    assert factory.create_tree("Plan").tick_while_running() == library.NodeStatus.SUCCESS
    return seen


def test_behaviortree_cpp_runs_a_tree_and_reads_every_value() -> None:
    library = pytest.importorskip("behaviortreepy", reason="needs make formats")
    words = {"object": '<"it\'s" & >'}
    steps: list[dict[str, Any]] = [
        {"skill": "pick", "args": words},
        {"skill": "place", "args": {**words, "on": "table"}},
        {"skill": "move_by", "args": {"x": -1.5}},
        {"skill": "grip", "args": {"hand": "left", "closed": True}},
    ]
    text = form("bt_cpp_xml").write(steps)
    assert form("bt_cpp_xml").read(text, whole=True)[1]
    assert executed(library, text) == [
        ("Pick", words), ("Place", {**words, "on": "table"}), ("MoveBy", {"x": "-1.5"}),
        ("Grip", {"hand": "left", "closed": "true"}),
    ]  # fmt: skip
    nested = text.replace(
        "<Sequence>", '<Fallback><RetryUntilSuccessful num_attempts="9"><Sequence>'
    )
    nested = nested.replace("</Sequence>", "</Sequence></RetryUntilSuccessful></Fallback>")
    assert form("bt_cpp_xml").read(nested, whole=True)[1]
    assert len(executed(library, nested)) == 4
    for empty in ("Sequence", "Fallback", "RetryUntilSuccessful"):  # as the reader refuses them
        with pytest.raises(Exception, match="child"):
            executed(library, text.replace("<Pick ", f"<{empty}></{empty}><Pick "))


def test_no_skill_has_the_name_of_a_node_of_the_library() -> None:
    library = pytest.importorskip("behaviortreepy", reason="needs make formats")
    for name in BUILT_IN:
        with pytest.raises(Exception, match="already registered"):
            library.BehaviorTreeFactory().register_simple_action(name, lambda node: None)
    assert {*BUILT_IN} <= RESERVED


def test_a_pddl_validator_takes_a_plan_and_refuses_a_wrong_one() -> None:
    io = pytest.importorskip("unified_planning.io", reason="needs make formats")
    engines = pytest.importorskip("unified_planning.engines")
    problem = io.PDDLReader().parse_problem(
        str(EXAMPLES / "domain.pddl"), str(EXAMPLES / "problem.pddl")
    )
    made = form("pddl_plan")
    right = "(pick cup)\n(place cup table)\n"
    assert made.read(right, whole=True)[1]
    for text, verdict in ((right, "VALID"), ("(place cup table)\n", "INVALID")):
        plan = io.PDDLReader().parse_plan_string(problem, text)
        checked = engines.SequentialPlanValidator().validate(problem, plan)
        assert checked.status.name == verdict, text
    names = {action.name for action in problem.actions}
    assert names == set(DOMAIN["skills"])


def test_a_goal_of_follow_waypoints_is_yaml() -> None:
    rule = rule_of(
        PlanRequest(prompt="x", skills=skills("nav2_waypoints"), plan_format="nav2_waypoints")
    )
    plan, _ = rule.format.read(format_of(rule).sample(), whole=True)
    assert plan is not None
    body = str(plan["body"])
    assert yaml.safe_load(body) == json.loads(body)
