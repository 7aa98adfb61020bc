"""Settings without effect: each row of the table, and settings that are read."""

from dataclasses import replace

import pytest

from jaxrl_llm import algos
from jaxrl_llm.algos.surrogates import reinforce_loss
from jaxrl_llm.recipe.idle import IDLE, OF_PAIRS, OF_POLICY, READ_CAP, without_effect
from jaxrl_llm.recipe.keys import iter_fields
from jaxrl_llm.recipe.load import from_command_line, load_recipe, packaged_recipes
from jaxrl_llm.recipe.overrides import apply_overrides, split_arguments

NO_REFERENCE = "no reference model is used with these settings"
NO_WEIGHT, NO_RANK = "--algo.correction.weight is none", "--lora.rank is 0"
NO_LOGGER = "no logger is set (--log.wandb, --log.mlflow, --log.swanlab, --log.trackio)"
DISCOPOP = "it is read by the loss discopop only"


def notes(config, algo: str, line: str) -> list[str]:
    config = replace(config, algo=algos.ALGOS[algo].config)
    return without_effect(apply_overrides(config, split_arguments(line.split()))[0])


@pytest.mark.parametrize(
    ("algo", "line", "note"),
    [
        ("grpo", "--reference.path m --algo.kl_coef 0", f"--reference.path has no effect: {NO_REFERENCE}"),
        ("simpo", "--reference.path m", f"--reference.path has no effect: {NO_REFERENCE}"),
        ("sft", "--reference.offload True", f"--reference.offload has no effect: {NO_REFERENCE}"),
        ("dapo", "--algo.kl_target 0.1", "--algo.kl_target has no effect: --algo.kl_coef is 0"),
        (
            "grpo",
            "--algo.kl_coef 0 --algo.kl_target 0.1 --algo.kl_importance True",
            "--algo.kl_target, --algo.kl_importance have no effect: --algo.kl_coef is 0",
        ),
        (
            "grpo",
            "--algo.kl_importance True --algo.kl_in reward",
            "--algo.kl_importance has no effect: --algo.kl_in is not loss",
        ),
        ("mt_grpo", "--algo.omega 2", "--algo.omega has no effect: --algo.advantage is not gigpo"),
        ("dpo", "--algo.tau 0.1", f"--algo.tau has no effect: {DISCOPOP}"),
        ("online_dpo", "--algo.dpo.tau 0.1", f"--algo.dpo.tau has no effect: {DISCOPOP}"),
        ("dpo", "--algo.alpha 0.3", "--algo.alpha has no effect: it is read by the divergence alpha only"),
        ("grpo", "--algo.correction.cap 5", f"--algo.correction.cap has no effect: {NO_WEIGHT}"),
        ("reinforce", "--algo.correction.floor 0.5", f"--algo.correction.floor has no effect: {NO_WEIGHT}"),
        (
            "grpo",
            "--algo.correction.weight token --algo.correction.reject_only negative",
            "--algo.correction.reject_only has no effect: --algo.correction.reject is empty",
        ),
        ("grpo", "--eval.judge j.py:judge", "--eval.judge has no effect: --eval.every is 0"),
        ("grpo", "--eval.samples 4", "--eval.samples has no effect: --eval.every is 0"),
        (
            "grpo",
            "--algo.kl_coef 0 --algo.kl k1 --algo.kl_in reward",
            "--algo.kl, --algo.kl_in have no effect: --algo.kl_coef is 0",
        ),
        ("grpo", "--algo.constant 9", "--algo.constant has no effect: --algo.aggregation is not constant"),
        ("grpo", "--algo.max_draws 9", "--algo.max_draws has no effect: --algo.dynamic_sampling is False"),
        (
            "grpo",
            "--critic.path m --critic.warmup_steps 9",
            "--critic.path, --critic.warmup_steps have no effect: --algo has no separate critic",
        ),
        (
            "grpo",
            "--env.max_turns 9",
            "--env.max_turns has no effect: --env.name, --env.tools and --env.gateway are not set",
        ),
        (
            "grpo",
            "--reward.shaping format 1 --reward.overlong_to 9",
            "--reward.overlong_to has no effect: --reward.shaping is without overlong",
        ),
        ("grpo", "--data.cut_side right", "--data.cut_side has no effect: --data.overlong is not cut"),
        (
            "grpo",
            "--optim.final_fraction 0.2",
            "--optim.final_fraction has no effect: --optim.schedule is constant",
        ),
        (
            "grpo",
            "--optim.name adagrad --optim.b2 0.9",
            "--optim.b2 has no effect: --optim.name does not read it",
        ),
        ("grpo", "--checkpoint.hf_keep 2", "--checkpoint.hf_keep has no effect: --checkpoint.hf_every is 0"),
        (
            "grpo",
            "--checkpoint.keep_best 3",
            "--checkpoint.keep_best has no effect: --checkpoint.best_metric is empty",
        ),
        (
            "grpo",
            "--checkpoint.best_metric eval/pass@1",
            "--checkpoint.best_metric has no effect: --eval.every is 0, so no step has held-out metrics",
        ),
        ("grpo", "--log.group g --log.name n", f"--log.name, --log.group have no effect: {NO_LOGGER}"),
        ("grpo", "--hub.private True", "--hub.private has no effect: --hub.push is empty"),
        ("grpo", "--lora.alpha 64", f"--lora.alpha has no effect: {NO_RANK}"),
        (
            "grpo",
            "--env.gateway.command true --env.tool_timeout 5 --env.max_turns 9",
            "--env.tool_timeout has no effect: programs (--env.gateway) execute their tools themselves",
        ),
    ],
)
def test_a_setting_without_effect_is_noted(config, algo, line, note):
    assert notes(config, algo, line) == [note]


