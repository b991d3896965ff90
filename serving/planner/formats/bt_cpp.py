"""Plans as trees of BehaviorTree.CPP 4: a leaf is a skill, its attributes are the arguments.

Only nodes that order leaves are written. Scripts, blackboard references, subtrees, comments and
declarations are not: what a model writes must not become code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from thor_dflash.core.errors import RequestError
from thor_dflash.core.message_text import show
from thor_dflash.serving.planner.formats.text_format import (
    ArgumentRules,
    TextPlanFormat,
    literal,
    schema_of,
    value,
)
from thor_dflash.serving.planner.plan_format import Step
from thor_dflash.serving.planner.skill_schema import Abilities

DEPTH = 4
"""Most nodes around a leaf."""
SEVERAL = ("Sequence", "Fallback")
"""Nodes with one child or more."""
RETRY = "RetryUntilSuccessful"
"""A node with exactly one child."""
HEAD = '<root BTCPP_format="4" main_tree_to_execute="Plan"><BehaviorTree ID="Plan">'
TAIL = "</BehaviorTree></root>"
TEXT = r'([^"<>&{}\x00-\x1f\x7f\u{fffe}\u{ffff}]|&(amp|lt|gt|quot|apos);)'
"""A character of an attribute that XML allows. Without braces, which refer to the blackboard."""
_FORBIDDEN = re.compile("[{}\x00-\x1f\x7f\ufffe\uffff]")
_NAME = re.compile("[A-Za-z][A-Za-z0-9_]*")
RESERVED = frozenset(
    """
    Action AlwaysFailure AlwaysSuccess AsyncFallback AsyncSequence BehaviorTree Condition
    ConsumeQueue Control Decorator Delay EntryUpdated Fallback ForceFailure ForceSuccess IfThenElse
    Inverter KeepRunningUntilFailure LoopBool LoopDouble LoopInt LoopString ManualSelector Parallel
    ParallelAll Precondition ReactiveFallback ReactiveSequence Repeat RetryUntilSuccesful
    RetryUntilSuccessful RunOnce Script ScriptCondition Sequence SequenceStar SequenceWithMemory
    SetBlackboard SkipUnlessUpdated Sleep SubTree SubTreePlus Switch2 Switch3 Switch4 Switch5
    Switch6 TestNode Timeout TreeNodesModel TryCatch UnsetBlackboard WaitValueUpdate WasEntryUpdated
    WhileDoElse include root
    """.split()
)
"""Nodes and tags of the library's own."""
RESERVED_PORTS = frozenset(("ID", "name"))


