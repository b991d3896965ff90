"""Text to ids and back, chat templates, the split of an answer from its thinking, and what is read
from tokenizer files.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from thor_dflash.core.errors import CheckpointError, PackageError, RequestError
from thor_dflash.package import tokenizer_files as files
from thor_dflash.runtime.text.messages import chat
from thor_dflash.runtime.text.thinking import TextPiece
from thor_dflash.runtime.text.tokenizer import Answer, Tokenizer

TEMPLATE = (
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}"
    "{%- if not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SHOWN = ("<think>", "</think>", "<tool_call>")


def make(directory: Path) -> dict[str, int]:
    """A small byte-level BPE in `directory`, in the shape of Qwen's; return the id of each word."""
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["the robot picks the red cup", "über 日本 the"], trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in SHOWN])
    tokenizer.save(str(directory / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    rows = {str(size): {"content": "<|audio|>", "special": True}}
    write(directory, "tokenizer_config.json", added_tokens_decoder=rows, eos_token="<|im_end|>")
    write(directory, "generation_config.json", eos_token_id=[size - 4, size - 6])
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return {**tokenizer.get_vocab(), "<|audio|>": size}


def write(directory: Path, name: str, **table: object) -> None:
    (directory / name).write_text(json.dumps(table))


def edit(directory: Path, name: str, **table: object) -> None:
    write(directory, name, **json.loads((directory / name).read_text(encoding="utf-8")) | table)


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Tokenizer, dict[str, int], HfTokenizer]:
    directory = tmp_path_factory.mktemp("tokenizer")
    ids = make(directory)
    return Tokenizer.load(directory), ids, HfTokenizer.from_file(str(directory / "tokenizer.json"))


Shared = tuple[Tokenizer, dict[str, int], HfTokenizer]


@pytest.mark.parametrize(
    "text", ["", "the robot", " the", "日本 über", "🤖", "a\x00b\r\n", "<think>x"]
)
def test_encode_then_decode_is_the_text(shared: Shared, text: str) -> None:
    assert shared[0].decode(shared[0].encode(text)) == text


def test_special_tokens_are_one_id_and_no_text_and_thinking_is_text(shared: Shared) -> None:
    text, ids, _ = shared
    assert text.encode("<|im_end|><think>") == [ids["<|im_end|>"], ids["<think>"]]
    assert text.decode([ids["<think>"], ids["<|im_end|>"], ids["</think>"]]) == "<think></think>"
    assert (
        text.decode([ids["<tool_call>"], ids["<|endoftext|>"], ids["<|audio|>"]]) == "<tool_call>"
    )
    assert text.encode("<|audio|>") == [ids["<|audio|>"]]
    assert (text.think, text.end_think) == (ids["<think>"], ids["</think>"])
    assert text.decode([10**6]) == ""  # an id that no token has is no text


@pytest.mark.parametrize("inside", [True, False])
def test_a_token_is_special_if_one_of_both_files_says_so(tmp_path: Path, inside: bool) -> None:
    """transformers 5.24 leaves it out of the text then, too."""
    ids = make(tmp_path)
    table = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    for row in table["added_tokens"]:
        row["special"] &= inside or row["content"] != "<|im_start|>"
    edit(tmp_path, "tokenizer.json", **table)
    one = ids["<|im_start|>"]
    rows = {str(one): {"content": "<|im_start|>", "special": not inside}}
    edit(tmp_path, "tokenizer_config.json", added_tokens_decoder=rows)
    assert Tokenizer.load(tmp_path).decode([ids["<think>"], one]) == "<think>"


@given(tokens=st.lists(st.integers(0, 305)), cuts=st.lists(st.integers(0, 20)))
def test_decoding_piece_by_piece_is_decoding_at_once(
    shared: Shared, tokens: list[int], cuts: list[int]
) -> None:
    text, _, tokenizer = shared
    stream, at, written = text.stream(), 0, ""
    for cut in cuts:
        written += stream.feed(tokens[at : at + cut])
        at += cut
    written += stream.feed(tokens[at:]) + stream.end()
    assert written == text.decode(tokens)
    # The tokenizers library decodes independently of our code. Both drop ids that have no word.
    assert written == tokenizer.decode(tokens, skip_special_tokens=True)


@given(st.text(alphabet="日ü🤖a\ufffd", max_size=8))
def test_a_stream_never_shows_half_a_character(shared: Shared, written: str) -> None:
    text, _, _ = shared
    stream, out = text.stream(), ""
    for token in text.encode(written):
        out += stream.feed([token])
        assert written.startswith(out)
    assert out + stream.end() == written


def test_a_stream_cut_inside_a_character_says_so(shared: Shared) -> None:
    text, ids, _ = shared
    stream = text.stream()
    assert stream.feed([ids["ð"]]) == ""  # the first byte of four
    assert stream.end() == "\ufffd"


def test_text_that_was_not_utf8_is_refused(shared: Shared) -> None:
    with pytest.raises(RequestError, match="text must be UTF-8"):
        shared[0].encode("a\udcff")


def test_render(shared: Shared) -> None:
    written = [{"role": "system", "content": "s"}, {"role": "user", "content": " hi "}]
    start = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    opened = "<|im_start|>assistant\n<think>\n"
    assert shared[0].render(written, thinking=True) == start + opened
    assert shared[0].render(written, thinking=False) == start + opened + "\n</think>\n\n"


def template(directory: Path, source: str) -> Tokenizer:
    make(directory)
    (directory / "chat_template.jinja").write_text(source)
    return Tokenizer.load(directory)


ONE = [{"role": "user", "content": "<é>"}]


def test_template_dialect(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}\n"
        "{{ m | tojson }}{{ eos_token }}{{ tools is none }}{% break %}\n"
        "{% endfor %}\n{{ strftime_now('%%') }}"
    )
    text = template(tmp_path, source)
    assert text.render(ONE, True) == '{"role": "user", "content": "<é>"}<|im_end|>True%'


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("{% if %}", PackageError, "chat template must be valid jinja"),
        ("{{ 1 / 0 }}", RequestError, "template .got: ZeroDivisionError"),
        ("{{ '\\ud800' }}", RequestError, "template .got: UnicodeEncodeError"),
        ("{{ ''.__class__.__mro__ }}", RequestError, "must suit the chat template.*unsafe"),
        ("{{ raise_exception('No user query') }}", RequestError, "template .got: No user query"),
        ("{{ messages.append(1) }}", RequestError, "append.* is unsafe"),
    ],
)
def test_template_failures(
    tmp_path: Path, source: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        template(tmp_path, source).render(ONE, True)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ({"role": "user"}, "messages must be a list of at least one"),
        (["hi"], r'messages\[0\] must be an object .got "hi"'),
        ([{"role": "user"}], r"messages\[0\].content must be present"),
        (
            [{"role": "developer", "content": "x"}],
            r"\.role must be one of system, user, .*developer",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"\.content\[0\] must be a part"),
        ([{"role": "assistant", "content": [{"type": "image"}]}], r"\.content must be a string"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"must show 0 images"),
        ([{"role": "user", "content": "x", "name": "y"}], r'tool_call_id .got "name"'),
    ],
)
def test_a_chat_is_checked(messages: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        chat(messages)


def test_a_text_at_which_the_library_panics_is_refused(tmp_path: Path) -> None:
    """As Qwen's own pattern does at ten million spaces, here for a text that takes less time."""
    make(tmp_path)
    split = {"type": "Split", "pattern": {"Regex": r"^(a|aa)+\1c"}, "behavior": "Isolated"}
    edit(tmp_path, "tokenizer.json", pre_tokenizer={**split, "invert": False})
    text = Tokenizer.load(tmp_path)
    with pytest.raises(RequestError, match="can split .got: Onig"):
        text.encode("a" * 40)
    assert text.decode(text.encode("aa")) == "aa"


def test_a_missing_or_unsupported_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="must be a tokenizer"):
        Tokenizer.load(tmp_path)
    make(tmp_path)
    edit(tmp_path, "tokenizer.json", decoder={"type": "Fuse"})
    with pytest.raises(PackageError, match="decoder must be ByteLevel .got Fuse"):
        Tokenizer.load(tmp_path)