@pytest.mark.parametrize(
    ("algo", "line"),
    [
        ("grpo", ""),
        ("grpo", "--reference.path m --algo.kl_target 0.1 --algo.kl_importance True"),
        (
            "grpo",
            "--algo.kl_in reward --algo.kl_target 0.1 --algo.kl_importance True",
        ),
        ("grpo", "--algo.kl k1 --algo.kl_in reward --algo.aggregation constant --algo.constant 9"),
        ("dapo", "--algo.max_draws 9"),
        ("ppo", "--critic.path m --critic.warmup_steps 9"),
        ("grpo", "--env.max_turns 9 --env.tools calculator"),
        ("grpo", "--reward.shaping overlong 1 --reward.overlong_to 9 --reward.overlong_from 5"),
        ("grpo", "--data.cut_side right --data.overlong cut --eval.every 5 --eval.samples 4"),
        ("grpo", "--optim.schedule cosine --optim.final_fraction 0.2 --optim.b2 0.9"),
        ("reinforce", "--algo.correction.cap 5"),
        ("gpg", "--algo.correction.cap 5"),
        ("grpo", "--algo.correction.cap 5 --algo.correction.floor 0.5 --algo.correction.weight token"),
        ("dpo", "--algo.tau 0.1 --algo.loss discopop"),
        ("dpo", "--algo.alpha 0.3 --algo.divergence alpha"),
        ("simpo", "--algo.alpha 0.3"),
        ("grpo", "--log.group g --log.wandb p"),
        ("grpo", "--lora.alpha 64 --lora.rank 8"),
        ("grpo", "--lora.alpha 32 --checkpoint.keep_best 1"),
    ],
)
def test_a_setting_that_is_read_is_not_noted(config, algo, line):
    assert notes(config, algo, line) == []


def test_every_key_of_the_table_exists_and_no_packaged_recipe_has_an_idle_one(config):
    configs = [replace(config, algo=algorithm.config) for algorithm in algos.ALGOS.values()]
    known = {key for one in configs for key, _ in iter_fields(one)}
    assert {key for row in (*IDLE, *OF_POLICY, *OF_PAIRS) for key in row.keys.split()} <= known
    recipes = packaged_recipes()
    assert {path.name: without_effect(load_recipe(path)) for path in recipes} == {p.name: [] for p in recipes}


def test_the_algorithms_that_read_the_cap_without_a_correction():
    readers = {name for name, algorithm in algos.ALGOS.items() if algorithm.loss is reinforce_loss}
    assert readers == set(READ_CAP)


def test_the_command_line_prints_the_notes(tmp_path, capsys):
    line = f"--config grpo_tiny.py --hub.private True --run_dir {tmp_path / 'run'}"
    from_command_line(line.split())
    assert capsys.readouterr().err == "note: --hub.private has no effect: --hub.push is empty\n"
