"""Credit by hand: what of a response is learned from, and what its tokens are worth."""

from dataclasses import replace

import numpy as np
import pytest

from jaxrl_llm.algos import grpo, online_dpo
from jaxrl_llm.builders.models import make_stages
from jaxrl_llm.builders.sizes import make_meshes
from jaxrl_llm.data.packing import PackItem, arrange, counts, from_trajectory
from jaxrl_llm.learn.credit import assign_credit, side_by_side, split_minibatches
from jaxrl_llm.learn.stage import Experience, Stage
from jaxrl_llm.recipe.load import find_recipe, load_recipe
from jaxrl_llm.structs import TrainState, Trajectory


def trajectory(reward, response, prompt_index=0, finish="stop", **fields):
    n = len(response)
    return Trajectory(
        prompt_ids=np.array([1, 2]), response_ids=np.array(response), logprobs=np.full(n, -0.5),
        mask=np.ones(n, np.int8), versions=np.zeros(n), prompt_index=prompt_index, response_index=0,
        finish=finish, reward=reward, **fields,
    )  # fmt: skip


def assigned(trajectories, algo=None):
    items = [from_trajectory(t) for t in trajectories]
    return assign_credit(algo or grpo.Config(kl_coef=0.0), items, trajectories, 0.0, seed=0)


def test_every_token_of_a_response_gets_its_advantage():
    first, second = assigned([trajectory(1.0, [5, 6, 9]), trajectory(0.0, [5, 9])])
    np.testing.assert_allclose(first.signals["advantages"], [0, 0, 0.7071, 0.7071, 0.7071], atol=1e-4)
    np.testing.assert_allclose(second.signals["advantages"], [0, 0, -0.7071, -0.7071], atol=1e-4)


def test_failed_rewards_are_masked_and_not_counted():
    """Nothing is learned from a response that could not be judged, and it does not move the baseline."""
    trajectories = [trajectory(r, [5, 9]) for r in (1.0, 0.0, float("nan"))]
    items = [from_trajectory(t) for t in trajectories]
    kept = assign_credit(grpo.Config(kl_coef=0.0), items, trajectories, 0.0, seed=0)
    assert items[2].mask.sum() == 0  # what an algorithm without `select` would train on
    assert len(kept) == 2 and counts(kept) == (4.0, 2.0)
    np.testing.assert_allclose(kept[0].signals["advantages"][2], 0.70711, atol=1e-4)


def test_groups_are_numbered_from_zero_whatever_the_prompts_are():
    trajectories = [trajectory(float(i), [5, 9], prompt_index=p) for i, p in enumerate([7, 7, 40, 40])]
    rollouts = side_by_side([from_trajectory(t) for t in trajectories], trajectories)
    np.testing.assert_array_equal(rollouts.group, [0, 0, 1, 1])
    np.testing.assert_array_equal(rollouts.rollout_logprobs, np.full((4, 2), -0.5))
    np.testing.assert_array_equal(rollouts.truncated, np.zeros(4))


def test_nothing_is_learned_where_nothing_was_selected():
    """Online DPO with no group that differs: no items, no mini-batch, no update."""
    same = [trajectory(1.0, [5, 9], prompt_index=p) for p in (0, 0, 1, 1)]
    assert assigned(same, online_dpo.Config()) == []
    state = TrainState({}, (), 0, 0, kl_coef=0.0)
    assert Stage(policy=None).update(state, [], step=0) == (state, {})


def test_minibatches_keep_groups_together():
    items = [PackItem(np.array([i]), np.ones(1)) for i in range(10)]
    parts = split_minibatches(items, 3, seed=1, group_size=2)
    numbers = [[int(item.tokens[0]) for item in part] for part in parts]
    assert sorted(n for part in numbers for n in part) == list(range(10))
    assert all(
        b == a + 1 and a % 2 == 0 for part in numbers for a, b in zip(part[::2], part[1::2], strict=True)
    )
    assert [len(part) for part in parts] == [4, 4, 2]
    assert (
        split_minibatches(items, 1, seed=1) == [items]
        and split_minibatches([], 1, seed=1) == split_minibatches([], 2, seed=1) == []
    )
    assert len(split_minibatches(items[:2], 3, seed=1)) == 2


def test_each_epoch_is_all_items_in_an_order_of_its_own():
    """The first epoch is that of a step with one epoch, numpy's permutation of the seed."""
    items = [PackItem(np.array([i]), np.ones(1)) for i in range(8)]
    parts = split_minibatches(items, 2, seed=5, epochs=3)
    numbers = [[int(item.tokens[0]) for item in part] for part in parts]
    assert numbers[:2] == [[1, 4, 2, 3], [7, 5, 6, 0]] and split_minibatches(items, 2, seed=5) == parts[:2]
    assert numbers[2:4] == [[4, 2, 5, 0], [7, 6, 3, 1]]
    assert sorted(numbers[4] + numbers[5]) == list(range(8)) and numbers[4:] != numbers[2:4]
    assert split_minibatches(items, 1, seed=5, epochs=3) == [items] * 3


