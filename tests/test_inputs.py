from __future__ import annotations

from pathlib import Path

import pytest

from thor_dflash.errors import RequestError
from thor_dflash.verbs.inputs import read_tokens


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, true]", r"tokens\[1\] must be an integer .got true"),
        ("[1.0]", r"tokens\[0\] must be an integer .got 1.0"),
        ("[1, [2]]", r"tokens\[1\] must be an integer .got \[2\]"),
        ("[null]", r"tokens\[0\] must be an integer .got null"),
        ("[1e999]", r"tokens\[0\] must be an integer .got Infinity"),
        ("[0, 299, 300]", r"tokens\[2\] must be in 0..299 .got 300"),
        ("[-1]", r"tokens\[0\] must be in 0..299 .got -1"),
        ("[]", r"must be a list of at least one token id .got \[\]"),
        ('{"a": 1}', "must be a list of at least one token id"),
        ("[1,", "must be JSON"),
        ("1" * 5000, "must be JSON"),
        ("\xff", "must be JSON"),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_token_files(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(RequestError, match=message) as error:
        read_tokens(path, 300)
    assert str(error.value).startswith(str(path))


def test_a_huge_token_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "t").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(RequestError, match="must be <= 67108864 bytes .got 1099511627776"):
        read_tokens(tmp_path / "t", 300)
