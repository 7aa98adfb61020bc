"""Over-sampling: which groups a step takes, which it leaves, and what a checkpoint keeps of them.

The engine answers with responses whose lengths are known, a token each unit of time, any number at once; the
choice is the pool's own.
"""

import contextlib
import json
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl_llm.algos import dapo, grpo, remax
from jaxrl_llm.config import RolloutConfig
from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.rows import Example
from jaxrl_llm.errors import ServerError
from jaxrl_llm.experience.rollouts import CURSOR_FILE, PARTIAL_FILE, RolloutSource
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.partial import new_responses, trajectory_of
from jaxrl_llm.rollout.servers.engine import ServerEngine


class Started(SimpleNamespace):
    """Responses in progress: `started` and `version` are of the time when they were."""

    def result(self):
        self.future.result(timeout=0)
        return [trajectory_of(one, None) for one in self.responses]


class ClockedEngine:
    """Prompt n has responses of lengths[n] tokens; each token has the version that was published at its
    time. A request that is waited for moves the clock on."""

    def __init__(self, lengths):
        self.lengths, self.now, self.version, self.open, self.fails = lengths, 0, 0, [], False

    def publish(self, params, version):
        self.version = version
        return {}

    def start(self, call):
        responses = new_responses(call.requests, call.key, call.partial)
        started = Started(future=Future(), responses=responses, greedy=not call.sampling.temperature)
        self.open.append(started)
        return started

    def left(self, one):
        return self.lengths[int(one.request.prompt_ids[0]) - 1] - len(one.ids)

    def advance(self):
        """Move the clock to the next time at which a response is complete."""
        self.open = [started for started in self.open if not started.future.done()]
        count = min(filter(None, (self.left(one) for started in self.open for one in started.responses)))
        times = [-float(self.now + i) for i in range(1, count + 1)]
        self.now += count
        for started in self.open:
            for one in started.responses:
                new = min(count, self.left(one))
                one.append([7] * new, times[:new], [self.version] * new)
                one.finish = "" if self.left(one) else "stop"
            if all(one.finish for one in started.responses):
                started.future.set_result(None)

    def first_finished(self, groups, count, required):
        if self.fails:
            groups[0][0].future.set_exception(ServerError("all servers are lost"))
        done = lambda i: all(each.future.done() for each in groups[i])
        while not self.fails and (sum(map(done, range(len(groups)))) < count or not all(map(done, required))):
            self.advance()
        pool = SimpleNamespace(on_first=lambda work: work(), _first_finished=None)
        pool._first_finished = lambda *args: ServerEngine._first_finished(pool, *args)
        return ServerEngine.first_finished(pool, groups, count, required)

    def check_logprobs(self, params, trajectories):
        return []

    def usage(self):
        return {}

    def release_memory(self):
        pass

    def snapshot(self, pending):
        return [[one.copy() for one in each.responses] for each in pending]


class Numbers:
    """Prompt i is the token i + 1."""

    def batch(self, step, size):
        every = range(step * size, (step + 1) * size)
        return [Prompt(Example(None, str(i), answer=str(i)), np.array([i + 1], np.int32), i) for i in every]

    def epochs(self, position):
        return {"epoch": position}


def score(prompts, trajectories):
    """One of two responses is right, but to every third prompt none."""
    assert all(p.ids[0] == t.prompt_ids[0] for t in trajectories for p in [prompts[t.prompt_index]])
    for i, t in enumerate(trajectories):
        t.reward = float(i % 2 and t.prompt_ids[0] % 3 > 0)
        t.components = (t.reward,)
    return {}


