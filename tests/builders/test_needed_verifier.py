"""A verifier and answers are required only where rewards of the verifier are used."""

import contextlib
import json

import pytest

from jaxrl_llm.algos import dpo, gkd, grpo, online_dpo, ppo, sft
from jaxrl_llm.builders.rewards import open_rewards
from jaxrl_llm.config import RewardConfig, RewardModelConfig, TrainConfig
from jaxrl_llm.data.config import DataConfig, SourceConfig
from jaxrl_llm.data.loader import Loader
from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.envs.config import EnvConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.recipe import rules_recipe
from jaxrl_llm.rewards.sample import RewardLoadError

TOKENIZER = make_tokenizer()
MODELS = (RewardModelConfig(path="rm"),)
GAME = EnvConfig(name="guess")
GKD = gkd.Config(teachers=("teacher",))


def load(folder, answer=None, name="math_prompts"):
    """Return a loader of rows whose data source lets `auto` choose the reward math."""
    path, more = folder / f"{name}.jsonl", {"answer": answer, "data_source": name}
    path.write_text("".join(json.dumps({"prompt": f"0+{i}=", **more}) + "\n" for i in range(3)))
    return Loader(DataConfig(train=(SourceConfig(path=str(path)),)), TOKENIZER, 0, 64)


def chosen(folder, loaders, reward=None, **settings):
    """Return the pool's reward, and which of the rows it can score."""
    config = TrainConfig(run_dir=str(folder), reward=reward or RewardConfig(), **settings)
    with contextlib.ExitStack() as closing:
        return open_rewards(config, loaders, None, closing).config.name


@pytest.mark.parametrize(
    "settings",
    [
        dict(algo=grpo.Config(), reward=RewardConfig(models=MODELS)),
        dict(algo=online_dpo.Config(), reward=RewardConfig(models=MODELS)),
        dict(algo=ppo.Config(), reward=RewardConfig(weight=0.0, models=MODELS)),
        dict(algo=ppo.Config(), reward=RewardConfig(name="exact", weight=0.0, models=MODELS)),
        dict(algo=GKD),
        dict(algo=GKD, reward=RewardConfig(name="exact")),
        dict(algo=grpo.Config(), env=GAME),
        dict(algo=grpo.Config(), env=GAME, reward=RewardConfig(name="exact")),
    ],
)
def test_prompts_without_answers_are_enough_where_others_reward(settings, tmp_path, caplog):
    assert chosen(tmp_path, {"train": load(tmp_path)}, **settings) == "none"
    assert "no verifier (--reward.name" in caplog.text and "math_prompts.jsonl:1: no answer" in caplog.text


@pytest.mark.parametrize(
    "settings", [dict(algo=GKD), dict(env=GAME), dict(reward=RewardConfig(models=MODELS))]
)
def test_data_that_auto_does_not_know_are_enough_where_others_reward(settings, tmp_path):
    assert chosen(tmp_path, {"train": load(tmp_path, name="poems")}, **settings) == "none"


@pytest.mark.parametrize("algo", [dpo.Config(), sft.Config()])
@pytest.mark.parametrize("name", ["auto", "exact"])
def test_a_data_set_is_learnt_from_without_answers(algo, name, tmp_path, caplog):
    loaders = {"train": load(tmp_path), "eval": load(tmp_path)}
    assert chosen(tmp_path, loaders, RewardConfig(name=name), algo=algo) == name  # no row is scored
    assert not caplog.text


@pytest.mark.parametrize("name", ["auto", "exact"])
def test_a_data_set_is_evaluated_by_the_answers_of_the_held_out_rows(name, tmp_path):
    loaders = {"train": load(tmp_path, name="poems"), "eval": load(tmp_path, "7", "gsm8k_test")}
    assert chosen(tmp_path, loaders, RewardConfig(name=name), algo=sft.Config()) == name


def test_held_out_rows_whose_answers_auto_cannot_read_are_no_reason_to_stop(tmp_path, caplog):
    loaders = {"train": load(tmp_path), "eval": load(tmp_path, "a poem", "gsm8k_like")}
    assert chosen(tmp_path, loaders, algo=sft.Config()) == "none"
    assert "no response to it could earn the reward gsm8k" in caplog.text
    with pytest.raises(RewardLoadError, match="could earn the reward gsm8k"):
        chosen(tmp_path, loaders, RewardConfig(name="gsm8k"), algo=sft.Config())


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        (dict(algo=grpo.Config()), ""),
        (dict(algo=gkd.Config(teachers=("teacher",), reward_coef=0.5)), ""),
        (dict(reward=RewardConfig(name="exact", models=MODELS)), "--reward.name none leaves"),
        (dict(reward=RewardConfig(name="exact", env="add"), env=GAME), "--reward.name none leaves"),
        (dict(reward=RewardConfig(models=MODELS, shaping=(("format", 0.2),))), "--reward.name none leaves"),
    ],
)
def test_answers_are_required_where_the_verifier_is_learnt_from(settings, more, tmp_path):
    with pytest.raises(UserError, match=f"math_prompts.jsonl:1: no answer .*{more}"):
        chosen(tmp_path, {"train": load(tmp_path)}, **settings)


def test_a_wrong_answer_is_refused_where_the_verifier_counts_beside_a_reward_model(tmp_path):
    loaders = {"train": load(tmp_path, "a poem", "gsm8k_like")}
    with pytest.raises(RewardLoadError, match="could earn the reward gsm8k"):
        chosen(tmp_path, loaders, RewardConfig(models=MODELS))
    assert chosen(tmp_path, loaders, RewardConfig(models=MODELS, weight=0.0)) == "none"


def test_a_teacher_whose_task_is_rewarded_needs_a_reward():
    reward = RewardConfig(weight=0.0)
    problems = lambda algo: list(rules_recipe._something_rewards(TrainConfig(algo=algo, reward=reward)))
    assert problems(GKD) == []
    (problem,) = problems(gkd.Config(teachers=("teacher",), reward_coef=1.0))
    assert "every reward would be 0" in problem
