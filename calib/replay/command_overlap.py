"""How far a turn calls the same programs as the recorded answer: MLPerf's score of a turn.

Source: mlcommons/endpoints, multi_turn_inline_accuracy.py at 3e1b703.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from thor_dflash.core.strict_records import as_table

SAME = """
python2:python python3:python py:python pip3:pip sphinx-build:sphinx sphinx-quickstart:sphinx
less:cat more:cat egrep:grep fgrep:grep rg:grep ag:grep gawk:awk locate:find .:source wget:curl
apt-get:apt
"""
ITSELF = """
python pip pytest pylint cython make conda cat head tail wc diff grep sed awk tr sort uniq cut find
ls xargs cp mv rm mkdir touch tee source which alias unset export git curl true false timeout date
apt yum
"""
PROGRAMS: Mapping[str, str] = {
    **{name: name for name in ITSELF.split()},
    **{pair.partition(":")[0]: pair.partition(":")[2] for pair in SAME.split()},
}
"""Program -> the name under which it counts; others do not count."""
PREFIXES = {"env", "time", "nice", "sudo", "exec", "command"}
"""Words before the program's name."""
_HERE = re.compile(r"<<-?\s*['\"]?([A-Za-z_][A-Za-z0-9_]*)['\"]?[\s\S]*?\n\1\s*$", re.MULTILINE)
_QUOTED = re.compile(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"|`[^`]*`")
_STAGES = re.compile(r"\|\||\||&&|;|\n")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_VERSION = re.compile(r"\.\d+(\.\d+)?$")


def programs(calls: Iterable[Mapping[str, Any]]) -> list[str]:
    """The programs that calls of the tool `bash` run. `calls` in OpenAI's form."""
    return [name for call in calls for command in _commands(call) for name in _stages(command)]


def _commands(call: Mapping[str, Any]) -> Iterator[str]:
    function = as_table(call.get("function")) or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return
    table = as_table(arguments) or {}
    command = table.get("command") or table.get("cmd")
    if function.get("name") == "bash" and isinstance(command, str):
        yield _QUOTED.sub(" ", _HERE.sub(" ", command))


def _stages(command: str) -> Iterator[str]:
    for stage in _STAGES.split(command):
        words = (w for w in stage.split() if not _VARIABLE.match(w) and w not in PREFIXES)
        if (word := next(words, None)) is not None:
            leaf = _VERSION.sub("", word.rpartition("/")[2].lower())
            if leaf in PROGRAMS:
                yield PROGRAMS[leaf]


def overlap(
    recorded: Iterable[Mapping[str, Any]], given: Iterable[Mapping[str, Any]]
) -> float | None:
    """Programs in common over all programs of both, counted with repetitions; None if the recorded
    calls run none."""
    want, got = Counter(programs(recorded)), Counter(programs(given))
    return (want & got).total() / (want | got).total() if want else None
