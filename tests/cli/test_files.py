"""Files that the command line reads and writes: an error names the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.samples import package

from thor_dflash.cli import output_files
from thor_dflash.cli.input_files import in_vocabulary, read_json, read_tokens
from thor_dflash.core.errors import PackageError, RequestError


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, true]", r"tokens\[1\] must be an integer .got true"),
        ("[]", r"must be a list of at least one token id .got \[\]"),
        ('{"a": 1}', "must be a list of at least one token id"),
        ("[1,", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
    ],
)
def test_a_file_that_is_no_list_of_ids_is_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(RequestError, match=message) as error:
        read_tokens(path)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize(("bad", "at"), [((0, 299, 300), 2), ((-1,), 0), ((5, 10**30), 1)])
def test_ids_outside_the_vocabulary_are_refused(bad: tuple[int, ...], at: int) -> None:
    with pytest.raises(RequestError, match=rf"tokens\[{at}\] must be in 0..299 .got {bad[at]}"):
        in_vocabulary(bad, 300)
    assert in_vocabulary((0, 299), 300) == (0, 299)


def test_an_output_takes_the_place_of_a_file_and_not_of_a_directory(tmp_path: Path) -> None:
    out = tmp_path / "x.npz"
    for text in (b"old", b"new"):
        output_files.check(out, ".npz", "--out")
        with output_files.whole(out) as file:
            file.write(text)
        assert out.read_bytes() == text
    (tmp_path / "y.npz").mkdir()
    with pytest.raises(RequestError, match="--out must be a file in a directory that exists"):
        output_files.check(tmp_path / "y.npz", ".npz", "--out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npz", "y.npz"]


def test_an_output_by_a_link_into_a_package_is_refused(tmp_path: Path) -> None:
    package(tmp_path / "p", weights__a=b"a")
    (tmp_path / "link").symlink_to(tmp_path / "p/weights")
    with pytest.raises(
        PackageError, match=r"--out must be outside any package .got .*/link/x.npz, in .*/p"
    ):
        output_files.check(tmp_path / "link/x.npz", ".npz", "--out")


def test_a_key_given_twice_is_refused_since_one_of_its_values_would_be_ignored(
    tmp_path: Path,
) -> None:
    (tmp_path / "t").write_text('{"b": {"a": 1, "c": 2, "a": 3}}')
    with pytest.raises(RequestError, match=r"t must be JSON \(got: the key 'a' twice\)"):
        read_json(tmp_path / "t")
