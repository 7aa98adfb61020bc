"""Credit of turns: numbers worked by hand, and numpy oracles that know turns as lists."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from golden import advantages

from jaxrl_llm.algos import gigpo, grpo, mt_grpo, of, ppo, reinforce_pp, requirements
from jaxrl_llm.algos.policy_gradient import most_uncertain
from jaxrl_llm.errors import UserError
from jaxrl_llm.forks import TurnRecord
from jaxrl_llm.learn.turns import check_turns, turn_arrays
from jaxrl_llm.structs import Episode, Rollouts, Trajectory


def record(end, reward, state):
    return TurnRecord(end, 0, -1, reward, state=state)


def conversations(rewards, states=None, groups=None, *, rest=0.0, seed=0):
    """Return trajectories of turns with these rewards, taken in these states.

    Turns have one to three tokens, with up to two tokens of an observation between them. The environment
    gives the rewards; `rest` is added to each response's by a verifier.
    """
    rng, found = np.random.default_rng(seed), []
    for row, of_turns in enumerate(rewards):
        mask, ends = [], []
        for _ in of_turns:
            mask += [0] * (rng.integers(0, 3) if mask else 0) + [1] * rng.integers(1, 4)
            ends.append(len(mask))
        after = [*(states[row][1:] if states else "?" * (len(ends) - 1)), "the end"]
        records = [record(*each) for each in zip(ends, of_turns, after, strict=True)]
        found.append(Trajectory(
            prompt_ids=np.arange(2), response_ids=np.arange(len(mask)), logprobs=np.zeros(len(mask)),
            mask=np.array(mask), versions=np.zeros(len(mask)), prompt_index=groups[row] if groups else 0,
            response_index=row, finish="stop", reward=sum(of_turns) + rest,
            episode=Episode(len(ends), records=tuple(records), reward=float(sum(of_turns))),
        ))  # fmt: skip
    return found


def arrays(trajectories, failed=(), **fields):
    """Return the trajectories side by side, as `credit.side_by_side` does."""
    shape = len(trajectories), 1 << (max(len(t.mask) for t in trajectories) - 1).bit_length()
    rows = np.zeros(shape, np.float32)
    for row, t in zip(rows, trajectories, strict=True):
        row[: len(t.mask)] = t.mask
    valid = np.array([i not in failed for i in range(len(trajectories))], np.float32)
    rewards = np.where(valid, [t.reward for t in trajectories], np.nan)
    numbers = {name: jnp.asarray(x, jnp.float32) for name, x in (("rewards", rewards), ("valid", valid))}
    group = jnp.asarray([t.prompt_index for t in trajectories])
    return Rollouts(
        group=group, mask=jnp.asarray(rows), **numbers, **turn_arrays(trajectories, shape), **fields
    )


def of_turns(rollouts, config, trajectories):
    """Return the advantage of each turn, after checking that all of its tokens have it, and no other one."""
    every, found = np.asarray(advantages(rollouts, config)), []
    for row, t in enumerate(trajectories):
        turns = np.split(np.arange(len(t.mask)), [r.end for r in t.episode.records])[:-1]
        own = [turn[t.mask[turn] > 0] for turn in turns]
        assert all(np.ptp(every[row, turn]) == 0 for turn in own)
        assert (
            np.count_nonzero(every[row]) <= t.mask.sum()
            and (every[row, : len(t.mask)][t.mask == 0] == 0).all()
        )
        found.append([float(every[row, turn[0]]) for turn in own])
    return found


# Four games of one prompt. The states "a" and "b" are met again, "c" once.
RNG = np.random.default_rng(0)
REWARDS = [[0, 0, 1], [0, 0], [0, 1], [0, 0, 0]]
STATES = [["", "a", "b"], ["", "a"], ["", "b"], ["", "a", "c"]]


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        # G = .25 .5 1 | 0 0 | .5 1 | 0 0 0. Means: of the rewards .5; of "" .1875, of a 1/6, of b 1.
        ("none", [[0.5625, 0.83333, 0.5], [-0.6875, -0.66667], [0.8125, 0.5], [-0.6875, -0.66667, -0.5]]),
        # Divided by their std: .57735; of "" .23936, of a .288675; b does not differ.
        ("std", [[1.12714, 2.02072, 0.86602], [-1.64937, -1.44337], [2.1716, 0.86602],
                 [-1.64937, -1.44337, -0.86602]]),
    ],
)  # fmt: skip
def test_gigpo_by_hand(scale, expected):
    """verl-agent's core_gigpo.py gives these numbers, too (with compute_mean_std_cross_steps=False)."""
    found = conversations(REWARDS, STATES)
    got = of_turns(arrays(found), gigpo.Config(gamma=0.5, scale=scale), found)
    for row, numbers in zip(got, expected, strict=True):
        np.testing.assert_allclose(row, numbers, atol=2e-5)
    half = of_turns(arrays(found), gigpo.Config(gamma=0.5, scale="none", omega=0.5), found)
    np.testing.assert_allclose(half[0], [0.53125, 0.66667, 0.5], atol=2e-5)


