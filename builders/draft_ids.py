"""A reduced draft vocabulary: the ids a drafter may propose."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from thor_dflash import records
from thor_dflash.errors import ConfigError


def read_draft_ids(path: Path, vocab: int) -> NDArray[np.int32]:
    """int32 [n], ascending, from a JSON list.

    Raises:
        ConfigError: no such list, or ids that are not ascending and below `vocab`.
    """
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(
            f"build.draft_ids must be a readable file (got {path}: {e.strerror})"
        ) from e
    except ValueError as e:
        raise ConfigError(f"build.draft_ids must be a JSON list of ids (got {path}: {e})") from e
    listed = records.as_list(value)
    if not listed or any(type(i) is not int for i in listed):
        raise ConfigError(f"build.draft_ids must be a JSON list of ids (got {records.show(value)})")
    ids = cast("list[int]", listed)
    if not 0 <= min(ids) <= max(ids) < vocab or any(a >= b for a, b in itertools.pairwise(ids)):
        raise ConfigError(
            f"build.draft_ids must be ascending ids below {vocab} "
            f"(got {len(ids)} from {ids[0]} to {ids[-1]})"
        )
    return np.array(ids, np.int32)
