"""`thor-dflash completion` in a real bash; of the other shells that it is made."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from thor_dflash.cli import arguments
from thor_dflash.cli.main import main

COMPLETE = """
f=$(complete -p thor-dflash | sed 's/.*-F \\([^ ]*\\).*/\\1/')
complete_words() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  "$f" "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"; echo "${COMPREPLY[*]}"; }
complete_words thor-dflash sta
complete_words thor-dflash stats --w
complete_words thor-dflash plan --thinking a
complete_words thor-dflash build --target mod
"""


def test_bash_completes_commands_options_choices_and_paths(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert main(["completion", "bash"]) == 0
    where = tmp_path_factory.mktemp("bash")
    (where / "models").mkdir()
    (where / "model.txt").touch()
    script = capsys.readouterr().out + COMPLETE
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=where)
    assert done.stderr == ""
    status, watch, thinking, target = done.stdout.splitlines()
    assert status.split() == ["status", "stats"]
    assert watch.split() == ["--wait", "--watch"]
    assert (thinking, target) == ("auto", "models")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    made = capsys.readouterr().out
    assert all(name in made for name in arguments.COMMANDS)
    if (program := shutil.which(shell)) is not None:
        done = subprocess.run([program, "-n"], input=made, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    assert main(["completion", "csh"]) == 2
