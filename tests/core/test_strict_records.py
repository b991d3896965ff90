"""JSON files that are read as a dataclass: an error names the file and what is wrong in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thor_dflash.core.errors import PackageError
from thor_dflash.core.message_text import LINE, one_line, visible
from thor_dflash.package import launch_program

VERIFY: dict[str, object] = {
    "name": "verify", "inputs": {}, "outputs": {}, "values": {}, "weights": {}, "steps": [],
    "scratch": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "must be JSON (got: "),
        ('{"naem": 1}', "unknown key naem (did you mean name?)"),
        ("{}", "name must be present (got nothing)"),
        (json.dumps({**VERIFY, "scratch": True}), "scratch must be an integer (got true)"),
        (json.dumps({**VERIFY, "inputs": {"x": {"dtype": "int32", "shape": [True]}}}),
         "inputs.x.shape[0] must be an integer or a string (got true)"),
        (json.dumps({**VERIFY, "weights": {"w": {"dtype": "int32", "shape": ["T"], "file": "w",
                                                 "offset": 0}}}),
         "weights.w.shape[0] must be an integer (got \"T\")"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_of_a_package_names_the_file(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = tmp_path / "verify.program.json"
    path.write_text(text)
    with pytest.raises(PackageError) as error:
        launch_program.read(tmp_path, "verify")
    assert str(error.value).startswith((f"{path} {problem}", f"{path}: {problem}"))


def test_a_size_may_be_a_symbol_or_a_number_and_weights_take_their_product(tmp_path: Path) -> None:
    table = {
        **VERIFY,
        "inputs": {"x": {"dtype": "bfloat16", "shape": ["T", 8]}},
        "weights": {"w": {"dtype": "bfloat16", "shape": [3, 5], "file": "w", "offset": 64}},
    }
    (tmp_path / "verify.program.json").write_text(json.dumps(table))
    found = launch_program.read(tmp_path, "verify")
    assert found.inputs["x"].shape == ("T", 8)
    assert found.weights["w"].nbytes == 3 * 5 * 2
    (tmp_path / "verify.program.json").write_text(launch_program.render(found))
    assert launch_program.read(tmp_path, "verify") == found


def test_a_message_is_one_visible_line_of_bounded_length() -> None:
    assert one_line("a\x1b[31m b\n  c\x07\ud800") == "a\\x1b[31m b c\\x07\\ud800"
    assert one_line("café 日本") == "café 日本"
    assert one_line("x" * LINE) == "x" * LINE
    long = one_line(f"begin {'x' * 10**6} end")
    assert len(long) == LINE
    assert long.startswith("begin x")
    assert long.endswith("x end")
    assert " ... " in long


def test_a_text_keeps_the_unprintable_characters_that_are_its_layout() -> None:
    assert visible("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"
    for text in ("赤い\u3000カップ", "می\u200cخواهم", "👨\u200d🔧", "10\u00a0cm"):
        assert visible(text) == text
    assert visible("\u202egnp.exe\u2028") == "\\u202egnp.exe\\u2028"  # direction, line separator
