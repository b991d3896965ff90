"""Files of a robot's skills, in YAML, TOML or JSON."""

# PyYAML's types say little.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from thor_dflash.cli.input_files import read_schema
from thor_dflash.core.errors import RequestError
from thor_dflash.core.extras import extra
from thor_dflash.core.message_text import show
from thor_dflash.core.strict_records import read_text

if TYPE_CHECKING:
    from thor_dflash.serving.protocol.skills import SkillSet

BOOL = "tag:yaml.org,2002:bool"


def read_skills(path: Path) -> SkillSet:
    """Return the skills in a file of TOML, YAML or JSON, by its name.

    Raises:
        RequestError: it cannot be read, or is no `tdp.skills.v1`; names the skill and argument.
    """
    from thor_dflash.core.errors import PlanError
    from thor_dflash.serving.protocol.codec import convert
    from thor_dflash.serving.protocol.skills import SkillSet

    table = _table(path)
    try:
        return convert(table, SkillSet)
    except PlanError as e:
        raise RequestError(f"{path}: {e.message}") from e


def _table(path: Path) -> dict[str, Any]:
    if path.suffix == ".json":
        return read_schema(path)
    try:
        text = read_text(path)
        value: object = tomllib.loads(text) if path.suffix == ".toml" else _yaml(path, text)
    except OSError as e:
        raise RequestError(f"{path} must be a readable file (got: {e.strerror})") from e
    except ValueError as e:
        raise RequestError(f"{path} must be TOML in UTF-8 (got: {e})") from e
    if not isinstance(value, dict):
        raise RequestError(f"{path} must hold a table (got {show(value)})")
    return cast("dict[str, Any]", value)


def _yaml(path: Path, text: str) -> object:
    if path.suffix not in (".yaml", ".yml"):
        raise RequestError(f"{path} must be a .yaml, .toml or .json file (got {path.suffix!r})")
    with extra("yaml"):
        import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """YAML 1.2's booleans, so that an argument may be called `on`; every key once."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
            if twice := [key for i, key in enumerate(keys) if key in keys[:i]]:
                mark = node.start_mark
                raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} twice", mark)
            return cast("dict[Any, Any]", super().construct_mapping(node, deep))

    Loader.yaml_implicit_resolvers = {
        first: [(tag, rule) for tag, rule in rules if tag != BOOL]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(BOOL, re.compile("^(?:true|false)$"), ["t", "f"])
    try:
        return cast("object", yaml.load(text, Loader))
    except yaml.YAMLError as e:
        raise RequestError(f"{path} must be YAML (got: {' '.join(str(e).split())})") from e
