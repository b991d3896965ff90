"""What a server does for one turn of a long conversation before the first prefill step.

    python -m thor_dflash.calib.studies.turn_overhead TRACE.jsonl --tokenizer DIR [--json]

The turns of the conversation with the longest prompt are prepared in order, as a server that has
seen the ones before. Milliseconds of processor time on one core, that of the template process
included, for the last turn; the least of ROUNDS, which what else runs on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from thor_dflash.calib.replay.recorded_trace import RecordedConversation, read_trace
from thor_dflash.calib.studies import script
from thor_dflash.runtime.decoding.kv_log import chunk_digests
from thor_dflash.runtime.text.chat_template import Template
from thor_dflash.runtime.text.prompt_segments import PromptEncoder
from thor_dflash.runtime.text.tokenizer import Tokenizer

ROUNDS = 20
CHUNK = 128
T = TypeVar("T")


def seconds() -> float:
    """Processor time of this process and of the template process."""
    return time.process_time() + _template_seconds()


def _template_seconds() -> float:
    child = PROCESS.pid
    if child is None:
        return 0.0
    fields = Path(f"/proc/{child}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
