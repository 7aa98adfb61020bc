"""`python -m jaxrl_llm`: commands are found, mistakes are one message and exit code 2."""

import json
import os
import subprocess
import sys
import types

import pytest

from jaxrl_llm import __main__ as cli
from jaxrl_llm.errors import ConfigError


@pytest.fixture
def command(monkeypatch):
    """Puts a main in the place of `train`."""

    def install(main):
        module = types.ModuleType("stand_in")
        module.main = main
        monkeypatch.setitem(sys.modules, "stand_in", module)
        monkeypatch.setitem(cli.COMMANDS, "train", ("stand_in", "train"))

    return install


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command(argv, capsys):
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m jaxrl_llm COMMAND ...")
    assert all(f"    {name:<10} {what}" in out for name, (_, what) in cli.COMMANDS.items())


def test_an_unknown_command_is_answered_with_the_nearest(capsys):
    assert cli.main(["genrate", "--model", "x"]) == 2
    assert capsys.readouterr().err.startswith("error: genrate: unknown command. Did you mean generate?\n")


def test_arguments_and_exit_codes_pass_through(command):
    command(lambda argv: 75 if argv == ["--steps", "3"] else None)
    assert cli.main(["train", "--steps", "3"]) == 75
    assert cli.main(["train"]) == 0


def test_a_refusal_of_this_package_is_one_message(command, capsys):
    from jaxrl_llm.recipe.load import from_command_line

    command(from_command_line)
    assert cli.main(["train", "--config", "grpo_tiny.py", "--stpes", "3"]) == 2
    assert (
        capsys.readouterr().err
        == "error: --stpes: unknown key. Did you mean --steps? --help lists all keys.\n"
    )


def test_another_librarys_error_keeps_its_traceback(command):
    command(lambda argv: json.loads("{"))
    with pytest.raises(json.JSONDecodeError):
        cli.main(["train"])


def test_a_config_error_is_a_value_error():
    assert issubclass(ConfigError, ValueError)


def test_as_a_process_from_any_folder(tmp_path):
    argv = [sys.executable, "-m", "jaxrl_llm", "trane"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Did you mean train?" in done.stderr
    assert "Traceback" not in done.stderr


WITHOUT_TORCH = """
import runpy, sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec  # as if it were not installed
PathFinder.find_spec = lambda name, *args: None if name == "torch" else find(name, *args)
if sys.argv[1:]:
    runpy.run_module("jaxrl_llm.train", run_name="__main__", alter_sys=True)
from jaxrl_llm.host.start import start_host
start_host()
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
print(len(make_tokenizer()))
"""


@pytest.mark.parametrize("argv", [["--help"], []])
def test_nothing_is_said_about_torch(argv):
    """transformers says at its import that PyTorch was not found; nobody needs it here."""
    env = {k: v for k, v in os.environ.items() if k != "TRANSFORMERS_VERBOSITY"}
    out = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *argv], capture_output=True, text=True, env=env
    )
    assert (out.returncode, out.stderr) == (0, "")
    assert "--optim.learning_rate" in out.stdout if argv else out.stdout == "128\n"
