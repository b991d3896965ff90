"""What a reader copies: the commands of the pages, and the files of docs/examples."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support.planner_nano import package, tasks

from thor_dflash.calib.pictured_files import pairs
from thor_dflash.calib.planbench import judge
from thor_dflash.cli import main, parser
from thor_dflash.config import tree
from thor_dflash.config.serving import ServeConfig
from thor_dflash.core import errors
from thor_dflash.runtime import session
from thor_dflash.serving import client
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.planner.plan_schema import from_skills
from thor_dflash.serving.server.server import serving

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs/examples"
README = ROOT / "README.md"
COMMANDS = ROOT / "docs/guide/commands.md"
IMAGES = ROOT / "docs/guide/images.md"
COMMAND_FILES = sorted((ROOT / "thor_dflash/cli/commands").glob("*.py"))
PAGES = [
    README,
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINKED = sorted(page for page in ROOT.rglob("*.md") if not {".venv", "build"} & {*page.parts})
"""Every page; those of a link to a folder are there twice, and resolve."""
TASK = re.compile(r'"(\$TASK|\$\(cat docs/examples/task\.txt\))"')


def commands(page: Path) -> Iterator[str]:
    """Every command of thor-dflash in a page, less those in brackets, which show what there is."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(r"^ *(thor-dflash .*)$", text, re.M)
    return (line for line in found if "[-" not in line)


def words(command: str) -> list[str]:
    """The arguments of a command, without what the shell does with its output."""
    task = shlex.quote((EXAMPLES / "task.txt").read_text(encoding="utf-8").strip())
    given = shlex.split(TASK.sub(lambda _: task, command), comments=True)[1:]
    return given[: given.index(">")] if ">" in given else given


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_command_line_knows_every_option_of_the_pages(page: Path) -> None:
    for command in commands(page):
        parser.parse(words(command))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), link


def test_every_file_that_a_page_names_is_there() -> None:
    tops = "plugins|runtime|serving|builders|calib|tests|thor_dflash"
    named = re.compile(rf"\b(?:{tops})/[\w/]+\.(?:py|cuh?|jinja)\b")
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        if page.parent.name != "performance":  # commands of earlier days
            files = named.findall(page.read_text(encoding="utf-8"))
            assert not [file for file in files if not (ROOT / file).is_file()], page


def test_the_page_on_commands_shows_every_command() -> None:
    shown = {words(command)[0] for command in commands(COMMANDS)} | {"demo", "keygen"}
    assert shown == {path.stem.replace("_", "-") for path in COMMAND_FILES} - {"--init--"}


SERVING = {"serve": "serve", "gateway": "http"}
"""Command -> the extra that it asks for."""
INSTALL = re.compile(r"^pip install -c constraints\.txt -e '\.\[([\w,]+)\]'", re.M)


@pytest.mark.parametrize(
    "page", [COMMANDS, ROOT / "docs/guide/serving.md"], ids=lambda page: page.name
)
def test_a_page_says_what_to_install_before_a_command_that_needs_it(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    shown = {words(command)[0] for command in commands(page)} & SERVING.keys()
    assert shown == SERVING.keys()
    for verb in shown:
        before = text[: text.index(f"\nthor-dflash {verb} ")]
        assert SERVING[verb] in ",".join(INSTALL.findall(before)).split(","), verb


@pytest.mark.parametrize("verb", SERVING)
def test_a_command_asks_for_the_extra_that_the_pages_name(verb: str) -> None:
    module = importlib.import_module(f"thor_dflash.cli.commands.{verb}")
    assert set(re.findall(r'extra\("(\w+)"\)', inspect.getsource(module))) == {SERVING[verb]}


def test_the_example_is_a_held_out_task() -> None:
    text = (EXAMPLES / "task.txt").read_text(encoding="utf-8")
    assert text == tasks()[0].messages[1][1] + "\n"


def test_the_example_schema_is_that_of_the_page_on_grammars() -> None:
    page = (ROOT / "docs/guide/grammar.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(textwrap.dedent(page[page.index("    skills =") : page.index("    session =")]), names)
    schema = from_skills(names["skills"], names["ids"], numbered=False)
    assert json.dumps(json.loads((EXAMPLES / "plan.json").read_text())) == json.dumps(schema)


def test_the_example_of_a_configuration_fits_the_small_model(tmp_path: Path) -> None:
    page = (ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)
    (file := tmp_path / "robot.toml").write_text(example)
    settings = tree.load(file, ())
    model = json.loads((ROOT / "models/planner-nano/target/config.json").read_text())
    longest = model.get("text_config", model)["max_position_embeddings"]
    serve = settings.serve
    assert serve.max_tokens + serve.thinking_budget < settings.engine.capacity <= longest
    for endpoint in serve.bind:
        assert endpoint.startswith("tcp://127.0.0.1:") or "/" not in endpoint.partition("://")[2]


@pytest.mark.parametrize("name", ["../README.md", "robot.md", "reference/python.md"])
def test_the_python_of_a_page_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks of Python of a page, one after another, against a mock server."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    config = ServeConfig(bind=("tcp://127.0.0.1:*",))
    with serving(
        lambda: MockBackend(config, cycle_s=0.02), config, log=lambda line: None
    ) as server:
        code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S))
        assert "tcp://127.0.0.1:5571" in code
        exec(code.replace("tcp://127.0.0.1:5571", server.endpoints[0]), {"__name__": "page"})


def test_the_pages_on_performance_are_those_of_their_results() -> None:
    script = ROOT / "docs/performance/generate.py"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_python_page_has_every_public_name() -> None:
    page = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", page))
    for module in (client, session):
        assert set(module.__all__) <= words
    assert {name for name, value in vars(errors).items() if inspect.isclass(value)} <= words
    methods = {name for name in vars(client.RemotePlanner) if not name.startswith("_")}
    assert methods <= words


@pytest.mark.slow
def test_the_model_that_sees_solves_the_examples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the pages generate with a picture are plans for what is in it."""
    monkeypatch.chdir(ROOT)
    every = {c for page in (README, IMAGES) for c in commands(page) if "planner-eyes" in c}
    made = [[str(tmp_path / w) if w == "planner-eyes" else w for w in words(c)] for c in every]
    [build] = [command for command in made if command[0] == "build"]
    assert main.main(build) == 0
    *_, pair = islice(pairs(), 3)
    shown = dict(zip(("3a.png", "3b.png"), pair, strict=True))
    seen = [command for command in made if command[0] == "generate"]
    assert {Path(command[-1]).name for command in seen} == shown.keys()
    for command in seen:
        capsys.readouterr()
        assert main.main([*command, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)["text"]
        assert judge(shown[Path(command[-1]).name].task, answer).valid, command


@pytest.mark.slow
def test_the_small_model_solves_the_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the page on commands generates are plans, also with a schema or a budget."""
    monkeypatch.chdir(ROOT)
    made = str(package(tmp_path / "planner", kv="auto", activations="auto", capacity=0))
    run = [c for c in commands(COMMANDS) if c.startswith("thor-dflash generate") and TASK.search(c)]
    assert len(run) == 6
    for command in run:
        given = [made if word == "planner" else word for word in words(command)]
        assert main.main([*given, *([] if "--json" in given else ["--json"])]) == 0
        assert judge(tasks()[0], json.loads(capsys.readouterr().out)["text"]).valid, command