def test_mt_grpo_by_hand():
    """G = r_1 + r_2 / 2, and r_2: 2 1 1 and 2 2 0, each less its mean 4/3, over its std 1/sqrt(3), 2/sqrt(3).

    Only the fourth response has a third turn. The fifth failed.
    """
    found = conversations([[1, 2], [0, 2], [1, 0], [5 / 6, 2 / 3, 4 / 3], [9, 9]])
    rollouts = arrays(found, failed=[4])
    got = of_turns(rollouts, mt_grpo.Config(gamma=0.5), found)
    # The fourth: G = 1.5, 4/3, 4/3. Stds over four: .47871 (mean 1.375), and .94281 (mean 4/3).
    np.testing.assert_allclose(got[0], [0.625 / 0.478714, 2 / 3 / 0.942809], rtol=1e-4)
    np.testing.assert_allclose(got[1], [-0.375 / 0.478714, 2 / 3 / 0.942809], rtol=1e-4)
    np.testing.assert_allclose(got[2], [-0.375 / 0.478714, -4 / 3 / 0.942809], rtol=1e-4)
    np.testing.assert_allclose(got[3], [0.125 / 0.478714, 0, 0], rtol=1e-4, atol=1e-5)
    assert got[4] == [0, 0]
    three = found[:3]
    got = of_turns(arrays(three), mt_grpo.Config(gamma=0.5), three)
    np.testing.assert_allclose(got, [[1.1547, 0.57735], [-0.57735, 0.57735], [-0.57735, -1.1547]], rtol=1e-4)


def oracle(rewards, states, groups, *, config, failed=()):
    """Return the advantage of each turn."""
    kept = [row for row in range(len(rewards)) if row not in failed]

    def compare(table):
        """Return (x - mean) / F by place, of lists of places with a group."""
        members = {}
        for place, (group, x) in table.items():
            members.setdefault(group, []).append((place, x))
        out = {}
        for rows in members.values():
            values = np.array([x for _, x in rows], np.float64)
            divisor = 1.0 if config.scale == "none" else values.std(ddof=1) + 1e-6 if len(rows) > 1 else 1.0
            for place, x in rows:
                out[place] = 0.0 if len(rows) == 1 else (x - values.mean()) / divisor
        return out

    steps = {}
    for row in kept:
        for k in range(len(rewards[row])):
            value = sum(config.gamma**n * r for n, r in enumerate(rewards[row][k:]))
            key = states[row][k] if config.advantage == "gigpo" else k
            steps[row, k] = (groups[row], key), value
    advantages = compare(steps)
    if config.advantage == "gigpo":
        episodes = compare({row: (groups[row], sum(rewards[row])) for row in kept})
        advantages = {(row, k): episodes[row] + config.omega * x for (row, k), x in advantages.items()}
    return [[advantages.get((row, k), 0.0) for k in range(len(r))] for row, r in enumerate(rewards)]


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("algorithm", [gigpo, mt_grpo], ids=lambda a: a.name)
def test_random_conversations(algorithm, scale):
    rng = np.random.default_rng(5)
    groups = [0, 0, 0, 0, 0, 1, 1, 1]
    rewards = [rng.normal(size=n).round(2).tolist() for n in (3, 1, 4, 5, 2, 3, 3, 4)]
    states = [["", *rng.choice(["a", "b"], len(r) - 1)] for r in rewards]
    found = conversations(rewards, states, groups, seed=2)
    config = algorithm.Config(gamma=0.8, scale=scale, **{"omega": 0.3} if algorithm is gigpo else {})
    got = of_turns(arrays(found, failed=[3]), config, found)
    for row, numbers in zip(got, oracle(rewards, states, groups, config=config, failed=[3]), strict=True):
        np.testing.assert_allclose(row, numbers, atol=2e-5)


def test_the_rest_of_the_reward_is_of_the_last_turn():
    """A verifier's 1.0 beside the environment's rewards (--reward.env add)."""
    found = conversations([[0.5, 0], [0, 0.25]], rest=1.0)
    added = conversations([[0.5, 1], [0, 1.25]])
    config = mt_grpo.Config(gamma=0.5, scale="none")
    assert of_turns(arrays(found), config, found) == of_turns(arrays(added), config, added) == [
        [0.1875, -0.125], [-0.1875, 0.125],
    ]  # fmt: skip


