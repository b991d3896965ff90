"""What `thor-dflash template` prints: units, configurations, images and the dashboard."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from configparser import RawConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from prometheus_client.parser import text_string_to_metric_families

from thor_dflash.cli import parser
from thor_dflash.cli.commands.template import TEMPLATES
from thor_dflash.cli.main import main
from thor_dflash.config import tree
from thor_dflash.core.results import Speculation, Timings
from thor_dflash.serving.gateway import auth, server_pool
from thor_dflash.serving.gateway.metrics import ServerStats, render
from thor_dflash.serving.protocol.messages import Result
from thor_dflash.serving.server.stats import Stats
from thor_dflash.serving.transport.endpoints import has_port

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "serving/deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
PROGRAM = "/opt/thor-dflash/bin/thor-dflash "


class _Unit(RawConfigParser):
    """A unit: the case of keys matters, and some are given twice, of which the last is kept."""

    def __init__(self, path: Path) -> None:
        super().__init__(strict=False, interpolation=None)
        self.read_string(path.read_text())

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def test_every_file_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert {path.name for path in DEPLOY.iterdir()} - {"__init__.py", "__pycache__"} == {*TEMPLATES}
    assert main(["template"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*TEMPLATES]
    for name in TEMPLATES:
        assert main(["template", name]) == 0
        assert capsys.readouterr().out == (DEPLOY / name).read_text()
    assert main(["template", "thor-dflash"]) == 2


# ---- systemd ---------------------------------------------------------------------------------
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for path in UNITS:
        text = re.sub(r"^(ExecStart=-?)/\S+", r"\1/bin/true", path.read_text(), flags=re.M)
        (tmp_path / path.name).write_text(text)
    files = [str(tmp_path / path.name) for path in UNITS]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("name", "configuration"),
    [("thor-dflash", "robot.toml"), ("thor-dflash", "lan.toml"),
     ("thor-dflash-gateway", "gateway.toml")],
)  # fmt: skip
def test_a_unit_runs_a_command_with_a_configuration_that_there_is(
    name: str, configuration: str
) -> None:
    unit = _Unit(DEPLOY / f"{name}.service")
    command = unit["Service"]["ExecStart"]
    assert command.startswith(PROGRAM)
    args = parser.parse(shlex.split(command.removeprefix(PROGRAM)))
    path = DEPLOY / configuration
    assert path.read_text().startswith(f"# {args.config}: ")
    config = tree.load(path, ())  # also refuses what the command would refuse
    if name == "thor-dflash":
        own = {
            f"/{base}/thor-dflash"
            for kind, base in (("Runtime", "run"), ("State", "var/lib"), ("Cache", "var/cache"))
            if unit["Service"][f"{kind}Directory"] == "thor-dflash"
        }
        (bind,) = config.serve.bind
        writes = [config.serve.prefix_dir, config.engine.cubins]
        writes += [bind.removeprefix("ipc://")] if bind.startswith("ipc:") else []
        assert {str(Path(where).parent) for where in writes} <= own, "else it is read-only"
        assert bind.startswith("ipc:") or (has_port(bind) and config.serve.curve)
        longest = float(unit["Service"]["TimeoutStopSec"])
        assert longest > config.serve.drain_s
        assert float(unit["Service"]["WatchdogSec"]) > config.serve.watchdog_s
    else:
        server_pool.check(config.gateway)
        assert config.gateway.servers == tree.load(DEPLOY / "robot.toml", ()).serve.bind
        assert auth.listen_at(config.gateway)[1] == 8000


def test_what_is_commented_out_is_a_key_with_its_default() -> None:
    for path in DEPLOY.glob("*.toml"):
        section, found = "", 0
        for line in path.read_text().splitlines():
            section = line.strip("[]") if line.startswith("[") else section
            if section and (match := re.match(r"# (\w+) = (.*?)\s+#", line)):
                key, value = match.groups()
                loaded = tree.load(None, (f"{section}.{key}={value}",))
                if key != "token_file":
                    assert loaded == tree.load(None, ()), line
                found += 1
        assert found, path


# ---- images ----------------------------------------------------------------------------------
def test_the_images_copy_what_there_is_and_install_extras_that_there_are() -> None:
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and line[0] != "#"]
    known = "FROM RUN COPY ENV ARG WORKDIR STOPSIGNAL HEALTHCHECK ENTRYPOINT CMD USER".split()
    assert {word for word, _ in lines} <= {*known}
    stages = [rest.split(" AS ") for word, rest in lines if word == "FROM"]
    assert [(base, name) for base, name in stages] == [
        ("ubuntu:24.04", "base"), ("base", "cpu"), ("base", "cuda"), ("base", "jetpack7"),
    ]  # fmt: skip
    copied = {source for word, rest in lines if word == "COPY" for source in rest.split()[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    links = {path.name for path in (ROOT / "thor_dflash").iterdir() if path.is_symlink()}
    assert links <= copied, "the package holds links to these"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    installed = re.findall(r"'\.\[(.*?)\]'", text)
    assert len(installed) == 3
    for names in installed:
        assert Requirement(f"x[{names}]").extras <= extras.keys()
    (start,) = (json.loads(rest) for word, rest in lines if word == "CMD")
    parser.parse(start)
    (health,) = (rest for word, rest in lines if word == "HEALTHCHECK")
    program, *words = json.loads(health.partition(" CMD ")[2])
    assert program == "thor-dflash"
    assert parser.parse(words).server == start[-1]


# ---- the dashboard ---------------------------------------------------------------------------
def test_every_expression_of_the_dashboard_is_of_metrics_that_there_are() -> None:
    stats = Stats()
    times = Timings(e2e_ms=1.0, energy_j={"VDD_GPU": 1.0})
    spec = Speculation(cycles=1, accept_hist=(0, 1), accepted_per_position=(1,))
    stats.result(Result(finish_reason="stop", timings=times, spec=spec))
    stats.refused["busy"] = stats.deadlines["met"] = 1
    shown = render([ServerStats("tcp://a", "m", stats.show())]).decode()
    labels = {
        sample.name: sample.labels.keys()
        for family in text_string_to_metric_families(shown)
        for sample in family.samples
    }
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    for panel in panels:
        for target in panel["targets"]:
            expression, found = target["expr"], set[str]()
            for name in re.findall(r"thor_dflash:\w+", expression):
                assert name in labels, panel["title"]
                found |= labels[name]
            grouped = re.findall(r"by \((.*?)\)", expression)
            used = {label for names in grouped for label in names.split(", ")}
            assert used | set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= found
    titles = " ".join(panel["title"] for panel in panels).lower()
    for what in ("queue", "accept length", "tokens per second", "first token", "not read again",
                 "watts", "deadlines", "errors"):  # fmt: skip
        assert what in titles