def source(lengths, algo=None, prompts=2, **fields):
    settings = {"max_staleness": 2, "oversample": 2.0, "steps": len(lengths) // prompts} | fields
    return RolloutSource(
        Numbers(), ClockedEngine(lengths), score, algo or grpo.Config(), SamplingConfig(), jax.random.key(0),
        prompts=prompts, responses=2, max_tokens=1000, **settings,
    )  # fmt: skip


def take(built, step):
    """Return (numbers of the prompts that a step trains on, its experience)."""
    found = built.next(step, {}, step, lambda name: contextlib.nullcontext())
    numbers = [int(t.prompt_ids[0]) - 1 for t in found.trajectories]
    assert numbers[::2] == numbers[1::2]
    return numbers[::2], found


LENGTHS = [9, 1, 2, 3, 1, 1, 4, 1]


def test_steps_take_the_first_complete_groups_and_wait_for_overdue_ones():
    """By hand, four groups in progress: 1 and 2 are complete at time 2; 3 and 4, of new weights, at 3, as is
    5, which the older ones keep out; 0, then two steps old, is waited for until 9; 6 and 7 are left."""
    built, times, rows = source(LENGTHS), [], []
    for step, expected in enumerate([[1, 2], [3, 4], [0, 5], [6, 7]]):
        numbers, found = take(built, step)
        assert numbers == expected
        times.append(built.engine.now)
        rows.append(found)
    assert times == [2, 3, 9, 9]
    named = lambda name: [found.metrics.get(f"oversample/{name}") for found in rows]
    assert named("carried") == [4, 4, 4, 0]
    assert named("carried_tokens") == [2 * (2 + 2), 2 * (3 + 1), 2 * (4 + 1), 0]  # of 0 3, 0 5, 6 7
    assert named("length_ratio") == [1.0, 1 / 2, None, None]  # 3 and 1 tokens, of which 1 began in the step
    assert [found.metrics["epoch"] for found in rows] == [2, 4, 6, 8]
    assert built.cursor == 8 and not built.used and not built.started


def test_each_token_of_a_carried_response_keeps_its_log_prob_and_version():
    built = source(LENGTHS)
    for step in range(3):
        _, found = take(built, step)
    carried = found.trajectories[0]
    assert carried.versions.tolist() == [0, 0, 1, *[2] * 6]  # steps 0, 1 and 2 ended at times 2, 3 and 9
    assert carried.logprobs.tolist() == [-1.0 * time for time in range(1, 10)]
    assert found.metrics["staleness/max"] == 2


@pytest.mark.parametrize(("oversample", "k"), [(1.25, 1), (1.5, 1), (2.0, 1), (1.5, 3), (2.0, 4)])
@pytest.mark.parametrize("algo", [grpo.Config(), dapo.Config(max_draws=3), remax.Config()])
def test_each_prompt_is_trained_once_within_the_bound(oversample, k, algo):
    lengths = np.random.default_rng(1).lognormal(2.0, 1.0, 400).astype(int) + 1
    built = source(lengths, algo, prompts=5, oversample=oversample, max_staleness=k, steps=20)
    seen, age = Counter(), 0
    for step in range(20):
        _, found = take(built, step)
        age = max(age, found.metrics["staleness/max"])
        seen.update(p.index for p in found.prompts)
        open_groups = built.cursor + len(built.used) + len(built.started)
        assert len(built.started) <= -(-oversample * 5 // 1) - 5 and age <= k
        assert sorted([*seen, *built.started]) == list(range(open_groups))  # none is skipped
    assert set(seen.values()) == {1}
    if built._requires.draws == 1:
        assert sorted(seen) == list(range(100)) and age == k


def test_a_run_that_is_killed_goes_on_with_every_group_in_progress():
    """Of 0 and 3, four tokens are in the checkpoint; the rest is generated after it."""
    killed, taken = source(LENGTHS), []
    taken += take(killed, 0)[0]
    files = killed.snapshot()
    assert json.loads(files[CURSOR_FILE]) == {"draw": 0, "used": [1, 2], "steps": {"0": 0, "3": 0}}
    take(killed, 1)  # lost
    resumed = source(LENGTHS)
    resumed.resume(files, 1, {}, 1)
    assert {n: (d.step, len(d.pending[0].responses[0].ids)) for n, d in resumed.started.items()} == {
        0: (0, 2), 3: (0, 2),
    }  # fmt: skip
    for step in (1, 2, 3):
        numbers, found = take(resumed, step)
        taken += numbers
        if step == 2:
            assert found.trajectories[0].versions[:3].tolist() == [0, 0, 1]
    assert sorted(taken) == list(range(8)) and taken[2:] == [3, 4, 0, 5, 6, 7]


def test_responses_of_a_checkpoint_that_are_too_old_or_lost_begin_anew():
    built = source(LENGTHS)
    take(built, 0)
    take(built, 1)
    files = built.snapshot()
    assert set(json.loads(files[CURSOR_FILE])["steps"]) == {"0", "5"}
    for lost, fields, left in (
        ((), {}, [0, 5]),
        ((), {"max_staleness": 1}, [5]),
        ((PARTIAL_FILE,), {}, []),
    ):
        resumed = source(LENGTHS, **fields)
        resumed.resume({name: data for name, data in files.items() if name not in lost}, 2, {}, 2)
        assert list(resumed.started) == left
        rest = [n for step in (2, 3) for n in take(resumed, step)[0]]
        assert sorted(rest) == [0, 5, 6, 7]


def test_a_step_that_an_outage_ends_leaves_all_of_its_groups_to_the_next_run():
    built = source(LENGTHS)
    take(built, 0)
    built.engine.fails = True
    with pytest.raises(ServerError):
        take(built, 1)
    resumed = source(LENGTHS)
    resumed.resume(built.snapshot(), 1, {}, 1)
    assert sorted(resumed.started) == [0, 3, 4, 5]
    assert sorted(n for step in (1, 2, 3) for n in take(resumed, step)[0]) == [0, 3, 4, 5, 6, 7]


def test_short_groups_come_first_and_over_the_run_none_is_preferred():
    """2,000 groups, lengths with a long tail. The first step prefers short ones; once as many are carried in
    as out, steps have the lengths of the data. New groups are shorter, and long ones are older."""
    lengths = np.random.default_rng(0).lognormal(4.0, 1.0, 2000).astype(int) + 1
    built = source(lengths, prompts=20, oversample=1.5, max_staleness=4)
    steps = [take(built, step) for step in range(100)]
    means = [lengths[numbers].mean() for numbers, _ in steps]
    assert means[0] < 0.6 * lengths.mean()
    assert np.mean(means[10:90]) == pytest.approx(lengths.mean(), rel=0.05)
    assert np.mean(means) == pytest.approx(lengths.mean())  # each group once
    ratios = [found.metrics["oversample/length_ratio"] for _, found in steps[:-1]]
    assert 0.3 < np.mean(ratios[10:]) < 0.8
    responses = [t for _, found in steps for t in found.trajectories]
    ages = np.array([t.versions.max() - t.versions.min() for t in responses])
    long = np.array([len(t.response_ids) for t in responses]) > np.quantile(lengths, 0.9)
    assert ages[long].mean() > 1 and ages[~long].mean() < 0.5


@pytest.mark.parametrize(
    "fields", [{"engine": "native"}, {"engine": "sglang", "launch": 1}], ids=["native", "synchronous"]
)
def test_over_sampling_needs_servers_and_a_bound(fields):
    (problem,) = RolloutConfig(oversample=1.5, **fields).problems()
    assert problem[0] == "oversample" and "--rollout.max_staleness" in problem[1]
    assert not list(RolloutConfig(oversample=1.5, engine="sglang", launch=1, max_staleness=1).problems())
