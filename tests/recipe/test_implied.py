"""A given key changes what belongs to what it replaces: each change, and the note on it."""

import dataclasses

import pytest

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.recipe.implied import imply
from jaxrl_llm.recipe.load import from_command_line, with_settings
from jaxrl_llm.recipe.overrides import apply_overrides, split_arguments

MODEL = ("--model.path", "org/mine")
OWN = ("--data.path", "my.jsonl")
PROMPT = "Think step by step, then write the final answer as \\boxed{number}."


@pytest.fixture
def run(tmp_path, capsys):
    def run(recipe, *argv):
        """Return the config of a command line, and its notes."""
        config = from_command_line(["--config", recipe, *argv, "--run_dir", str(tmp_path)]).config
        return config, [line.removeprefix("note: ") for line in capsys.readouterr().err.splitlines()]

    return run


def test_another_model_brings_its_own_tokenizer(config):
    def changed(line):
        after, _ = apply_overrides(config, split_arguments(line.split()))
        return imply(config, after, {word[2:] for word in line.split() if word.startswith("--")})

    config = dataclasses.replace(config, model=ModelConfig(path="Qwen/Qwen3-0.6B", tokenizer="tiny"))
    assert changed("--steps 3")[0].model.tokenizer == "tiny"
    assert changed("--model.path Qwen/Qwen3-0.6B")[0].model.tokenizer == "tiny"
    after, notes = changed("--model.path runs/x/hf")
    assert after.model.tokenizer == ""
    assert notes == [
        "--model.path runs/x/hf uses its own tokenizer, not the recipe's 'tiny'; "
        "--model.tokenizer tiny keeps that"
    ]
    kept = changed("--model.tokenizer tiny --model.path runs/x/hf")[0]
    assert (kept.model.path, kept.model.tokenizer) == ("runs/x/hf", "tiny")


@pytest.mark.parametrize(
    ("recipe", "steps"),
    [("grpo_tiny.py", 600), ("ppo_tiny.py", 600), ("grpo_tools_tiny.py", 800), ("reward_model_tiny.py", 600)],
)
def test_a_trained_model_gets_no_warm_up_of_random_weights(run, recipe, steps):
    after, notes = run(recipe, *MODEL)
    assert after.warm_start.steps == 0
    assert (
        f"--model.path org/mine is trained: the recipe's SFT warm-up of {steps} steps for random weights is "
        f"left out; --warm_start.steps {steps} keeps it"
    ) in notes
    assert any("--optim.learning_rate" in note and "random weights" in note for note in notes)
    after, notes = run(recipe, *MODEL, "--warm_start.steps", "7", "--optim.learning_rate", "1e-6")
    assert after.warm_start.steps == 7 and not any("warm-up" in note or "rate" in note for note in notes)
    assert run(recipe)[0].warm_start.steps == steps  # random weights


def test_the_warm_up_of_a_recipe_for_a_trained_model_stays(run):
    after, notes = run("grpo_tools_smollm2.py", *MODEL)
    assert after.warm_start.steps == 24 and not any("warm-up" in note for note in notes)


def test_a_system_prompt_of_another_task_is_left_out_or_named(run):
    options = (
        'the chat template of my.jsonl gets the recipe\'s options {"enable_thinking": false}, too; '
        "--data.chat.template_options '' leaves them out"
    )
    after, notes = run("grpo_qwen.py", *OWN, "--data.holdout=0.1", "--reward.name", "exact")
    assert after.data.chat.system_prompt == ""
    assert notes == [
        f"the recipe's system prompt {PROMPT!r} is left out: data and reward are others. "
        "--data.chat.system_prompt TEXT sets one",
        options,
    ]
    after, notes = run("grpo_qwen.py", *OWN, "--data.holdout=0.1")  # the reward of the recipe reads its form
    assert after.data.chat.system_prompt == PROMPT
    assert notes == [
        f"the recipe's system prompt {PROMPT!r} is put before my.jsonl, too; "
        "--data.chat.system_prompt '' leaves it out",
        options,
    ]
    own = ("--data.chat.system_prompt", "Add.", "--data.chat.template_options=")
    after, notes = run("grpo_qwen.py", *OWN, "--data.holdout=0.1", "--reward.name", "exact", *own)
    assert (after.data.chat.system_prompt, notes) == ("Add.", [])
    same = ("--data.train.0.path", "a.jsonl", "--data.eval.0.path", "b.jsonl")  # the recipe's data, elsewhere
    after, notes = run("grpo_qwen.py", *same)
    assert (after.data.chat.system_prompt, notes) == (PROMPT, [])


def test_without_evaluation_no_checkpoint_is_ranked_by_it(run):
    after, notes = run("grpo_qwen.py", "--eval.every", "0")
    assert after.checkpoint.best_metric == "" and not any("best_metric" in note for note in notes)
    assert run("grpo_qwen.py")[0].checkpoint.best_metric == "eval/pass@1"
    kept = ("--checkpoint.best_metric", "eval/pass@1")
    after, notes = run("grpo_qwen.py", "--eval.every", "0", *kept)
    assert after.checkpoint.best_metric == "eval/pass@1"
    assert sum("best_metric has no effect" in note for note in notes) == 1


def test_other_data_have_no_subset_of_the_recipes_hub_dataset(run):
    (source,) = run("grpo_qwen.py", *OWN, "--data.holdout=0.1")[0].data.sources("train")
    assert (source.path, source.subset) == ("my.jsonl", "")
    (source,) = run("grpo_qwen.py", "--data.eval_path", "a.jsonl")[0].data.sources("eval")
    assert (source.path, source.subset, source.split) == ("a.jsonl", "", "test")
    (source,) = run("grpo_qwen.py", "--data.path", "hub:openai/gsm8k")[0].data.sources("train")
    assert source.subset == "main"
    (source,) = run("grpo_qwen.py", *OWN, "--data.train.0.subset", "x")[0].data.sources("train")
    assert source.subset == "x"


def test_settings_from_python_imply_the_same(tmp_path):
    settings = {"model.path": "org/mine", "run_dir": str(tmp_path)}
    assert with_settings("grpo_tiny.py", settings).config.warm_start.steps == 0
