"""Reward functions of other systems, as they are; and what a raw value is worth."""

import asyncio
import dataclasses
import inspect
import math

import numpy as np
import pytest

from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.config import RewardConfig
from jaxrl_llm.rewards.sample import RewardLoadError, RewardSample
from jaxrl_llm.rewards.signatures import adapt, parse_score

CONFIG = RewardConfig()
PLAIN = [
    RewardSample(
        response="4", answer="4", prompt="2+2=", response_ids=(7, 8), source="a", columns={"level": 1}
    ),
    RewardSample(
        response="5", answer="4", prompt="1+3=", response_ids=(9,), source="b", columns={"level": 2}
    ),
]
CHAT = [
    RewardSample(
        response="4", answer="4", prompt="<user>2+2", messages=({"role": "user", "content": "2+2"},)
    ),
]


def run(function, samples=PLAIN):
    reward = adapt(function, "f", CONFIG)
    raws = reward.call(samples)
    if inspect.isawaitable(raws):
        raws = asyncio.run(_list_of(raws))
    return [parse_score(raw, reward, CONFIG.correct_at) for raw in raws]


async def _list_of(raws):
    return await raws


def right_then_wrong(verdicts):
    return verdicts == [(1.0, Outcome.CORRECT), (0.0, Outcome.WRONG)]


def test_ours():
    assert right_then_wrong(run(lambda sample: float(sample.response == sample.answer)))
    assert run(lambda sample: (0.25, Outcome.UNPARSED))[0] == (0.25, Outcome.UNPARSED)

    def with_config(sample, config):
        return config.correct_at

    assert run(with_config)[0] == (1.0, Outcome.CORRECT)


def test_trl_plain():
    def reward(prompts, completions, completion_ids, *, level, answer, **kwargs):
        assert prompts == ["2+2=", "1+3="] and completion_ids == [[7, 8], [9]] and level == [1, 2]
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    assert right_then_wrong(run(reward))


def test_trl_conversational_gets_messages_and_only_what_it_names():
    def reward(completions):
        return [float(completion[0]["content"] == "4") for completion in completions]

    def prompts(prompts, completions):
        return [float(prompts == [[{"role": "user", "content": "2+2"}]])]

    assert run(reward, CHAT) == [(1.0, Outcome.CORRECT)]
    assert run(prompts, CHAT) == [(1.0, Outcome.CORRECT)]


def test_trl_none_abstains():
    assert run(lambda completions, **kwargs: [None, 1.0])[0] == (None, Outcome.FAILED)


@pytest.mark.parametrize("name", ["trainer_state", "log_metric"])
def test_trl_rewards_that_must_have_the_trainer_are_refused_by_name(name):
    needs, may = {}, {}
    exec(f"def f(completions, {name}, **kwargs): return [0.0]", needs)
    exec(f"def f(completions, {name}=None): return [float({name} is None)]", may)
    with pytest.raises(RewardLoadError, match=f"reward f: it takes {name}, an object of TRL's trainer"):
        adapt(needs["f"], "f", CONFIG)
    assert run(may["f"], CHAT)[0].value == 1.0


def test_of_channels_other_systems_get_the_final_one():
    """gpt-oss, as TRL parses its responses."""
    text = "<|channel|>analysis<|message|>2+2<|end|><|start|>assistant<|channel|>final<|message|>4"
    sample = dataclasses.replace(CHAT[0], text=text)

    def trl(completions):
        return [float(completions[0] == [{"role": "assistant", "content": "4", "thinking": "2+2"}])]

    assert (
        run(trl, [sample])[0].value
        == run(lambda solution_str, ground_truth: solution_str == "4", [sample])[0].value
    )
    assert run(trl, [sample])[0].value == 1.0


def test_trl_async():
    async def reward(completions, **kwargs):
        return [1.0, 0.0]

    assert right_then_wrong(run(reward))


def test_verl_float_bool_and_dict():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert data_source in ("a", "b") and extra_info == {}
        return float(solution_str == ground_truth)

    def with_accuracy(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        right = solution_str == ground_truth
        return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str}

    assert right_then_wrong(run(compute_score))
    assert run(with_accuracy) == [(1.0, Outcome.CORRECT), (-1.0, Outcome.WRONG)]
    assert right_then_wrong(run(lambda solution_str, ground_truth: solution_str == ground_truth))
    verl = adapt(compute_score, "f", CONFIG)
    for acc in (True, np.bool_(True)):  # whatever the score and what is correct by it
        assert parse_score({"score": 1.0, "acc": acc}, verl, 5.0).outcome is Outcome.CORRECT


def test_openrlhf_list_dict_and_tensor():
    torch = pytest.importorskip("torch")

    def as_list(queries, prompts, labels):
        assert queries == ["2+2=4", "1+3=5"] and prompts == ["2+2=", "1+3="] and labels == ["4", "4"]
        return [1.0, 0.0]

    def as_dict(queries, prompts, labels, **kwargs):
        return {"rewards": torch.tensor([2.0, -1.0]), "scores": torch.tensor([1.0, 0.0]), "extra_logs": {}}

    assert right_then_wrong(run(as_list))
    assert run(as_dict) == [(2.0, Outcome.CORRECT), (-1.0, Outcome.WRONG)]
    assert right_then_wrong(run(lambda queries, prompts, labels: torch.tensor([[1.0], [0.0]])))


def test_rl2_reward_fn_and_env_step():
    def reward_fn(messages, answer):
        assert messages[0]["role"] == "user" and messages[-1]["role"] == "assistant"
        return messages[-1]["content"] == answer

    async def env_step(state, action, extra_info):
        right = action == extra_info["answer"]
        return {"next_state": None, "reward": float(right), "score": float(right), "done": True}

    assert right_then_wrong(run(reward_fn))
    assert right_then_wrong(run(env_step))


def test_an_unknown_signature_lists_the_accepted_ones():
    with pytest.raises(RewardLoadError, match=r"(?s)parameters \(foo, bar\).*TRL.*veRL.*OpenRLHF.*RL2"):
        adapt(lambda foo, bar: 0.0, "f", CONFIG)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "returned nan"),
        (float("inf"), "returned inf"),
        (None, "returned NoneType instead of a number"),
        (True, "returned a bool"),
        ("1.0", "returned str"),
        ([1.0], "returned list"),
        (1e30, "beyond"),
        (10**400, "a huge integer"),
        ({}, "returned NoneType"),
        ((1.0, 9), "returned 9 for an Outcome; return a number"),
        ((0.5, {"acc": 1}), r"returned \{'acc': 1\} for an Outcome"),
        ((1.0, Outcome.FAILED), "returned Outcome.FAILED"),
    ],
)
def test_nonsense_is_named(value, message):
    reward = adapt(lambda sample: value, "f", CONFIG)
    with pytest.raises(ValueError, match=message):
        parse_score(value, reward, 1.0)


def test_numpy_scalars_are_numbers():
    np = pytest.importorskip("numpy")
    reward = adapt(lambda sample: 0, "f", CONFIG)
    assert parse_score(np.float32(0.5), reward, 0.5) == (0.5, Outcome.CORRECT)
    with pytest.raises(ValueError, match="bool"):
        parse_score(np.bool_(True), reward, 0.5)
    assert math.isclose(parse_score(np.float64(0.1), reward, 1.0)[0], 0.1)