def numbered(prompts, group_size=1):
    """Return items 0, 1, ... of these prompts; a group's items have one prompt."""
    return [
        PackItem(np.array([i]), np.ones(1), prompt=prompts[i // group_size])
        for i in range(len(prompts) * group_size)
    ]


def split(items, count, **settings):
    parts = split_minibatches(items, count, seed=5, whole_prompts=True, **settings)
    return [[int(item.tokens[0]) for item in part] for part in parts]


def test_minibatches_of_whole_prompts():
    """Prompts are in the order of numpy's permutations, [1 2 0] and [0 2 1]; responses keep theirs."""
    assert [list(np.random.default_rng([5, n]).permutation(3)) for n in (0, 1)] == [[1, 2, 0], [0, 2, 1]]
    equal = numbered([40, 40, 7, 7, 9, 9])
    assert split(equal, 3) == [[2, 3], [4, 5], [0, 1]]
    assert split(equal, 2) == [[2, 3, 4, 5], [0, 1]]
    assert split(equal, 3, epochs=2)[3:] == [[0, 1], [4, 5], [2, 3]]
    # Filters leave groups of one and three; asynchronous responses may not be in the order of their prompts.
    assert split(numbered([40, 7, 7, 40, 9, 7]), 2) == [[1, 2, 5, 4], [0, 3]]


def test_responses_are_mixed_where_there_are_fewer_prompts_than_minibatches():
    mixed = lambda items, count, **settings: [
        [int(item.tokens[0]) for item in part] for part in split_minibatches(items, count, seed=5, **settings)
    ]
    few = numbered([7, 7, 7, 7, 9, 9, 9, 9])
    assert split(few, 4) == mixed(few, 4) == [[1, 4], [2, 3], [7, 5], [6, 0]]
    documents = numbered([None] * 4, group_size=2)
    assert split(documents, 2, group_size=2) == mixed(documents, 2, group_size=2)
    pairs = numbered([3, 5, 8, 9], group_size=2)  # a best and a worst response to each prompt
    assert split(pairs, 2, group_size=2) == mixed(pairs, 2, group_size=2)


def test_a_prompt_is_in_one_row_of_a_step_whatever_its_minibatches():
    """4 prompts of 10 tokens, 4 responses of 3 to each: 10 + 4 x 3 + 3 tokens of a prompt."""
    prompts = [range(1 + 20 * p, 11 + 20 * p) for p in range(4)]
    mask = np.repeat([0.0, 1.0], [10, 3])
    items = [
        PackItem(np.array([*tokens, r, r, r]), mask, prompt=p)
        for p, tokens in enumerate(prompts)
        for r in range(90, 94)
    ]
    for count in (1, 2, 4):
        parts = split_minibatches(items, count, seed=5, whole_prompts=True)
        ends = [row[-1].end for part in parts for row in arrange(part, 32, share=True)]
        assert ends == [25] * 4


@pytest.mark.parametrize("shares", [True, False])
def test_steps_are_divided_as_the_config_says_with_and_without_shared_prefixes(shares, monkeypatch):
    config = load_recipe(find_recipe("grpo_tiny.py"))
    config = replace(config, minibatches_per_step=2, share_prefixes=shares)
    trajectories = [trajectory(float(i % 2), [5, i], prompt_index=i // 4) for i in range(8)]
    monkeypatch.setattr(Stage, "score", lambda *_: None)

    def minibatches(config):
        stage = make_stages(config, config.model.architecture, make_meshes(config))[-1]
        experience = Experience(
            [from_trajectory(t) for t in trajectories], {}, 0, [], trajectories=trajectories
        )
        parts = stage.prepare(TrainState({}, (), 0, 0, kl_coef=0.0), experience, None, 5)
        return [[int(item.tokens[-1]) for item in part] for part in parts]

    assert minibatches(config) == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert minibatches(replace(config, minibatches_of="responses")) == [[1, 4, 2, 3], [7, 5, 6, 0]]


@pytest.mark.parametrize("lengths", [(3, 5), (1, 1)])
def test_rollouts_are_padded_to_a_power_of_two(lengths):
    trajectories = [trajectory(1.0, [5] * n) for n in lengths]
    rollouts = side_by_side([from_trajectory(t) for t in trajectories], trajectories)
    assert rollouts.mask.shape == (2, 8 if max(lengths) == 5 else 1)
    np.testing.assert_array_equal(rollouts.mask.sum(1), lengths)
