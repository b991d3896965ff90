"""Reads a reduced draft vocabulary: the token ids that a drafter may propose."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from thor_dflash.core import message_text, strict_records
from thor_dflash.core.errors import ConfigError


def read_draft_ids(path: Path, vocab: int) -> NDArray[np.int32]:
    """Read token ids, int32 [n], ascending, from a JSON list.

    Raises:
        ConfigError: the file is no such list, or its ids are not ascending and below `vocab`.
    """
    try:
        value: object = json.loads(strict_records.read_text(path))
    except OSError as e:
        raise ConfigError(
            f"build.draft_ids must be a readable file (got {path}: {e.strerror})"
        ) from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"build.draft_ids must be a JSON list of ids (got {path}: {e})") from e
    listed = strict_records.as_list(value)
    if not listed or any(type(i) is not int for i in listed):
        got = message_text.show(value)
        raise ConfigError(f"build.draft_ids must be a JSON list of ids (got {got})")
    ids = cast("list[int]", listed)
    wrong = [f"{i}" for i in (min(ids), max(ids)) if not 0 <= i < vocab]
    wrong += [f"{b} after {a}" for a, b in itertools.pairwise(ids) if a >= b]
    if wrong:
        raise ConfigError(
            f"build.draft_ids must be ascending ids from 0 to {vocab - 1} "
            f"(got {wrong[0]}, of {len(ids)} ids)"
        )
    return np.array(ids, np.int32)
