"""planbench: a seeded corpus of robot planning tasks with a symbolic executor as judge.

Pure Python, standard library only. ``sample`` draws a task, ``judge`` judges any plan text for it,
``heldout`` lists the tasks that no training run may see: they share no request template, no
combination of destinations and no object noun with the training split.
"""

from thor_dflash.calib.planbench.judge import Verdict, judge_scene
from thor_dflash.calib.planbench.task import (
    FAMILIES,
    Task,
    heldout,
    judge,
    sample,
    task_from_line,
    task_to_line,
)

__all__ = [
    "FAMILIES",
    "Task",
    "Verdict",
    "heldout",
    "judge",
    "judge_scene",
    "sample",
    "task_from_line",
    "task_to_line",
]
