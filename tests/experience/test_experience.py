"""The batch of a step, with an engine and a verifier made of arithmetic."""

import contextlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algos import dapo, gdpo, gkd, grpo, remax
from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.rows import Example
from jaxrl_llm.errors import ServerError
from jaxrl_llm.experience.metrics import group_by_prompt, has_variance
from jaxrl_llm.experience.rewards import Rewarder, verify
from jaxrl_llm.experience.rollouts import CURSOR_FILE, PARTIAL_FILE, RolloutSource
from jaxrl_llm.learn.credit import assign_credit
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.models.params import perturbed
from jaxrl_llm.outcome import Outcome
from jaxrl_llm.ranges import problems
from jaxrl_llm.rewards.config import RewardConfig
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.sample import RewardResult
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import PartialResponse
from jaxrl_llm.rollout.native.engine import DeferredGeneration
from jaxrl_llm.rollout.partial import pack_responses
from jaxrl_llm.structs import Trajectory


class FakeLoader:
    """Prompt number i has the answer i; `asked` are the batches read."""

    def __init__(self):
        self.asked = []

    def batch(self, step, size):
        self.asked.append(step)
        return [
            Prompt(Example(None, str(i), answer=str(i), teacher=i % 2), np.array([i + 1]), i)
            for i in range(step * size, (step + 1) * size)
        ]

    def epochs(self, position):
        return {"epoch": position / 9}


class FakeEngine:
    """The answer to prompt i is "right" for its first i % 3 responses; greedy ones are right."""

    def publish(self, params, version):
        self.params = params
        return {}

    def start(self, call):
        self.key = call.key
        return DeferredGeneration(lambda: self.generate(call.requests, call.sampling, call.key))

    def usage(self):
        return {}

    def check_logprobs(self, params, trajectories):
        return self.untrusted

    untrusted = ()

    def release_memory(self):
        pass

    def snapshot(self, pending):
        return [[] for _ in pending]

    def generate(self, requests, sampling, key):
        assert not list(problems(sampling))  # as `rollout.checks` refuses them
        made = []
        for request in requests:
            number = int(request.prompt_ids[0]) - 1
            for g in range(request.num_responses):
                right = sampling.temperature == 0 or g < number % 3
                made.append(
                    Trajectory(
                        prompt_ids=request.prompt_ids, response_ids=np.array([5, 9]), logprobs=np.zeros(2),
                        mask=np.ones(2), versions=np.zeros(2), prompt_index=request.prompt_index,
                        response_index=g, finish="stop", text="right" if right else "wrong",
                    )
                )  # fmt: skip
        return made


class FakePool:
    config = RewardConfig()
    metrics: dict = {}  # noqa: RUF012

    def score(self, samples):
        right = [s.response == "right" for s in samples]
        return [
            RewardResult(float(r), Outcome.CORRECT if r else Outcome.WRONG, components=(float(r),))
            for r in right
        ]


def source(algo, rewarder=None, **fields):
    return RolloutSource(
        FakeLoader(), FakeEngine(), rewarder or Rewarder(FakePool()), algo, SamplingConfig(),
        jax.random.key(0), prompts=3, responses=2, max_tokens=4, **fields,
    )  # fmt: skip


def step(built, number=0):
    return built.next(number, {}, 0, lambda name: contextlib.nullcontext())


def test_one_draw_is_one_batch_in_its_order():
    built = source(grpo.Config())
    found = step(built, 2)
    assert built.loader.asked == [2]
    assert [t.prompt_index for t in found.trajectories] == [0, 0, 1, 1, 2, 2]
    assert [t.reward for t in found.trajectories] == [0, 0, 1, 0, 1, 1]
    assert found.metrics["zero_variance_fraction"] == pytest.approx(2 / 3)
    assert found.metrics["accuracy"] == 0.5 and found.tokens == 18


def test_dynamic_sampling_draws_until_the_step_is_full_of_groups_that_differ():
    """Of prompts 0, 1, 2, ... only every third (1, 4, 7) has one right and one wrong response of two."""
    built = source(dapo.Config(max_draws=4))
    found = step(built)
    assert built.loader.asked == [0, 1, 2]
    assert [int(t.prompt_ids[0]) - 1 for t in found.trajectories] == [1, 1, 4, 4, 7, 7]
    assert [t.prompt_index for t in found.trajectories] == [1, 1, 4, 4, 7, 7]
    assert all(has_variance(group) for group in group_by_prompt(found.trajectories))
    assert found.metrics["dynamic/draws"] == 3
    assert found.metrics["dynamic/kept_fraction"] == pytest.approx(1 / 3)
    assert [p.example.answer for p in found.prompts] == [str(i) for i in range(9)]


