"""`python -m jaxrl_llm`: commands are found, mistakes are one message and exit code 2."""

import contextlib
import json
import os
import re
import subprocess
import sys
import types

import pytest

from jaxrl_llm import __main__ as cli
from jaxrl_llm.errors import ConfigError


@pytest.fixture
def command(monkeypatch):
    """Return a function that puts a main in the place of `train`."""

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
    assert out.startswith("usage: python -m jaxrl_llm COMMAND [--key value ...]")
    assert all(f"    {name:<13} {sentence}" in out for name, (_, sentence) in cli.all_commands().items())
    assert all(sentence[0].isupper() and sentence[-1] in ".?" for _, sentence in cli.all_commands().values())


@pytest.mark.parametrize("name", cli.all_commands())
def test_the_flags_of_every_command_have_underscores(name, capsys):
    with contextlib.suppress(SystemExit):
        assert cli.main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"python -m jaxrl_llm{'.' if name == 'train' else ' '}{name}" in out
    assert re.findall(r"(?<!\S)--[a-z_.]*[a-z]-[a-z][a-z-]*", out) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["score", "--model", "m", "--data", "d", "--out", "o", "--temperature", "0"],
            "--temperature is 0.0: it",
        ),
        (
            ["export", "--checkpoint", "c", "--out", "o", "--step", "-1"],
            "--step is -1: it must be at least 0",
        ),
        (["generate", "--model", "m", "--prompts", "p", "--out", "o", "--n", "0"], "--n is 0: it must be at"),
    ],
)
def test_arguments_out_of_their_range_are_one_message(argv, message, capsys):
    assert cli.main(argv) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


MODULES_AFTER = """
import contextlib, io, json, sys
from jaxrl_llm.__main__ import main
for argv in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = main(argv)
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([argv, code, sorted({"jax", "flax", "transformers"} & sys.modules.keys())]))
"""
GENERATE = ["generate", "--model", "m", "--prompts", "p", "--out", "o"]
SCORE = ["score", "--data", "d", "--out", "o"]
REFUSED = [
    ["train", "--steps", "3"],  # without a recipe, whose algorithm imports jax
    ["train", "--confg", "grpo_tiny.py"],
    ["generate", "--modle", "m"],
    ["plan", "--topology", "v9-1"],
    ["plan", "--topology", "cpu", "--json", "/no/such/folder/p.json"],
    ["plan", "--topology", "cpu", "--steps", "3"],
    ["doctor", "--json", "perhaps"],
    ["doctor", "--steps", "3"],
    ["chat", "--modl", "m"],
    ["chat", "--model", "m", "--max_tokens", "0"],
    [*GENERATE, "--n", "0"],
    [*GENERATE, "--select", "best"],
    [*GENERATE, "--reward.timeout", "soon"],
    [*GENERATE, "--out", "/no/such/folder/o"],
    SCORE,
    [*SCORE, "--model", "m", "--temperature", "0"],
    ["import-config", "f.yml", "--sytem", "trl"],
    ["view", "run", "--max_samples", "0"],
    ["export", "--checkpoint", "c", "--out", "o", "--step", "-1"],
]


@pytest.mark.parametrize(
    ("lines", "code"),
    [([*([name, "--help"] for name in cli.all_commands()), ["train", "--list"]], 0), (REFUSED, 2)],
    ids=["help and list", "refused flags"],
)
def test_help_and_refusals_of_every_command_come_before_jax(lines, code):
    assert {line[0] for line in lines} == cli.all_commands().keys()
    command_line = [sys.executable, "-c", MODULES_AFTER, json.dumps(lines)]
    done = subprocess.run(command_line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert results == [[line, code, []] for line in lines]


def test_an_unknown_command_is_answered_with_the_nearest(capsys):
    assert cli.main(["genrate", "--model", "x"]) == 2
    assert capsys.readouterr().err.startswith("error: genrate: unknown command. Did you mean generate?\n")


def test_flags_without_a_command_are_those_of_train(command, capsys):
    assert cli.main(["--config", "grpo_tiny.py"]) == 2
    assert "Did you mean train --config?\n" in capsys.readouterr().err
    command(lambda argv: 75 if argv == ["--list"] else None)
    assert cli.main(["--list"]) == 75


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
        == "error: --stpes: unknown key. Did you mean --steps? --help all lists the keys.\n"
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
    """transformers says at its import that PyTorch was not found; it is not needed here."""
    env = {k: v for k, v in os.environ.items() if k != "TRANSFORMERS_VERBOSITY"}
    out = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *argv], capture_output=True, text=True, env=env
    )
    assert (out.returncode, out.stderr) == (0, "")
    assert "--optim.learning_rate" in out.stdout if argv else out.stdout == "128\n"


@pytest.mark.parametrize("argv", [["--version"], ["-V"], ["train", "--version"], ["generate", "--version"]])
def test_the_version_is_a_line(argv, capsys):
    assert cli.main(argv) == 0
    assert re.fullmatch(r"jaxrl_llm \S+, Python \S+, jax \S+\n", capsys.readouterr().out)


@pytest.mark.parametrize("command", ["view", "import-config"])
def test_a_name_of_300_letters_is_one_line(command, capsys):
    assert cli.main([command, "a" * 300]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"error: a+\.\.\.\S+: File name too long\. Give another name\.\n", said)
