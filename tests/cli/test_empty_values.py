"""An option whose value is empty, as from a variable that is not set, is not an option left out."""

from __future__ import annotations

import pytest

from thor_dflash.cli.parser import parser
from thor_dflash.core.errors import ConfigError

LINES = (
    "gateway --keys", "serve --mock --curve", "serve --mock --events", "serve --mock --prefix-dir",
)  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_an_empty_name_switches_nothing_off(line: str) -> None:
    said = rf"^argument {line.split()[-1]}: must be a path \(got an empty name\)"
    with pytest.raises(ConfigError, match=said):
        parser().parse_args([*line.split(), ""])