def test_dynamic_sampling_gives_up_after_max_draws_with_what_it_has():
    built = source(dapo.Config(max_draws=2))
    found = step(built)
    assert built.loader.asked == [0, 1]
    assert len(found.trajectories) == 4


def test_dynamic_sampling_uses_every_prompt_and_continues_from_its_cursor():
    """The first step needs three draws of the four it may have; the second begins with the fourth."""
    built = source(dapo.Config(max_draws=4))
    step(built)
    step(built, 1)
    assert built.loader.asked == [0, 1, 2, 3, 4, 5]
    files = built.snapshot()
    resumed = source(dapo.Config(max_draws=4))
    resumed.resume(files, 2, {}, 0)
    step(resumed, 2)
    assert resumed.loader.asked == [6, 7, 8]
    resumed.resume({CURSOR_FILE: b""}, 2, {}, 0)  # a checkpoint from before there were cursors
    assert resumed.cursor == 8


def test_a_step_that_an_outage_ends_in_its_second_draw_is_repeated_with_the_first():
    built, calls = source(dapo.Config(max_draws=4)), []
    generate = built.engine.generate

    def failing(*args):
        calls.append(args)
        if len(calls) == 2:
            raise ServerError("all servers are lost")
        return generate(*args)

    built.engine.generate = failing
    with pytest.raises(ServerError):
        step(built)
    resumed = source(dapo.Config(max_draws=4))
    resumed.resume(built.snapshot(), 0, {}, 0)
    found = step(resumed)
    assert resumed.loader.asked == [0, 1, 2]
    assert [int(t.prompt_ids[0]) - 1 for t in found.trajectories] == [1, 1, 4, 4, 7, 7]


def continued(saved, algo=None, version=5, **fields):
    """Draws that a run at draw 8, after 5 updates, continues; saved: draw -> (tokens, their version)."""
    make = lambda tokens, age: PartialResponse([7] * tokens, [-1.0] * tokens, [age] * tokens)
    packed = pack_responses({draw: [[make(*each) for _ in range(6)]] for draw, each in saved.items()})
    resumed = source(algo or grpo.Config(), steps=99, **fields)
    resumed.resume({CURSOR_FILE: b'{"draw": 8}', PARTIAL_FILE: packed}, 8, {}, version)
    return sorted(resumed.started)


def test_responses_of_a_checkpoint_keep_the_bound_of_the_run_that_continues_it():
    written_by_4 = {8: (2, 4), 9: (2, 4), 10: (1, 4), 11: (0, 4)}
    assert continued(written_by_4, max_staleness=4) == [8, 9, 10, 11]
    assert continued(written_by_4, max_staleness=2) == [8, 9]
    assert continued(written_by_4, max_staleness=0) == []
    before_an_outage = {8: (2, 5), 9: (1, 5), 10: (0, 5)}  # by the weights that step 8 begins with
    assert continued(before_an_outage, max_staleness=2) == [8, 9, 10]
    assert continued(before_an_outage, max_staleness=1) == [8, 9]
    assert continued(before_an_outage, dapo.Config(max_draws=3), max_staleness=1) == [8, 9, 10]


def test_responses_of_a_checkpoint_that_are_too_long_for_the_run_begin_anew():
    assert continued({8: (4, 5), 9: (5, 5)}, max_staleness=4) == [8]


def test_dynamic_sampling_without_a_group_that_differs_learns_nothing():
    built = source(dapo.Config(max_draws=2), rewarder=lambda prompts, trajectories: constant(trajectories))
    found = step(built)
    assert found.items == [] and len(found.trajectories) == 6
    assert found.metrics["dynamic/kept_fraction"] == 0
    assert Stage(policy=SimpleNamespace(algo=dapo.Config())).prepare(None, found, None, 0) == []


def constant(trajectories):
    for trajectory in trajectories:
        trajectory.reward = 0.5
    return {}


def test_responses_with_false_log_probs_are_masked():
    built = source(grpo.Config())
    built.engine.untrusted = (0, 3)
    found = step(built)
    assert [bool(np.isfinite(t.reward)) for t in found.trajectories] == [False, True, True, False, True, True]
    assert [t.outcome.name for t in found.trajectories[:2]] == ["FAILED", "WRONG"]


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(top_k=5, kept_sets=True)])
def test_a_greedy_response_is_a_baseline_and_is_not_learned_from(sampling):
    built = source(remax.Config())
    built.sampling = sampling
    found = step(built)
    assert len(found.items) == 6
    assert all(t.greedy_reward == 1.0 for t in found.trajectories)