def test_returns_and_gae_follow_the_rewards_of_turns():
    """Tokens of turns 1 1, 1 (an observation before it) with rewards .5 and 1: 1.5 1.5 1 to go."""
    records = (record(2, 0.5, "a"), record(4, 0.25, "b"))
    found = Trajectory(
        prompt_ids=np.arange(2), response_ids=np.arange(4), logprobs=np.zeros(4), mask=np.array([1, 1, 0, 1]),
        versions=np.zeros(4), prompt_index=0, response_index=0, finish="stop", reward=1.5,
        episode=Episode(2, records=records, reward=0.75),
    )  # fmt: skip
    values = jnp.array([[0.1, 0.2, 9.0, 0.4]])
    rollouts = arrays([found], values=values)
    to_go = reinforce_pp.Config(kl_coef=0.0, whiten="none")
    np.testing.assert_allclose(advantages(rollouts, to_go), [[1.5, 1.5, 0, 1]], atol=1e-6)
    np.testing.assert_allclose(advantages(rollouts, replace(to_go, gamma=0.5)), [[0.5, 1, 0, 1]], atol=1e-6)
    gae = ppo.Config(kl_coef=0.0, whiten="none", lam=1.0)
    np.testing.assert_allclose(advantages(rollouts, gae), [[1.4, 1.3, 0, 0.6]], atol=1e-6)
    # Deltas .2 - .1, .5 + .4 - .2, 1 - .4; A = delta + .5 A'.
    half = replace(gae, lam=0.5)
    np.testing.assert_allclose(advantages(rollouts, half), [[0.6, 1.0, 0, 0.6]], atol=1e-6)
    np.testing.assert_allclose(of(half).returns(rollouts, half), [[0.7, 1.2, 0, 1.0]], atol=1e-6)
    # Algorithms that compare whole responses are as before.
    two = arrays(conversations([[0.5, 0], [0, 0.25]]))
    plain = replace(two, turns=None, turn_rewards=None, states=None)
    np.testing.assert_array_equal(advantages(two, grpo.Config()), advantages(plain, grpo.Config()))


def test_starpo_s_keeps_the_prompts_whose_rewards_differ_most():
    """Stds .707, 0, 1.414, .577 (of the three that are valid), 0: of five prompts at .4 two, at .1 one."""
    rewards = np.array([1, 0, 2, 2, 2, 0, 1, 0, 0, np.nan, 3])
    group = np.array([0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 4])
    valid = np.isfinite(rewards)
    kept = lambda share: np.unique(group[most_uncertain(rewards, group, valid, share)]).tolist()
    assert [kept(share) for share in (0.1, 0.4, 0.6, 0.8, 1.0)] == [
        [2],
        [0, 2],
        [0, 2, 3],
        [0, 1, 2, 3],
        [*range(5)],
    ]
    found = conversations([[1], [0], [2], [2]], groups=[0, 0, 1, 1])
    select = lambda **settings: grpo.select(arrays(found, failed=[1]), grpo.Config(**settings), RNG).tolist()
    assert select() == [0, 2, 3] and select(keep_prompts=0.5) == [0]


def test_only_estimators_of_turns_need_them():
    assert requirements(gigpo.config).turns and requirements(grpo.Config(advantage="mt_grpo")).turns
    assert not requirements(grpo.config).turns and not requirements(ppo.config).turns


def test_a_response_without_a_reply_is_one_turn_in_the_first_state():
    """It was cut off; so was the last turn of the second one, which has a state nonetheless."""
    cut, second, other = conversations([[0], [1, 0], [0, 0]], [[""], ["", "a"], ["", "a"]], seed=1)
    cut.episode = None
    second.episode.records = second.episode.records[:1]
    found = turn_arrays([cut, second, other], (3, 8))
    first, again = second.episode.records[0].end, other.episode.records[0].end
    assert found["states"][0, 0] == found["states"][1, 0] == found["states"][2, 0] == 0
    assert found["states"][1, first] == found["states"][2, again] == 1
    assert found["turns"][0].max() == 0 and found["turns"][1, first] == 1
    assert np.flatnonzero(found["turn_rewards"]).tolist() == [8 + first - 1]


def test_a_dialogue_that_does_not_record_its_turns_is_refused():
    found = conversations([[0, 1], [1, 0]], seed=3)
    check_turns(found)
    mask = np.array([1, 0, 1])
    found[1] = replace(found[1], mask=mask, response_ids=np.arange(3), episode=Episode(2))
    with pytest.raises(
        UserError, match=r"a response has 2, and its Episode.records 0\. Your dialogue must add"
    ):
        check_turns(found)
