"""`thor-dflash schema`: what the plans over a robot's skills obey, as JSON schema or grammar."""

from __future__ import annotations

import json
from argparse import Namespace

from thor_dflash.cli.skill_file import read_skills
from thor_dflash.config.tree import Config
from thor_dflash.core.errors import PlanError, RequestError
from thor_dflash.core.extras import extra
from thor_dflash.core.progress import Progress
from thor_dflash.serving.protocol.messages import PlanRequest
from thor_dflash.serving.protocol.skills import SkillSet


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Read the skills and print the schema or, of a format that is no JSON, the grammar."""
    skills = read_skills(args.skills)
    try:
        print(_schema(skills) if args.plan_format == "json_steps" else _grammar(args, skills))
    except RequestError as e:
        raise RequestError(f"{args.skills}: {e}") from e
    except PlanError as e:
        raise RequestError(f"{args.skills}: {e.message.removeprefix('skills.')}") from e


def _schema(skills: SkillSet) -> str:
    from thor_dflash.serving.planner.skill_schema import schema_of

    return json.dumps(schema_of(skills), ensure_ascii=False)


def _grammar(args: Namespace, skills: SkillSet) -> str:
    with extra("serve"):
        from thor_dflash.serving.planner.answer_rule import rule_of
    rule = rule_of(PlanRequest(skills=skills, plan_format=args.plan_format))
    return rule.lark or json.dumps(rule.schema.table if rule.schema else {}, ensure_ascii=False)
