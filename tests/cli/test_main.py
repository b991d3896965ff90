"""The command line over a stand-in for the runtime: what `generate`, `build` and `demo` print and
hand over, and what is refused with one line and status 2.
"""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.samples import MANIFEST
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from thor_dflash.cli import main
from thor_dflash.config.decode import (
    GREEDY,
    NO_BUDGET,
    NO_DRAFT_LIMITS,
    BudgetConfig,
    DraftConfig,
    RelaxedConfig,
    SamplingConfig,
)
from thor_dflash.core.errors import ModelFault
from thor_dflash.core.results import Speculation, Timings, Usage
from thor_dflash.runtime.decoding.block import Sampling
from thor_dflash.runtime.session.admission import PackageText
from thor_dflash.runtime.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose ids are the 256 bytes, the two thinking marks and one stop token."""
    directory = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = HfTokenizer(models.BPE({word: i for i, word in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(w, normalized=False) for w in ("<think>", "</think>")])
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(
        "{{ messages[0].content }}|{{ '<think>' if enable_thinking else '' }}"
    )
    return Tokenizer.load(directory)


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    max_tokens: int
    max_answer: int
    stop: frozenset[int]
    drafter: str
    grammar: None = None
    budget: BudgetConfig = NO_BUDGET
    relaxed: RelaxedConfig | None = None
    gate: bool = False
    draft: DraftConfig = NO_DRAFT_LIMITS
    sampling: SamplingConfig = GREEDY


@dataclass(frozen=True)
class Chunk:
    tokens: tuple[int, ...]
    finish: str = ""
    encoded: bool = False


SPECULATION = Speculation(cycles=3, accept_len=2.5)
USAGE = Usage(prompt_tokens=4, thinking_tokens=6, output_tokens=2)
TIMINGS = Timings(prefill_ms=0.25)


DRAWN = Sampling(temperature=1.0, seed=7, rejection=True)


@dataclass(frozen=True)
class Report:
    spec: Speculation = SPECULATION
    usage: Usage = USAGE
    timings: Timings = TIMINGS
    phases_ms: dict[str, float] = field(default_factory=lambda: {"host": 1.5})
    phases: dict[str, Speculation] = field(default_factory=lambda: {"answer": Speculation()})
    close: str = "natural"
    sampling: Sampling | None = DRAWN
    notes: tuple[Usage, ...] = (USAGE,)
    drafts: tuple[Usage, ...] = ()


@dataclass
class Session:
    """Stands in for a session: gives `answer` to every request and keeps the requests. `fault` is
    raised after the answer's last token.
    """

    tokenizer: Tokenizer | None
    answer: str = "think</think>\n\nhé<|im_end|>"
    manifest: Any = MANIFEST
    model: Any = field(default_factory=lambda: SimpleNamespace(limit=2000))
    fault: BaseException | None = None
    requests: list[Request] = field(default_factory=list)
    closed: bool = False

    @property
    def package_text(self) -> PackageText:
        capacity = self.model.limit + self.manifest.block
        return PackageText(self.manifest, self.tokenizer, capacity)

    def generate(self, request: Request) -> Iterator[Chunk]:
        self.requests.append(request)
        tokens = self.tokenizer.encode(self.answer) if self.tokenizer else [5, 6, 7]
        for i, token in enumerate(tokens):
            yield Chunk((token,), "stop" if i + 1 == len(tokens) and not self.fault else "")
        if self.fault:
            raise self.fault

    def report(self) -> Report:
        return Report()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def session(text: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A stand-in that `open_session` returns, so that no model is needed."""
    it = Session(text)
    install(monkeypatch, "runtime.session", open_session=lambda *a, **options: it, Request=Request)
    return it


def install(monkeypatch: pytest.MonkeyPatch, name: str, **names: object) -> None:
    module = ModuleType(f"thor_dflash.{name}")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, f"thor_dflash.{name}", module)


def generate(*args: str) -> int:
    return main.main(["generate", "--package", "pkg", *args])


def line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("thor-dflash: ")
    assert err.count("\n") == 1
    return err.removeprefix("thor-dflash: ")


# --- generate


