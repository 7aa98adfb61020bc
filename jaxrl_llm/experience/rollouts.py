"""Experience from the policy: prompts -> responses, of this step or started earlier -> rewards."""

from __future__ import annotations

import functools
import itertools
import json
import math
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
from jaxrl_llm.experience.draws import Draw, choose_finished, join_draws
from jaxrl_llm.experience.metrics import group_by_prompt, has_variance, staleness, statistics
from jaxrl_llm.experience.rewards import Rewarder
from jaxrl_llm.learn.stage import Experience, Timer
from jaxrl_llm.models.params import perturbed
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import Engine, GenerationCall, PartialResponse, Pending
from jaxrl_llm.rollout.keys import weight_noise_key
from jaxrl_llm.rollout.partial import pack_responses, unpack_responses
from jaxrl_llm.structs import Metrics, Outcome, Params, Trajectory

PARTIAL_FILE = "rollouts.npz"  # in a checkpoint: responses of later draws, finished or not
CURSOR_FILE = "cursor.json"  # in a checkpoint: the next draw


@dataclass
class RolloutSource:
    """Prompts -> responses of the current policy -> rewards.

    Batches of prompts ("draws") are numbered and used in that order, one a step, or more under dynamic
    sampling. With `max_staleness` k the engine generates the responses of the next k draws while the trainer
    learns (asynchronous rollout). Prompts and their order equal the synchronous run's, so that short
    responses are not favoured, and no token is older than k steps.

    With `oversample` F above 1 a draw is one prompt. The F * prompts oldest are started, and a step uses the
    first complete ones, each at most k steps after its start; the others go on (docs/asynchronous.md).
    """

    loader: Loader
    engine: Engine
    rewarder: Rewarder
    algo: AlgoConfig
    sampling: SamplingConfig
    key: jax.Array
    prompts: int  # of a step, or with dynamic sampling of a part of it
    responses: int  # to each prompt
    max_tokens: int  # of a response
    weight_noise: float = 0.0
    env: DialogueSource | None = None  # other side of conversations of several turns
    max_staleness: int = 0  # steps
    oversample: float = 1.0  # prompts started for a step / prompts used; 1 = draws are used in order
    steps: int = 0  # of the run; no draw is started for later ones
    cursor: int = 0  # the first draw that no step has used
    used: set[int] = field(default_factory=set)  # later draws that steps have used
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
        if not dynamic and self.oversample == 1:
            self.cursor = step
        with timer("rollout"):
            if self.weight_noise:
                params = perturbed(params, weight_noise_key(self.key, step), self.weight_noise)
            with timer("publish"):
                metrics = dict(self.engine.publish(params, version))
        # Take draws until the step is full.
        taken: dict[int, Draw] = {}
        kept: list[Trajectory] = []
        complete = self.prompts * self.responses
        for _ in range(self._requires.draws):
            trajectories = self._finish(step, taken, params, metrics, timer=timer)
            groups = group_by_prompt(trajectories)
            kept += [t for g in groups if not dynamic or has_variance(g, components) for t in g]
            if len(kept) >= complete:
                break
        with timer("rollout"):
            self.engine.release_memory()
        prompts = [prompt for draw in taken.values() for prompt in draw.prompts]
        if dynamic:
            metrics["dynamic/draws"] = len(prompts) / self.prompts
            metrics["dynamic/kept_fraction"] = len(kept) / (len(prompts) * self.responses)
        # Metrics, and the cursor of the next step.
        kept = kept[:complete]
        metrics |= statistics(kept or trajectories, components)
        metrics |= staleness(kept, version) | self.engine.usage()
        since, self.last_end = self.last_end or begin, time.perf_counter()
        metrics["trainer/idle_fraction"] = metrics["rollout/wait_seconds"] / (self.last_end - since)
        self.used.update(taken)  # only now: a step that an outage ends is repeated with all of its draws
        while self.cursor in self.used:
            self.used.remove(self.cursor)
            self.cursor += 1
        self.started = {n: d for n, d in self.started.items() if n >= self.cursor and n not in self.used}
        metrics |= self.loader.epochs((self.cursor + len(self.used)) * self._draw_size)
        return self._experience(kept, trajectories, prompts, metrics)

    def snapshot(self) -> dict[str, bytes]:
        """Return the files of a checkpoint: the cursor, and the responses of later draws. A collective."""
        steps = {n: draw.step for n, draw in self.started.items()}
        position = {"draw": self.cursor, "used": sorted(self.used), "steps": steps}
        files = {CURSOR_FILE: json.dumps(position).encode()}
        pending = [responses for draw in self.started.values() for responses in draw.pending]
        if pending:
            partial = iter(self.engine.snapshot(pending))
            by_draw = {n: [next(partial) for _ in draw.pending] for n, draw in self.started.items()}
            files[PARTIAL_FILE] = pack_responses(by_draw)
        return files

    def resume(self, files: Mapping[str, bytes], step: int, params: Params, version: int) -> None:
        """Continue from the files of a checkpoint; partial responses that this run cannot use are dropped."""
        saved = json.loads(files.get(CURSOR_FILE) or "{}")
        self.cursor = saved.get("draw", step * self._requires.draws)
        self.used, steps = set(saved.get("used", ())), saved.get("steps", {})
        if not files.get(PARTIAL_FILE):
            return
        self.engine.publish(params, version)
        for draw, partial in unpack_responses(files[PARTIAL_FILE]).items():
            since = steps.get(str(draw), step)
            if self._is_usable(draw, partial, version, age=step - since):
                self._start(draw, since, partial)

    def _is_usable(
        self, draw: int, partial: Sequence[Sequence[PartialResponse]], version: int, *, age: int
    ) -> bool:
        """Return whether saved responses of a draw may be continued by this run, whose settings may differ.

        A draw that the last step has left is fewer than `max_staleness` draws ahead. One that a step before
        its end has left, because of an outage, may be further ahead, and has tokens of the newest weights.
        With oversampling the steps since its start count.
        """
        responses = [one for each in partial for one in each]
        newest = all(min(one.versions, default=version) >= version for one in responses)
        furthest = max(self.max_staleness, self._requires.draws - 1) if newest else self.max_staleness - 1
        on_time = draw - self.cursor <= furthest if self.oversample == 1 else age <= self.max_staleness
        return (
            self.max_staleness > 0
            and on_time
            and len(partial[0]) == self._draw_size * self.responses
            and all(len(one.ids) <= self.max_tokens for one in responses)
        )

    @property
    def _draw_size(self) -> int:
        """Return the prompts of a draw."""
        return self.prompts if self.oversample == 1 else 1

    @property
    def _requires(self) -> Requirements:
        return algos.requirements(self.algo)

    def _start(self, number: int, step: int, partial: Sequence[Sequence[PartialResponse]] = ((), ())) -> Draw:
        """Return a draw; starts its responses if `step` is the first to need them, or continues `partial`."""
        if number not in self.started:
            prompts, key = self.loader.batch(number, self._draw_size), jax.random.fold_in(self.key, number)
            samplings = [(self.responses, self.sampling)]
            if self._requires.greedy:
                samplings.append((1, replace(self.sampling, temperature=0.0, kept_sets=False)))
            start = functools.partial(start_responses, self.engine, prompts, key=key, env=self.env)
            pending = [
                start(n, self.max_tokens, sampling=sampling, partial=before)
                for (n, sampling), before in zip(samplings, partial, strict=False)
            ]
            self.started[number] = Draw(prompts, pending, step)
        return self.started[number]

    def _take(self, step: int, taken: Mapping[int, Draw], metrics: Metrics) -> dict[int, Draw]:
        """Return the next draws that a step uses, after `taken`, and start the ones ahead of them."""
        left, ahead = self.steps - step, self.max_staleness + 1
        if self.oversample > 1:
            left, ahead = left * self.prompts, math.ceil(self.oversample * self.prompts)
        count = min(ahead, left) + len(taken) * (self.oversample > 1)
        unused = (n for n in itertools.count(self.cursor) if n not in self.used)
        numbers = [n for n in itertools.islice(unused, max(count, len(taken) + 1)) if n not in taken]
        draws = {n: self._start(n, step) for n in numbers}
        if self.oversample == 1:
            return {numbers[0]: draws[numbers[0]]}
        chosen, carried = choose_finished(
            self.engine, list(draws.values()), self.prompts, step=step, max_staleness=self.max_staleness
        )
        metrics |= carried
        return {numbers[i]: draws[numbers[i]] for i in chosen}

    def _finish(
        self, step: int, taken: dict[int, Draw], params: Params, metrics: Metrics, *, timer: Timer
    ) -> list[Trajectory]:
        """Return the scored responses of the step's next draws, and add the draws to `taken`.

        Their prompts are numbered in the order of `taken`.
        """
        begin, first_index = time.perf_counter(), len(taken) * self._draw_size
        with timer("rollout"):
            draws = self._take(step, taken, metrics)
            taken |= draws
            sampled, *greedy = join_draws(list(draws.values()))
            untrusted = self.engine.check_logprobs(params, sampled)
        metrics["rollout/wait_seconds"] = metrics.get("rollout/wait_seconds", 0) + time.perf_counter() - begin
        with timer("reward"):
            prompts = [prompt for draw in draws.values() for prompt in draw.prompts]
            metrics |= self.rewarder(prompts, [*sampled, *itertools.chain(*greedy)])
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
    """Start `responses` to each prompt, in order; prompt_index is the position in `prompts`.

    Args:
        partial: responses that are continued.
    """
    requests = make_requests(env, prompts, responses, max_tokens)
    dialogue = env and env.dialogue(prompts, key)
    return engine.start(GenerationCall(requests, sampling, key, dialogue, partial))