class BehaviorTreeXml(TextPlanFormat):
    """See TextPlanFormat. A piece is a tag."""

    name = "bt_cpp_xml"
    end = ">"

    def __init__(self, able: Abilities) -> None:
        super().__init__(able)
        self._nodes: dict[str, str] = {}
        """Name of a leaf's node -> skill."""
        for skill, args in able.skills.items():
            node = node_name(skill)
            if (other := self._nodes.setdefault(node, skill)) != skill:
                raise _wrong(f"skills.{skill}", f"be another node than skills.{other}", node)
            for name, kind in args.items():
                where = f"skills.{skill}.args.{name}"
                if not _NAME.fullmatch(name) or name in RESERVED_PORTS:
                    rule = "be a name of a port, [A-Za-z][A-Za-z0-9_]*, and not name or ID"
                    raise _wrong(where, rule, name)
                for word in schema_of(kind, able).get("enum", ()):
                    if _FORBIDDEN.search(word):
                        rule = "have words without braces and what XML cannot hold"
                        raise _wrong(where, rule, word)

    def lark(self) -> str:
        """See TextPlanFormat."""
        rules, leaves = ArgumentRules(self.able, _attribute, TEXT), list[str]()
        for node, skill in self._nodes.items():
            parts = [literal(f"<{node}")]
            for name, kind in self.able.skills[skill].items():
                parts += [literal(f' {name}="'), rules.of(kind), literal('"')]
            leaves.append(f"leaf{len(leaves)}: {' '.join(parts)} {literal('/>')}")
        retry = f'"<{RETRY} num_attempts=\\"" DIGIT "\\">"'
        levels: list[str] = []
        for level in range(DEPTH):
            inner, most = f"node{level + 1}", self.able.max_steps
            several = (f'"<{one}>" {inner}{{1,{most}}} "</{one}>"' for one in SEVERAL)
            once = f'{retry} {inner} "</{RETRY}>"'
            levels.append(f"node{level}: {' | '.join(several)} | {once} | leaf")
        return "\n".join(
            [
                "%llguidance {}",
                f"start: {literal(HEAD)} node0 {literal(TAIL)}",
                *levels,
                f"node{DEPTH}: leaf",
                f"leaf: {' | '.join(f'leaf{i}' for i in range(len(leaves)))}",
                "DIGIT: /[1-9]/",
                *leaves,
                *rules.lines,
            ]
        )

    def write(self, steps: Iterable[Step]) -> str:
        """See TextPlanFormat."""
        nodes = {skill: node for node, skill in self._nodes.items()}
        leaves = (
            f"<{nodes[step['skill']]}"
            + "".join(f' {k}="{_attribute(_word(v))}"' for k, v in step["args"].items())
            + "/>"
            for step in steps
        )
        return f"{HEAD}<Sequence>{''.join(leaves)}</Sequence>{TAIL}"

    def close(self, text: str) -> str:
        """See TextPlanFormat."""
        kept, around, open = 0, list[str](), list[str]()
        for tag in re.finditer("<(/?)([A-Za-z]*)[^>]*>", text):
            if tag[0].endswith("/>"):
                kept, around = tag.end(), list(open)
            elif not tag[1]:
                open.append(tag[2])
            elif open:
                open.pop()
        return text[:kept] + "".join(f"</{name}>" for name in reversed(around))

    def _pieces(self, text: str) -> Iterable[str]:
        root = _element(text)
        (tree,) = _children(root, "root", BTCPP_format="4", main_tree_to_execute="Plan")
        (top,) = _children(tree, "BehaviorTree", ID="Plan")
        return list(self._leaves(top, 0))

    def _leaves(self, node: ElementTree.Element, level: int) -> Iterator[str]:
        if node.tag in self._nodes:
            if len(node) or node.text:
                raise ValueError(f"a leaf must be empty (got {node.tag})")
            node.tail = None
            yield ElementTree.tostring(node, encoding="unicode")
            return
        if level == DEPTH:
            raise ValueError(f"a leaf must be <= {DEPTH} nodes deep")
        if node.tag == RETRY:
            attempts = node.get("num_attempts", "")
            (child,) = _children(node, RETRY, num_attempts=attempts)
            if not re.fullmatch("[1-9]", attempts):
                raise ValueError(f"num_attempts must be 1 to 9 (got {attempts})")
            yield from self._leaves(child, level + 1)
            return
        if node.tag not in SEVERAL or not 1 <= len(node) <= self.able.max_steps:
            raise ValueError(f"a node must be known and have children (got {node.tag})")
        for child in _children(node, node.tag):
            yield from self._leaves(child, level + 1)

    def _parse(self, piece: str) -> tuple[str, Mapping[str, Any]] | None:
        start = piece.rfind("<")
        if not piece.endswith("/>") or start < 0:
            return None
        leaf = _element(piece[start:])
        if (skill := self._nodes.get(leaf.tag)) is None:
            raise ValueError(f"a leaf must be a skill (got {leaf.tag})")
        kinds = self.able.skills[skill]
        if leaf.keys() != list(kinds):
            raise ValueError(f"{leaf.tag} must have its arguments, in order (got {leaf.keys()})")
        if _FORBIDDEN.search("".join(leaf.attrib.values())):
            raise ValueError(f"an argument must have no braces (got {piece})")
        return skill, {name: value(kinds[name], text) for name, text in leaf.items()}


def node_name(skill: str) -> str:
    """Return the name of a skill's node: `move_by` is MoveBy.

    Raises:
        RequestError: it would be none, or one of the library's own.
    """
    node = "".join(part[:1].upper() + part[1:] for part in re.split("[_-]", skill))
    if not _NAME.fullmatch(node) or node in RESERVED:
        rule = "be a name of a node, [A-Za-z][A-Za-z0-9_-]*, and none of BehaviorTree.CPP's own"
        raise _wrong(f"skills.{skill}", rule, node)
    return node


def _element(text: str) -> ElementTree.Element:
    if re.search("<[!?]|[\x00-\x1f]", text):
        raise ValueError("a tree must have no declarations, comments, instructions and controls")
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as e:
        raise ValueError(str(e)) from e


def _children(node: ElementTree.Element, tag: str, **attributes: str) -> list[ElementTree.Element]:
    """The children of a node that has this tag, these attributes and no text."""
    children = list(node)
    if node.tag != tag or node.attrib != attributes or node.text or any(c.tail for c in children):
        raise ValueError(f"a node must be {tag} with {attributes} (got {node.tag})")
    return children


def _attribute(text: str) -> str:
    return escape(text, {'"': "&quot;"})


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _wrong(where: str, rule: str, got: str) -> RequestError:
    return RequestError(f"{where} must {rule}, for plan_format bt_cpp_xml (got {show(got)})")
