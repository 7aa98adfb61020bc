"""Experience of the policy itself: prompts -> rollouts, of now or begun before -> rewards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.data.loader import Loader, Prompt
from jaxrl_llm.data.packing import from_trajectory
from jaxrl_llm.envs.load import Conversations
from jaxrl_llm.experience.reward_models import RewardModel, add_scores
from jaxrl_llm.experience.source import (
    Experience,
    Phase,
    groups,
    judge,
    start,
    statistics,
    varied,
)
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rollout.engine import Engine, PartialResponse, Pending, SamplingConfig
from jaxrl_llm.rollout.partial import pack, unpack
from jaxrl_llm.structs import Metrics, Params, Trajectory


@dataclass
class Drawn:
    """Prompts, and the responses to them that are being written."""

    prompts: list[Prompt]
    pending: list[Pending]  # the sampled ones; then, where they are wanted, the greedy ones


@dataclass
class RolloutSource:
    """Prompts -> rollouts by the current policy -> rewards.

    With `max_staleness` k the responses to the prompts of the next k steps are being written while the
    trainer learns. A step's prompts are those of the synchronous run, whatever is finished first: nothing
    favours short responses, and no token is older than k steps.
    """

    loader: Loader
    engine: Engine
    rewards: RewardPool
    algo: AlgoConfig
    sampling: SamplingConfig
    key: jax.Array
    prompts: int
    responses: int
    max_tokens: int
    judges: Sequence[RewardModel] = ()
    weight_noise: float = 0.0
    env: Conversations | None = None  # answers the policy, where it writes several turns
    max_staleness: int = 0  # steps
    steps: int = 0  # of the run; nothing is begun for later ones
    ahead: dict[int, Drawn] = field(default_factory=dict)  # draw -> what has been begun
    ended: float = 0.0  # when the last step's experience was there, seconds

    def next(self, step: int, params: Params, version: int, phase: Phase) -> Experience:
        began = time.perf_counter()
        with phase("rollout"):
            if self.weight_noise:
                params = perturbed(params, jax.random.fold_in(self.key, step), self.weight_noise)
            metrics = dict(self.engine.publish(params, version))
            for later in range(step, min(step + self.max_staleness + 1, self.steps)):
                self._begin(later * self.algo.draws)
        prompts: list[Prompt] = []
        kept: list[Trajectory] = []
        draws, full = self.algo.draws, self.prompts * self.responses
        for draw in range(step * draws, (step + 1) * draws):
            self._begin(draw)
            more = self.ahead.pop(draw)
            drawn = self._finish(more, len(prompts), metrics, phase)
            prompts += more.prompts
            kept += drawn if draws == 1 else [t for group in groups(drawn) if varied(group) for t in group]
            if len(kept) >= full:
                break
        with phase("rollout"):
            self.engine.rest()
        if draws > 1:
            metrics["dynamic/draws"] = len(prompts) / self.prompts
            metrics["dynamic/kept_fraction"] = len(kept) / (len(prompts) * self.responses)
        kept = kept[:full] or drawn  # where no group differs there is nothing to learn, and nothing breaks
        metrics |= statistics(kept) | staleness(kept, version) | self.engine.usage()
        now, since = time.perf_counter(), self.ended or began
        metrics["trainer/idle_fraction"] = metrics["rollout/wait_seconds"] / (now - since)
        self.ended = now
        items = [from_trajectory(t) for t in kept]
        if self.algo.teachers:
            for item, t in zip(items, kept, strict=True):
                item.signals["labels"] = np.full(len(item.tokens), prompts[t.prompt_index].example.teacher)
        return Experience(items, metrics, sum(t.num_tokens for t in kept), prompts, kept)

    def snapshot(self) -> bytes:
        """What has been written for later steps. A collective; the bytes are process 0's."""
        pending = [one for drawn in self.ahead.values() for one in drawn.pending]
        if not pending:
            return b""
        written = iter(self.engine.snapshot(pending))
        return pack({draw: [next(written) for _ in drawn.pending] for draw, drawn in self.ahead.items()})

    def resume(self, saved: bytes, params: Params, version: int) -> None:
        """Go on with what a checkpoint had, as far as it is what this run wants."""
        self.engine.publish(params, version)
        for draw, written in unpack(saved).items():
            if self.max_staleness and len(written[0]) == self.prompts * self.responses:
                self._begin(draw, written)

    def _begin(self, draw: int, written: Sequence[Sequence[PartialResponse]] = ((), ())) -> None:
        """Have the responses to a batch of prompts written, if they are not yet."""
        if draw in self.ahead:
            return
        prompts, key = self.loader.batch(draw, self.prompts), jax.random.fold_in(self.key, draw)
        wanted = [(self.responses, self.sampling)]
        if self.algo.needs_greedy:
            wanted.append((1, replace(self.sampling, temperature=0.0)))
        pending = [
            start(self.engine, prompts, n, self.max_tokens, sampling, key, self.env, before)
            for (n, sampling), before in zip(wanted, written, strict=False)
        ]
        self.ahead[draw] = Drawn(prompts, pending)

    def _finish(self, drawn: Drawn, first_index: int, metrics: Metrics, phase: Phase) -> list[Trajectory]:
        """Scored responses to these prompts, which are numbered from `first_index`."""
        began = time.perf_counter()
        with phase("rollout"):
            sampled, *greedy = [one.result() for one in drawn.pending]
        waited = time.perf_counter() - began
        metrics["rollout/wait_seconds"] = metrics.get("rollout/wait_seconds", 0.0) + waited
        with phase("reward"):
            everything = [*sampled, *(t for one in greedy for t in one)]
            metrics |= judge(self.rewards, drawn.prompts, everything)
            examples = [drawn.prompts[t.prompt_index].example for t in everything]
            add_scores(self.judges, everything, examples)
        for trajectory in sampled:
            if greedy:
                trajectory.greedy_reward = greedy[0][trajectory.prompt_index].reward
            trajectory.prompt_index += first_index
        return sampled


def staleness(trajectories: Sequence[Trajectory], version: int) -> Metrics:
    """How many optimizer updates older than the policy the weights were that wrote each token."""
    ages = version - np.concatenate([t.versions[t.mask > 0] for t in trajectories])
    return {"staleness/mean": ages.mean(), "staleness/max": ages.max()} if len(ages) else {}


@jax.jit
def perturbed(params: Params, key: jax.Array, scale: float) -> Params:
    """Weights times 1 + scale times a standard normal number each."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    noisy = [
        w * (1 + scale * jax.random.normal(k, w.shape, w.dtype)) for w, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, noisy)
