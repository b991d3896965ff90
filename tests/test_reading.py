"""A long prompt of `generate`: how far it is read is told while it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from decoding import prompt, session

from thor_dflash import cli


@pytest.mark.parametrize(("length", "told"), [(33, False), (100, True)])
def test_a_prompt_of_several_steps_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], length: int, told: bool
) -> None:
    package = str(session().model.engine.package)  # type: ignore[attr-defined]
    (tmp_path / "t.json").write_text(json.dumps(prompt(length)))
    line = ["generate", "--package", package, "--tokens", str(tmp_path / "t.json")]
    line += ["--max-tokens", "20", "-s", "engine.threads=1", "--ignore-eos"]
    assert cli.main(line) == 0
    out, err = capsys.readouterr()
    assert (f"reading the prompt {length} tokens\n" in err) is told
    assert len(out.split()) == 20
    assert cli.main([*line, "--json"]) == 0
    out, err = capsys.readouterr()
    assert (len(json.loads(out)["tokens"]), err) == (20, "")