# --- thinking and the answer


def answer(shared: Shared, prompt: str, written: str) -> tuple[Answer, list[TextPiece]]:
    text = shared[0]
    result = Answer(text, text.encode(prompt))
    pieces = [piece for token in text.encode(written) for piece in result.feed([token])]
    return result, pieces + result.end()


@pytest.mark.parametrize(
    ("prompt", "written", "thinking", "text", "count"),
    [
        ("<think>\n", "the\n</think>\n\nred<|im_end|>", "the", "red", True),
        ("<think>\n", "the red", "the red", "", True),
        ("<think>\n\n</think>\n\n", "red cup", "", "red cup", False),
        ("x", "<think>\nthe\n</think>\n\nred", "the", "red", True),
        ("x", "red <think>", "", "red <think>", False),
        ("<think>a</think><think>\n", "</think>red", "", "red", True),
        ("<think>\n", "</think></think>", "", "</think>", True),
        ("<think>\n", "", "", "", False),
    ],
)
def test_an_answer_is_split_where_thinking_ends(
    shared: Shared, prompt: str, written: str, thinking: str, text: str, count: bool
) -> None:
    result, pieces = answer(shared, prompt, written)
    assert (result.thinking(), result.text()) == (thinking, text)
    assert bool(result.thinking_tokens) == count
    assert "".join(p.text for p in pieces) == shared[0].decode(shared[0].encode(written))
    assert "".join(p.text for p in pieces if not p.thinking).lstrip("\n") == text


