"""Experience from the policy: prompts -> responses, of this step or started earlier -> rewards."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from jaxrl_llm import algos
from jaxrl_llm.algos.config import AlgoConfig
from jaxrl_llm.algos.contract import Requirements
from jaxrl_llm.data.loader import Loader, Prompt
from jaxrl_llm.data.packing import from_trajectory
from jaxrl_llm.envs.load import DialogueSource, make_requests
from jaxrl_llm.experience.metrics import group_by_prompt, has_variance, staleness, statistics
from jaxrl_llm.experience.rewards import Rewarder
from jaxrl_llm.learn.stage import Experience, Timer
from jaxrl_llm.models.params import perturbed
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import Engine, PartialResponse, Pending
from jaxrl_llm.rollout.keys import weight_noise_key
from jaxrl_llm.rollout.partial import pack_responses, unpack_responses
from jaxrl_llm.structs import Metrics, Outcome, Params, Trajectory

PARTIAL_FILE = "rollouts.npz"  # in a checkpoint: responses of later draws, finished or not
CURSOR_FILE = "cursor.json"  # in a checkpoint: the next draw


@dataclass
class Draw:
    """A batch of prompts whose responses have been started."""

    prompts: list[Prompt]
    pending: list[Pending]  # the sampled responses; then, for ReMax, the greedy ones


@dataclass
class RolloutSource:
    """Prompts -> responses of the current policy -> rewards.

    Batches of prompts ("draws") are numbered and used in that order, one a step, or more under dynamic
    sampling. With `max_staleness` k the engine generates the responses of the next k draws while the trainer
    learns (asynchronous rollout). Prompts and their order equal the synchronous run's, so that short
    responses are not favoured, and no token is older than k steps.
    """

    loader: Loader
    engine: Engine
    rewarder: Rewarder
    algo: AlgoConfig
    sampling: SamplingConfig
    key: jax.Array
    prompts: int  # of a draw
    responses: int  # to each prompt
    max_tokens: int  # of a response
    weight_noise: float = 0.0
    env: DialogueSource | None = None  # other side of conversations of several turns
    max_staleness: int = 0  # steps
    steps: int = 0  # of the run; no draw is started for later ones
    cursor: int = 0  # the next draw
    started: dict[int, Draw] = field(default_factory=dict)
    last_end: float = 0.0  # when the last step's experience was complete, seconds

    def next(self, step: int, params: Params, version: int, timer: Timer) -> Experience:
        """Return the experience of a step.

        Under dynamic sampling draws are added until the step has enough groups whose rewards differ, or
        `max_draws` are used; a step without any such group has no items. An error in any draw leaves the
        cursor at the step's first one.
        """
        begin, dynamic = time.perf_counter(), self._requires.draws > 1
        components = self._requires.components
        if not dynamic:
            self.cursor = step
        with timer("rollout"):
            if self.weight_noise:
                params = perturbed(params, weight_noise_key(self.key, step), self.weight_noise)
            with timer("publish"):
                metrics = dict(self.engine.publish(params, version))
            for ahead in range(min(self.max_staleness + 1, self.steps - step)):
                self._start(self.cursor + ahead)
        # Take draws until the step is full.
        prompts: list[Prompt] = []
        kept: list[Trajectory] = []
        complete = self.prompts * self.responses
        for number in range(self.cursor, self.cursor + self._requires.draws):
            draw = self._start(number)
            trajectories = self._finish(draw, len(prompts), params, metrics, timer=timer)
            prompts += draw.prompts
            groups = group_by_prompt(trajectories)
            kept += [t for g in groups if not dynamic or has_variance(g, components) for t in g]
            if len(kept) >= complete:
                break
        with timer("rollout"):
            self.engine.release_memory()
        if dynamic:
            metrics["dynamic/draws"] = len(prompts) / self.prompts
            metrics["dynamic/kept_fraction"] = len(kept) / (len(prompts) * self.responses)
        # Metrics, and the cursor of the next step.
        kept = kept[:complete]
        metrics |= statistics(kept or trajectories, components)
        metrics |= staleness(kept, version) | self.engine.usage()
        since, self.last_end = self.last_end or begin, time.perf_counter()
        metrics["trainer/idle_fraction"] = metrics["rollout/wait_seconds"] / (self.last_end - since)
        self.cursor = number + 1  # only now: a step that an outage ends is repeated with all of its draws
        self.started = {n: draw for n, draw in self.started.items() if n >= self.cursor}
        metrics |= self.loader.epochs(self.cursor * self.prompts)
        return self._experience(kept, trajectories, prompts, metrics)

    def snapshot(self) -> dict[str, bytes]:
        """Return the files of a checkpoint: the cursor, and the responses of later draws. A collective."""
        files = {CURSOR_FILE: json.dumps({"draw": self.cursor}).encode()}
        pending = [responses for draw in self.started.values() for responses in draw.pending]
        if pending:
            partial = iter(self.engine.snapshot(pending))
            by_draw = {n: [next(partial) for _ in draw.pending] for n, draw in self.started.items()}
            files[PARTIAL_FILE] = pack_responses(by_draw)
        return files

    def resume(self, files: Mapping[str, bytes], step: int, params: Params, version: int) -> None:
        """Continue from the files of a checkpoint; partial responses that this run cannot use are dropped."""
        saved = files.get(CURSOR_FILE)
        self.cursor = json.loads(saved)["draw"] if saved else step * self._requires.draws
        if not files.get(PARTIAL_FILE):
            return
        self.engine.publish(params, version)
        for draw, partial in unpack_responses(files[PARTIAL_FILE]).items():
            if self._is_usable(draw, partial, version):
                self._start(draw, partial)

    def _is_usable(self, draw: int, partial: Sequence[Sequence[PartialResponse]], version: int) -> bool:
        """Return whether saved responses of a draw may be continued by this run, whose settings may differ.

        A draw that the last step has left is fewer than `max_staleness` draws ahead. One that a step before
        its end has left, because of an outage, may be further ahead, and has tokens of the newest weights.
        """
        responses = [one for each in partial for one in each]
        newest = all(min(one.versions, default=version) >= version for one in responses)
        furthest = max(self.max_staleness, self._requires.draws - 1) if newest else self.max_staleness - 1
        return (
            self.max_staleness > 0
            and draw - self.cursor <= furthest
            and len(partial[0]) == self.prompts * self.responses
            and all(len(one.ids) <= self.max_tokens for one in responses)
        )

    @property
    def _requires(self) -> Requirements:
        return algos.requirements(self.algo)

    def _start(self, number: int, partial: Sequence[Sequence[PartialResponse]] = ((), ())) -> Draw:
        """Return a draw, its responses started if they are not yet; `partial` ones are continued."""
        if number not in self.started:
            prompts, key = self.loader.batch(number, self.prompts), jax.random.fold_in(self.key, number)
            samplings = [(self.responses, self.sampling)]
            if self._requires.greedy:
                samplings.append((1, replace(self.sampling, temperature=0.0, kept_sets=False)))
            start = functools.partial(start_responses, self.engine, prompts, key=key, env=self.env)
            pending = [
                start(n, self.max_tokens, sampling=sampling, partial=before)
                for (n, sampling), before in zip(samplings, partial, strict=False)
            ]
            self.started[number] = Draw(prompts, pending)
        return self.started[number]

    def _finish(
        self, draw: Draw, first_index: int, params: Params, metrics: Metrics, *, timer: Timer
    ) -> list[Trajectory]:
        """Return the scored responses of a draw, their prompts numbered from `first_index`."""
        begin = time.perf_counter()
        with timer("rollout"):
            sampled, *greedy = [responses.result() for responses in draw.pending]
            untrusted = self.engine.check_logprobs(params, sampled)
        metrics["rollout/wait_seconds"] = metrics.get("rollout/wait_seconds", 0) + time.perf_counter() - begin
        with timer("reward"):
            metrics |= self.rewarder(draw.prompts, [*sampled, *itertools.chain(*greedy)])
        for i in untrusted:  # masked, as a failed reward is
            sampled[i].reward, sampled[i].outcome = float("nan"), Outcome.FAILED
        for trajectory in sampled:
            if greedy:
                baseline = greedy[0][trajectory.prompt_index]
                trajectory.greedy_reward, trajectory.greedy_process = baseline.reward, baseline.process_reward
            trajectory.prompt_index += first_index
        return sampled

    def _experience(
        self, kept: list[Trajectory], last: list[Trajectory], prompts: list[Prompt], metrics: Metrics
    ) -> Experience:
        """Return the kept trajectories as items; logs show `last` if none was kept."""
        items = [from_trajectory(t) for t in kept]
        if self._requires.teachers:
            for item, t in zip(items, kept, strict=True):
                teacher = prompts[t.prompt_index].example.teacher
                item.signals["labels"] = np.full(len(item.tokens), teacher, np.float32)
        return Experience(items, metrics, sum(t.num_tokens for t in kept), prompts, kept or last)


def generate_responses(
    engine: Engine,
    prompts: Sequence[Prompt],
    responses: int,
    max_tokens: int,
    *,
    sampling: SamplingConfig,
    key: jax.Array,
    env: DialogueSource | None = None,
) -> list[Trajectory]:
    """Return `responses` to each prompt, in order; prompt_index is the position in `prompts`."""
    settings = {"sampling": sampling, "key": key, "env": env}
    return start_responses(engine, prompts, responses, max_tokens, **settings).result()


def start_responses(
    engine: Engine,
    prompts: Sequence[Prompt],
    responses: int,
    max_tokens: int,
    *,
    sampling: SamplingConfig,
    key: jax.Array,
    env: DialogueSource | None = None,
    partial: Sequence[PartialResponse] = (),
) -> Pending:
    """Start `responses` to each prompt; `partial` ones, if any, are continued."""
    requests = make_requests(env, prompts, responses, max_tokens)
    return engine.start(requests, sampling, key, env and env.dialogue(prompts, key), partial=partial)
