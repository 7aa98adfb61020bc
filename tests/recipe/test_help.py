"""--help: an overview on two screens, groups and keys with docs, ranges and values."""

import dataclasses
import io
import os
import re
import sys

import pytest
from refusals import refusal

from jaxrl_llm import __main__ as cli
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.recipe.help import field_docs, overview, topics_text
from jaxrl_llm.recipe.keys import is_config, iter_fields, type_hints
from jaxrl_llm.recipe.load import (
    config_classes,
    find_recipe,
    from_command_line,
    load_recipe,
    packaged_recipes,
)


def printed(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as done:
        from_command_line(list(argv))
    assert done.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("recipe", [path.name for path in packaged_recipes()])
def test_the_overview_fits_on_two_screens(capsys, recipe):
    lines = printed(capsys, "--config", recipe, "--help").splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 100


def test_the_overview_has_the_groups_and_the_values_of_the_command_line(capsys):
    text = printed(capsys, "--config", "grpo_tiny.py", "--help", "--steps", "77")
    assert "    --steps 77                          Training steps: one set of prompts" in text
    groups = [f.name for f in dataclasses.fields(TrainConfig) if is_config(getattr(TrainConfig(), f.name))]
    assert len(groups) == 20
    assert all(re.search(rf"^    {group} +\w", text, re.M) for group in groups)
    assert text.split("\n\n")[-1].split()[-2:] == ["sft_smollm2.py,", "sft_tiny.py"]


def test_a_group_shows_docs_types_ranges_and_values(capsys):
    assert printed(capsys, "--help", "optim", "--optim.b1", "0.8").splitlines()[:10] == [
        "optim: Optimizer and learning-rate schedule.",
        "",
        "    --optim.name adamw",
        "        AdamW (arXiv 1711.05101), Adafactor (1804.04235) with steps relative to the weights' size",
        "        or, unscaled, without (transformers' adafactor), Lion (2302.06675), SGD with momentum b1,",
        "        Muon (2502.16982): orthogonalized momentum b1 for the matrices of the layers, AdamW for the",
        "        other weights; RMSProp or Adagrad. One of adamw, adafactor, adafactor_unscaled, lion, sgd,",
        "        muon, rmsprop, adagrad.",
        "    --optim.learning_rate 1e-06",
        "        Peak learning rate. A number, above 0 and at most 10; 1e-6 is usual for RL, 1e-5 for SFT.",
    ]


def test_a_key_is_found_in_every_spelling():
    config = TrainConfig()
    temperature = topics_text(config, ["rollout.sampling.temperature"])
    assert temperature.splitlines()[0] == "    --rollout.sampling.temperature 1.0"
    assert topics_text(config, ["--rollout.temperature"]) == temperature
    both = topics_text(config, ["temperature"])
    assert both.startswith(temperature)
    assert "--eval.sampling.temperature 0.0" in both
    nested = topics_text(config, ["rollout"])
    assert temperature in nested
    assert "rollout.sampling: " in nested
    assert refusal(topics_text, config, ["rolout"]) == (
        "--help rolout: no such key or group. Did you mean --help rollout?"
    )
    assert refusal(topics_text, config, ["xyzzy"]) == (
        "--help xyzzy: no such key or group. --help all lists the keys."
    )


def test_help_on_the_algorithm_shows_its_settings(capsys):
    text = printed(capsys, "--config", "grpo_tiny.py", "--algo", "dpo", "--help", "algo")
    assert text.startswith("algo: Settings of dpo. Direct preference optimization")
    assert "--algo.beta 0.1" in text
    assert "--algo.clip_low" not in text


def test_help_all_shows_every_key_with_its_doc():
    config = load_recipe(find_recipe("grpo_tiny.py"))
    text = topics_text(config, ["all"])
    keys = [key for key, _ in iter_fields(config)]
    assert len(keys) > 150
    assert [key for key in keys if f"    --{key} " not in text] == []
    assert [line for line in text.splitlines() if len(line) > 110] == []


def test_help_on_a_file_without_docs(tmp_path, capsys):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from dataclasses import dataclass\nfrom jaxrl_llm.algos.contract import AlgoConfig, Algorithm\n"
        "@dataclass(frozen=True)\nclass Config(AlgoConfig):\n    x: float = 1.0\n"
        "def loss(inputs, config): ...\n"
        'algorithm = Algorithm("mine", "", "tokens", Config(), loss)\n'
    )
    text = printed(capsys, "--algo", str(mine), "--help", "algo")
    assert "    --algo.x 1.0\n        A number.\n" in text
    assert "--algo.x" not in printed(capsys, "--algo", str(mine), "--help")


@pytest.mark.parametrize("cls", sorted(config_classes(), key=lambda cls: cls.__qualname__))
def test_every_field_has_a_doc(cls):
    docs = field_docs(cls)
    plain = [name for name, hint in type_hints(cls).items() if not dataclasses.is_dataclass(hint)]
    assert [name for name in plain if not docs.get(name)] == []


@pytest.mark.parametrize("argv", [["train", "--list"], ["view", "--help"], ["plan", "--help"]])
def test_a_reader_that_leaves_early_is_no_error(argv, monkeypatch, tmp_path):
    class ClosedPipe(io.StringIO):
        descriptor = os.open(tmp_path / "out", os.O_CREAT | os.O_WRONLY)

        def write(self, text):
            raise BrokenPipeError

        def fileno(self):
            return self.descriptor

    monkeypatch.setattr(sys, "stdout", ClosedPipe())
    with pytest.raises(SystemExit) as done:
        cli.main(argv)
    assert done.value.code == 0
    assert os.readlink(f"/proc/self/fd/{ClosedPipe.descriptor}") == os.devnull  # for Python's last flush
    os.close(ClosedPipe.descriptor)


def test_the_overview_of_a_long_value_keeps_its_width(config):
    long = dataclasses.replace(config, run_dir="r" * 300)
    assert max(map(len, overview(long, "prog", []).splitlines())) <= 100