def test_a_mark_between_two_halves_of_a_character_leaves_them_halves(shared: Shared) -> None:
    text = shared[0]
    first, second = (
        next(token for token in range(1280) if text.bytes_of(token) == half)
        for half in (b"\xc3", b"\xa9")
    )
    assert text.think is not None
    result = Answer(text, text.encode("<think>\n"))
    pieces = [*result.feed([first, text.think, second]), *result.end()]
    assert [p.text for p in pieces] == ["\ufffd", "<think>", "\ufffd"]
    assert result.thinking() == "\ufffd\ufffd"


# --- what the files say


def test_stop_tokens(tmp_path: Path) -> None:
    ids = make(tmp_path)
    assert files.stop_tokens(tmp_path) == (ids["<|im_end|>"], ids["<|endoftext|>"])
    write(tmp_path, "generation_config.json", eos_token_id=7)
    assert files.stop_tokens(tmp_path) == (7, ids["<|im_end|>"]), "the end of a turn, too"
    write(tmp_path, "generation_config.json", temperature=1)
    assert files.stop_tokens(tmp_path) == (ids["<|im_end|>"],)
    (tmp_path / "generation_config.json").unlink()
    edit(tmp_path, "tokenizer_config.json", eos_token={"content": "a"})  # a learned word
    assert files.stop_tokens(tmp_path) == (ids["a"],)
    edit(tmp_path, "tokenizer_config.json", eos_token="<|none|>")
    with pytest.raises(CheckpointError, match='eos_token must be a token .got "<|none|>"'):
        files.stop_tokens(tmp_path)
    write(tmp_path, "generation_config.json", eos_token_id=7)
    assert files.stop_tokens(tmp_path) == (7,)
    (tmp_path / "generation_config.json").unlink()
    edit(tmp_path, "tokenizer_config.json", eos_token=None)
    assert files.stop_tokens(tmp_path) == ()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "{", "must be JSON"),
        ("tokenizer_config.json", "[" * 100_000, "must be JSON"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"' + "9" * 5000 + '": {"content": "y"}}}',
            "must have id and content",
        ),
        ("tokenizer.json", '{"added_tokens": [{"id": 3}]}', "must have id and content"),
        ("tokenizer.json", '{"model": {"vocab": {"a": "b"}}}', "id of 'a' must be >= 0"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message) as error:
        files.addressed_ids(tmp_path)
    assert name in str(error.value)