def test_plain_output_is_the_text(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("--prompt", "hi", "--max-tokens", "9") == 0
    out, err = capsys.readouterr()
    assert out == "think</think>\n\nhé\n"
    assert "tokens in" in err
    assert "3 cycles of 2.50 tokens, ended by stop, seed 7 with rejection" in err
    request = session.requests[0]
    assert session.tokenizer
    assert request.prompt == tuple(session.tokenizer.encode("hi|<think>"))
    assert (request.max_answer, request.stop, request.drafter) == (9, {271, 272}, "auto")
    assert session.closed


def test_json_is_one_object(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("--prompt", "hi", "--json", "--drafter", "none", "--ignore-eos") == 0
    out, err = capsys.readouterr()
    assert err == "answering\n"
    assert out.count("\n") == 1
    got = json.loads(out)
    keys = ["tokens", "text", "plan", "thinking", "finish_reason", "seed", "acceptance", "usage"]
    assert list(got) == [*keys, "spec", "timings", "phases", "close_kind", "notes", "drafts"]
    assert (got["seed"], got["acceptance"]) == (7, "rejection")
    assert session.tokenizer
    assert got["tokens"] == session.tokenizer.encode(session.answer)
    assert (got["text"], got["thinking"], got["finish_reason"]) == ("hé", "think", "stop")
    assert got["plan"] is None
    assert got["usage"] == dataclasses.asdict(USAGE)
    assert got["spec"] == {
        **dataclasses.asdict(SPECULATION),
        "accept_hist": [],
        "accepted_per_position": [],
    }
    assert got["timings"] == {**dataclasses.asdict(TIMINGS), "phases_ms": {"host": 1.5}}
    assert (session.requests[0].drafter, session.requests[0].stop) == ("none", frozenset())


def test_sampling_is_passed_on(session: Session) -> None:
    words = "--temperature 0.7 --top-p 0.8 --top-k 20 --min-p 0.01 --seed 9223372036854775807"
    words += " --acceptance rejection"
    assert generate("--prompt", "hi", *words.split()) == 0
    assert session.requests[0].sampling == SamplingConfig(
        temperature=0.7, top_p=0.8, top_k=20, min_p=0.01, seed=2**63 - 1, acceptance="rejection"
    )


def test_json_has_the_plan_of_an_answer_that_is_one(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.answer = 'think</think>{"goal": "x"}'
    assert generate("--prompt", "hi", "--json") == 0
    assert json.loads(capsys.readouterr().out)["plan"] == {"goal": "x"}


def test_messages(session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.json"
    path.write_text('[{"role": "user", "content": "yo"}]')
    assert generate("--messages", str(path)) == 0
    assert session.tokenizer
    assert session.requests[0].prompt == tuple(session.tokenizer.encode("yo|<think>"))
    capsys.readouterr()
    path.write_text('[{"role": "user"}]')
    assert generate("--messages", str(path)) == 2
    assert line(capsys) == "messages[0].content must be present (got nothing)\n"


def test_without_a_tokenizer_only_ids(
    session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session.tokenizer, session.manifest = None, replace(MANIFEST, drafter=None)
    assert generate("--prompt", "hi") == 2
    assert (
        line(capsys) == "the prompt must be given as --tokens (got a package without a tokenizer)\n"
    )
    (tmp_path / "t").write_text("[1, 2]")
    assert generate("--tokens", str(tmp_path / "t")) == 0
    assert capsys.readouterr().out == "5 6 7 \n"
    assert generate("--tokens", str(tmp_path / "t"), "--json") == 0
    got = json.loads(capsys.readouterr().out)
    assert (got["tokens"], got["text"], got["thinking"]) == ([5, 6, 7], None, None)
    assert session.requests[-1] == Request((1, 2), 1024, 1024, frozenset({271, 272}), "auto")
    assert generate("--tokens", str(tmp_path / "t"), "--drafter", "dflash") == 2
    assert "the package's (got dflash)" in line(capsys)
    (tmp_path / "t").write_text("[1, 300]")
    assert generate("--tokens", str(tmp_path / "t")) == 2
    assert line(capsys) == "tokens[1] must be in 0..299 (got 300)\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("fault", "code"), [(ModelFault("row 3 is NaN"), 2), (KeyboardInterrupt(), 130)]
)
def test_a_fault_while_thinking_leaves_a_clean_terminal(
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: BaseException,
    code: int,
) -> None:
    screen = Terminal()
    session.answer, session.fault = "thin", fault
    monkeypatch.setattr(sys, "stdout", screen)
    assert generate("--prompt", "hi") == code
    assert screen.getvalue() == "\x1b[2mthin\x1b[0m\n"
    assert capsys.readouterr().err == f"thor-dflash: {str(fault) or 'interrupted'}\n"
    assert session.closed


# --- what is refused


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("", "the following arguments are required: COMMAND (see thor-dflash --h"),
        ("generate --package p", "one of the arguments --prompt --messages --tokens is required"),
        ("generate --package p --prompt a --max-tok 3", "unrecognized arguments: --max-tok"),
        ("generate --package p --prompt a --max-tokens x", "decode.max_tokens must be an integer"),
        ("generate --package p --prompt= ", "--prompt must be a text that"),
        ("generate --package p --prompt a -c no.toml", "no.toml must be a readable file"),
        ("build --target t --out .", "must be free or a thor-dflash package"),
        ("score --package p --tokens t --out x.npy", "--out must be a path ending in .npz"),
    ],
)
@pytest.mark.usefixtures("session")
def test_what_is_wrong_is_one_line_with_status_2(
    args: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)  # where the relative paths lead nowhere and may be written
    (tmp_path / "taken").write_text("")
    for name in ("builders.build", "runtime.measure.score", "calib.demo"):
        install(monkeypatch, name, build=None, blocks=None, shapes=None, run=None)
    assert main.main(args.split()) == 2
    assert message in line(capsys)


# --- build, demo


def test_build_and_demo_hand_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    install(monkeypatch, "builders.build", build=lambda *a: seen.append(a) or MANIFEST)
    assert main.main(["build", "--target", "t", "--out", "o", "-s", "build.kv=fp8"]) == 0
    target, drafter, out, config, _ = seen[0]
    assert (target, drafter, out, config.kv) == (Path("t"), None, Path("o"), "fp8")
    text = capsys.readouterr().out
    assert "skipped tensors: model.visual.patch, mtp.fc.weight" in text

    import thor_dflash.calib

    demo = ModuleType("demo")
    vars(demo)["run"] = lambda config, progress: seen.append(config)
    monkeypatch.setitem(sys.modules, "thor_dflash.calib.demo", demo)
    monkeypatch.setattr(thor_dflash.calib, "demo", demo, raising=False)
    assert main.main(["demo", "-s", "engine.threads=1"]) == 0
    assert seen[-1].engine.threads == 1
