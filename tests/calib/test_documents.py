"""The reader of documents: what it accepts, and a hostile line of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.planner_nano import NANO

from thor_dflash.calib.documents import read_documents
from thor_dflash.core.errors import RequestError
from thor_dflash.runtime.text.tokenizer import Tokenizer

VOCAB = 2048


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(NANO / "target")


def test_every_kind_of_line_is_read(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "d.jsonl"
    chat = [{"role": "user", "content": "move"}, {"role": "assistant", "content": "done\u2028."}]
    rows = [{"messages": chat, "class": "plan"}, {"text": "A line."}, {"tokens": [0, VOCAB - 1]}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    found = read_documents(path, tokenizer, VOCAB)
    assert [one.label for one in found] == ["plan", "", ""]
    assert "done\u2028." in tokenizer.decode(found[0].tokens)
    assert tokenizer.decode(found[1].tokens) == "A line."
    assert found[2].tokens == (0, VOCAB - 1)


HOSTILE = {
    "": "at least one document",
    "\n \n": "at least one document",
    "{": "line 1 must be JSON",
    "[" * 100_000: "line 1 must be JSON",
    '{"text": "a", "text": "b"}': "line 1 must be JSON",
    "[1]": "line 1 must be an object with one of",
    "{}": "line 1 must be an object with one of",
    '{"text": "a", "tokens": [1]}': "line 1 must be an object with one of",
    '{"prompt": "a"}': "line 1: unknown key prompt",
    '{"text": "a", "clas": "b"}': "line 1: unknown key clas .did you mean class",
    '{"text": "a", "class": 1}': "class must be a string",
    '{"text": ""}': "text must be a string",
    '{"text": ["a"]}': "text must be a string",
    '{"text": "\\ud800"}': "line 1: text",
    '{"tokens": []}': "tokens must be a list of integers",
    '{"tokens": [true]}': "tokens must be a list of integers",
    '{"tokens": [1.0]}': "tokens must be a list of integers",
    '{"tokens": [1]}\n{"tokens": [5, -1]}': r"line 2: tokens\[1\] must be 0 to",
    f'{{"tokens": [{VOCAB}]}}': r"tokens\[0\] must be 0 to",
    f'{{"tokens": [{"9" * 4000}]}}': r"tokens\[0\] must be 0 to",
    f'{{"tokens": [{"9" * 5000}]}}': "line 1 must be JSON",
    '{"messages": []}': "line 1: messages must be a list",
    '{"messages": [{"role": "robot", "content": ""}]}': r"messages\[0\].role",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_line_is_refused_by_name(tmp_path: Path, tokenizer: Tokenizer, text: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(text)
    with pytest.raises(RequestError, match=HOSTILE[text]) as caught:
        read_documents(path, tokenizer, VOCAB)
    assert str(caught.value).startswith(str(path))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "d.jsonl"
    for data in (None, b"\xff\xfe", b'{"text": "' + b"a" * 100 + b'"}'):
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(RequestError, match=r"d\.jsonl must be a"):
            read_documents(path, tokenizer, VOCAB, limit=64)
    path.write_text('{"text": "a"}')
    with pytest.raises(RequestError, match="a model that has a tokenizer"):
        read_documents(path, None, VOCAB)
