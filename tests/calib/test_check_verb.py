"""What `check` refuses before it compares."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from samples import MANIFEST

from thor_dflash.calib.check.compare import compare
from thor_dflash.errors import RequestError
from thor_dflash.progress import Silent
from thor_dflash.runtime.session import Session


def test_an_engine_that_shows_nothing_needs_a_reference() -> None:
    session = SimpleNamespace(manifest=replace(MANIFEST, engine="tensorrt"))
    with pytest.raises(RequestError, match="check of engine tensorrt, .* must go with --reference"):
        compare(cast("Session", session), None, None, (1,), "auto", None, Silent())