def opposite(prompts, trajectories):
    """Score by two rewards whose sum is 1: (1, 0) and (0, 1); those of the first prompt are equal."""
    for i, t in enumerate(trajectories):
        t.reward, t.components = 1.0, (0.0, 1.0) if i % 2 and t.prompt_index else (1.0, 0.0)
    return {}


def test_dynamic_sampling_compares_the_rewards_that_gdpo_normalises_apart():
    settings = dict(dynamic_sampling=True, max_draws=2)
    found = step(source(gdpo.Config(**settings), rewarder=opposite))
    assert [int(t.prompt_ids[0]) - 1 for t in found.trajectories] == [1, 1, 2, 2, 4, 4]
    assert found.metrics["zero_variance_fraction"] == 0
    assert step(source(grpo.Config(**settings), rewarder=opposite)).items == []


def test_a_component_that_failed_is_left_out():
    group = step(source(gdpo.Config(), rewarder=opposite)).trajectories[2:4]
    assert has_variance(group, components=True) and not has_variance(group)
    group[0].components = (float("nan"), 1.0)
    assert not has_variance(group, components=True)


def by_steps(prompts, trajectories):
    """Score by a process reward alone: 1 on the second token of odd responses, and of greedy ones."""
    for i, t in enumerate(trajectories):  # 6 sampled ones, then the greedy ones
        scores = np.array([0.0, float(i % 2 or i >= 6)], np.float32)
        t.reward, t.components, t.token_rewards = 0.0, (0.0, float(scores.sum())), scores
    return {}


def test_process_rewards_count_for_dynamic_sampling():
    found = step(source(dapo.Config(max_draws=4), rewarder=by_steps))
    assert len(found.items) == 6 and found.metrics["dynamic/draws"] == 1
    assert [t.total_reward for t in found.trajectories] == [0, 1] * 3


def test_process_rewards_count_for_the_greedy_baseline():
    found = step(source(remax.Config(), rewarder=by_steps))
    items = assign_credit(remax.Config(), found.items, found.trajectories, 0.0, seed=0)
    own = [item.signals["advantages"][-2:].tolist() for item in items]
    assert own == [[-1, -1], [0, 0]] * 3


def test_the_teacher_of_a_prompt_goes_with_its_tokens():
    found = step(source(gkd.Config(teachers=("a", "b"))))
    assert [item.signals["labels"].tolist() for item in found.items[::2]] == [[0] * 3, [1] * 3, [0] * 3]


def test_noise_on_the_weights_is_relative_and_new_every_step():
    weights = {"w": jnp.array([1.0, 100.0]), "zero": jnp.zeros(3)}
    built = source(grpo.Config(), weight_noise=0.1)
    seen = []
    for number in (0, 1, 0):
        built.next(number, weights, 0, lambda name: contextlib.nullcontext())
        seen.append(np.asarray(built.engine.params["w"]))
        with_sampling_key = perturbed(weights, built.engine.key, 0.1)["w"]
        assert not np.array_equal(seen[-1], with_sampling_key)  # streams of their own
    assert not np.allclose(seen[0], seen[1]) and np.array_equal(seen[0], seen[2])
    many = perturbed({"w": jnp.full(20000, 3.0)}, jax.random.key(1), 0.1)["w"]
    assert float(many.std()) == pytest.approx(0.3, rel=0.03)
    assert not np.asarray(built.engine.params["zero"]).any()


def test_without_a_verifier_nothing_is_correct_or_wrong():
    pool = RewardPool(RewardConfig(name="none"))
    found = step(source(grpo.Config()))
    verify(pool, found.prompts, found.trajectories)
    assert {t.outcome for t in found.trajectories} == {Outcome.FAILED}
    assert {(t.reward, t.components) for t in found.trajectories} == {(0.0, (0.0,))}


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (RewardResult(0.5 - 2.0, Outcome.CORRECT, components=(1.0, -2.0)), (0.5, -2.0)),
        (RewardResult(0.0, Outcome.FAILED), (0.0, 0.0)),  # reward.failed "zero"
        (RewardResult(float("nan"), Outcome.FAILED), (float("nan"),) * 2),
    ],
)
def test_the_components_of_a_reward_add_up_to_it(result, expected):
    class Pool(FakePool):
        config = RewardConfig(weight=0.5, shaping=(("overlong", 1.0),), overlong_from=1, overlong_to=2)
        score = lambda self, samples: [result] * len(samples)

    none = np.array([], bool)
    t = SimpleNamespace(
        prompt_index=0, text="", answer=None, response_ids=none, once=none, opens_thought=None, episode=None
    )
    verify(Pool(), FakeLoader().batch(0, 1), [t])
    np.testing.assert_equal(t.components, expected)
    np.testing.assert_equal(t.reward, sum(expected))
