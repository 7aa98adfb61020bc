"""Rewards and metrics of environments on trajectories; observations are not learned from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import models
from jaxrl_llm.algos import grpo, gspo, reinforce_pp
from jaxrl_llm.algos.config import Correction
from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.packing import counts, from_trajectory, pack
from jaxrl_llm.data.rows import Example
from jaxrl_llm.experience.metrics import statistics
from jaxrl_llm.experience.rewards import _apply_episodes, reward_sample
from jaxrl_llm.learn import credit
from jaxrl_llm.learn.update import StepConfig, loss_and_metrics
from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.config import RewardConfig
from jaxrl_llm.rewards.sample import RewardFailureError
from jaxrl_llm.structs import BatchTotals, Episode, Trajectory


def trajectory(mask, reward=0.0, episode=None, index=0, **fields):
    n = len(mask)
    return Trajectory(
        prompt_ids=np.arange(2, 5, dtype=np.int32), response_ids=np.arange(5, 5 + n, dtype=np.int32),
        logprobs=np.linspace(-2, -1, n, dtype=np.float32), mask=np.array(mask, np.int8),
        versions=np.zeros(n, np.int32), prompt_index=0, response_index=index, finish="stop",
        reward=reward, outcome=Outcome.WRONG, episode=episode, **fields,
    )  # fmt: skip


def test_its_reward_takes_the_verifiers_place_or_is_added_or_there_is_none():
    def settled(how, episode):
        t = trajectory([1], 0.25, episode)
        _apply_episodes([t], RewardConfig(env=how, max_failed_fraction=1.0))
        return t.reward, t.outcome

    assert settled("replace", Episode(reward=1.0)) == (1.0, Outcome.CORRECT)
    assert settled("replace", Episode(reward=0.0)) == (0.0, Outcome.WRONG)
    assert settled("add", Episode(reward=1.0)) == (1.25, Outcome.WRONG)
    assert settled("replace", Episode()) == (0.25, Outcome.WRONG)
    assert settled("replace", None) == (0.25, Outcome.WRONG)
    for how, components in (("add", (1.25, 0.5)), ("replace", (1.0, 0.0))):
        t = trajectory([1], 0.75, Episode(reward=1.0), components=(0.25, 0.5))
        _apply_episodes([t], RewardConfig(env=how))
        assert t.components == components and t.reward == sum(components)
    reward, outcome = settled("add", Episode(reward=1.0, failure="OSError"))
    assert np.isnan(reward) and outcome is Outcome.FAILED


def test_a_failed_conversation_is_not_learned_from_and_too_many_end_the_run():
    good = [trajectory([1, 1], float(i), Episode(), i) for i in range(3)]
    bad = trajectory([1, 1], 5.0, Episode(failure="OSError: crashed"), 3)
    _apply_episodes([*good, bad], RewardConfig())
    items = [from_trajectory(t) for t in (*good, bad)]
    credit.assign_credit(grpo.Config(), items, [*good, bad], 0.0, seed=0)
    assert [item.mask.sum() for item in items] == [2, 2, 2, 0]
    with pytest.raises(RewardFailureError, match=r"2 of 3 samples.*\n  2 x OSError: crashed"):
        _apply_episodes([good[0], bad, bad], RewardConfig())


def test_the_verifier_reads_the_last_turn():
    prompt = Prompt(Example(None, "6*7=", answer="42"), np.array([1]), 0)
    assert (
        reward_sample(prompt.example, trajectory([1], text="call 42 done", answer="done")).response == "done"
    )
    assert reward_sample(prompt.example, trajectory([1], text="42")).response == "42"


def test_the_verifier_does_not_read_a_reference_answer_as_the_prompt():
    question = {"role": "user", "content": "6*7="}
    example = Example((question, {"role": "assistant", "content": "42"}), None, answer="42")
    sample = reward_sample(example, trajectory([1], text="41"))
    assert (sample.prompt, sample.messages, sample.response) == ("6*7=", (question,), "41")


def test_metrics_of_conversations():
    first = trajectory([1, 0, 0, 1, 1, 0, 1], 1.0, Episode(3, tool_calls=2, tool_errors=1, timeouts=1))
    second = trajectory([1, 1], 0.0, Episode(1, failure="OSError"))
    third = trajectory([1, 1], 0.0)  # cut off in its first turn
    assert [t.num_turns for t in (first, second, third)] == [3, 1, 1]
    found = statistics([first, second, third])
    assert found["env/turns_mean"] == pytest.approx(5 / 3)
    assert found["env/tool_calls"] == pytest.approx(2 / 3) and found["env/tool_errors"] == 0.5
    assert found["env/timeouts"] == 1 and found["env/failed_fraction"] == pytest.approx(1 / 3)
    assert not any(name.startswith("env/") for name in statistics([third]))


CORRECTED = grpo.Config(correction=Correction(weight="token"), kl_coef=0.1, entropy_coef=0.1)
ALGORITHMS = [CORRECTED, gspo.Config(), reinforce_pp.Config()]
MODEL = models.TransformerConfig(
    vocab_size=64, hidden_size=16, mlp_size=24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
    max_position=32,
)  # fmt: skip


def batch_of(algo, garbage):
    """A packed batch in which every number at observation tokens is `garbage`, and its denominators."""
    masks = ([1, 1, 0, 0, 1], [1, 0, 1, 1], [1, 1, 1], [1, 0, 0, 0, 1, 1])
    made = [trajectory(mask, float(i % 2), Episode(), i) for i, mask in enumerate(masks)]
    rng = np.random.default_rng(0)
    items = [from_trajectory(t) for t in made]
    for item in items:
        for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):
            item.signals[name] = rng.normal(-2, 0.3, len(item.tokens)).astype(np.float32)
            item.signals[name][(item.mask == 0) & (np.arange(len(item.mask)) > 2)] = garbage
    items = credit.assign_credit(algo, items, made, 0.1, seed=0)
    (batch,) = pack(items, 16, 4)
    return jax.tree.map(jnp.asarray, batch), BatchTotals(*map(jnp.float32, counts(items)), jnp.float32(0.1))


@pytest.mark.parametrize("algo", ALGORITHMS, ids=lambda a: type(a).__module__.rsplit(".", 1)[1])
def test_nothing_that_stands_at_an_observation_reaches_loss_metrics_or_gradient(algo):
    config, params = StepConfig(row_tokens=16, rows=4), models.init(MODEL, jax.random.key(0))
    loss_fn = lambda params, batch, whole: loss_and_metrics(
        params, batch, whole, (), algo=algo, config=config
    )
    learn = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    (_, (clean, _)), expected = learn(params, *batch_of(algo, 0.0))
    for garbage in (7.0, np.nan):
        (_, (found, _)), grads = learn(params, *batch_of(algo, garbage))
        assert jax.device_get(found) == jax.device_get(clean)
        jax.tree.map(np.testing.assert_array_equal, grads, expected)
    assert any(np.abs(g).max() > 0 for g in jax.tree.leaves(expected))
