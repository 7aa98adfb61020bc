"""Lines on work that takes long, and the first line of a command."""

import importlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxrl_llm import __main__
from jaxrl_llm.host import command
from jaxrl_llm.host.command import working

ROOT = Path(__file__).parents[2]


def test_long_work_is_said_while_it_lasts_and_at_its_end(monkeypatch, capsys):
    monkeypatch.setattr(command, "FIRST", 0.02)
    monkeypatch.setattr(command, "AGAIN", 0.02)
    with working("building"):
        time.sleep(0.1)
        with working("converting a file"):
            capsys.readouterr()
            time.sleep(0.1)
            inner = capsys.readouterr().err
        time.sleep(0.1)
    outer = capsys.readouterr().err
    assert "converting a file: 0 s so far\n" in inner and "building" not in inner
    assert "building: 0 s so far\n" in outer
    seconds = [
        float(x) for x in re.findall(r"^(?:converting a file|building): took (\d\.\d) s\n", outer, re.M)
    ]
    assert len(seconds) == 2 and seconds[0] >= 0.1 and seconds[1] >= 0.3  # more on a busy machine
    assert re.search(r"building: took \S+ s\n\Z", outer)
    with working("quiet", quiet=True):
        time.sleep(0.05)
    with pytest.raises(ValueError), working("failing"):
        raise ValueError
    assert capsys.readouterr().err == ""


def test_short_work_is_not_said(capsys):
    with working("building"):
        pass
    assert capsys.readouterr().err == ""


def test_a_slow_import_is_said(monkeypatch, capsys):
    monkeypatch.setattr(__main__, "AGAIN", 0.01)
    monkeypatch.setitem(__main__.COMMANDS, "view", ("slow_module", ""))
    module = SimpleNamespace(main=lambda argv: 3)
    monkeypatch.setattr(importlib, "import_module", lambda name: time.sleep(0.05) or module)
    assert __main__.main(["view"]) == 3
    assert capsys.readouterr().err.startswith("importing view: 0 s so far\n")


def test_installing_says_how_long_it_takes():
    """pip prints nothing with -q."""
    rules = re.findall(r"^\$\(VENV\)/\.installed\S*:.*\n\t(.*)", (ROOT / "Makefile").read_text(), re.M)
    assert len(rules) == 5 and all(rule.startswith("$(INSTALL) -e") for rule in rules)


@pytest.mark.parametrize(
    "words",
    [
        ["jaxrl_llm.train", "--config", "grpo_tiny.py"],
        ["jaxrl_llm", "generate", "--model", "x", "--prompts", "p.jsonl", "--out", "o.jsonl"],
    ],
)
def test_the_first_line_comes_before_jax_is_imported(words, tmp_path):
    (tmp_path / "jax.py").write_text("raise SystemExit('late')\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n')
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    command = "train" if words[0].endswith("train") else "generate"
    assert ended.stderr.splitlines()[0] == f"jaxrl_llm {command}: starting"
    assert "late" in ended.stderr  # the module was needed after it
