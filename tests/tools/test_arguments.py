"""Flags of the commands: one function reads them as the keys of a recipe are read."""

from pathlib import Path

import pytest

from jaxrl_llm.__main__ import main
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.tools.arguments import parse_arguments, parse_own
from jaxrl_llm.tools.config import GenerateArguments, PlanArguments, ViewArguments

GENERATE = ["--model", "m", "--prompts", "p", "--out", "o"]


def generate(*words: str) -> GenerateArguments:
    return parse_arguments(GenerateArguments, [*GENERATE, *words], "generate")


def test_flags_are_read_as_keys_of_a_recipe():
    args = generate("--n", "1e3", "--resume", "false", "--step=none", "--stop", "a", "b", "--max-tokens", "8")
    assert (args.n, args.resume, args.step, args.stop, args.max_tokens) == (1000, False, None, ("a", "b"), 8)
    assert (args.model, args.prompts, args.out) == ("m", Path("p"), Path("o"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--modle", "m"], "--modle: unknown key. Did you mean --model? --help lists the keys."),
        (["--max_new_tokens", "3"], "--max_new_tokens: unknown key. Did you mean --max_tokens? --help lists"),
        (["--reward.nam", "math"], "--reward.nam: unknown key. Did you mean --reward.name? --help lists"),
        (["--no-resume"], "--no-resume: unknown key. Write --resume False."),
        (["--n", "2", "seed=3"], "'seed=3': a setting is written --KEY VALUE. Write --seed 3."),
        (["--n", "two"], "--n: expected a whole number, got 'two'."),
        (["--out"], "--out: expected a path, got nothing."),
    ],
)
def test_a_wrong_flag_is_answered_with_the_right_one(words, message):
    with pytest.raises(ConfigError) as refused:
        generate(*words)
    assert str(refused.value).startswith(message)


def test_a_setting_without_dashes_is_answered_with_the_flag(capsys):
    assert main(["score", "model=m", "--out", "o"]) == 2
    assert capsys.readouterr().err == "error: 'model=m' has no key before it. Write --model m.\n"


def test_a_missing_flag_is_named(capsys):
    assert main(["generate", "--prompts", "p"]) == 2
    assert capsys.readouterr().err == (
        "error: generate: --model TEXT, --out PATH is missing. python -m jaxrl_llm generate --help lists the "
        "flags.\n"
    )


def test_words_without_a_flag_are_the_positional_field_wherever_they_stand():
    view = lambda *words: parse_arguments(ViewArguments, words, "view", positional="runs")
    runs = (Path("a"), Path("b"))
    assert view("a", "b", "--max_samples", "3") == ViewArguments(runs=runs, max_samples=3)
    assert view("a", "--max_samples=3", "b") == view("--max_samples", "3", "a", "b")
    assert view("--max_samples", "3", "a", "b") == ViewArguments(runs=runs, max_samples=3)
    assert view() == ViewArguments()


def test_the_flags_of_a_command_are_told_from_those_of_its_recipe():
    line = ["--config", "r.py", "--topology", "cpu", "--mesh.fsdp", "8", "--only=update"]
    args, rest = parse_own(PlanArguments, line, "plan")
    assert args == PlanArguments(topology="cpu", only="update")
    assert rest == ["--config", "r.py", "--mesh.fsdp", "8"]


@pytest.mark.parametrize(
    ("command", "flag", "meant"),
    [("doctor", "jsn", "json"), ("train", "confg", "config"), ("plan", "onyl", "only")],
)
def test_a_misspelt_flag_of_a_command_with_a_recipe(command, flag, meant, capsys):
    more = ["--topology", "cpu"] if command == "plan" else []
    assert main([command, *more, f"--{flag}", "x"]) == 2
    error = capsys.readouterr().err
    assert error == f"error: --{flag}: unknown key. Did you mean --{meant}? --help all lists the keys.\n"


def test_help_shows_the_flags_or_one_of_them(capsys):
    def printed(*words: str) -> list[str]:
        with pytest.raises(SystemExit) as done:
            main(["generate", *words])
        assert done.value.code == 0
        return capsys.readouterr().out.splitlines()

    lines = printed("--help")
    usage = "usage: python -m jaxrl_llm generate --model TEXT --prompts PATH --out PATH [--KEY VALUE ...]"
    assert lines[0] == usage
    assert lines[7] == "    --model TEXT"
    assert "    mesh        Sizes of the mesh axes; their product" in "\n".join(lines)
    assert printed("--n", "3", "--help", "n")[0] == "    --n 3"
    assert printed("--help", "reward")[0].startswith("reward: Scoring of responses")
