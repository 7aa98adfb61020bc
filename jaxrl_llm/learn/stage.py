"""Stage: consecutive steps of a run under one algorithm, and all models that take part in them.

A step is `prepare` (score the experience with every model that the algorithm reads, assign advantages, split
into mini-batches), then `update` (one optimizer update of critic and policy for each mini-batch).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxrl_llm import algos, models
from jaxrl_llm.algos.contract import Requirements
from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.learn import credit
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.moe_losses import ROUTES
from jaxrl_llm.learn.reference import LogprobCache, PlacedTeachers, Teachers, start_reference, start_teachers
from jaxrl_llm.learn.scoring import Scorer, policy_scores
from jaxrl_llm.models import lora
from jaxrl_llm.sharding.placement import reshard
from jaxrl_llm.structs import Metrics, Params, TrainState, Trajectory

Timer = Callable[[str], contextlib.AbstractContextManager]
"""`with timer("rollout"):` adds the time inside to a phase of the step."""


@dataclass
class Experience:
    """Sequences that one step learns from."""

    items: list[PackItem]
    metrics: Metrics
    tokens: int  # prompt and response tokens, for throughput
    prompts: list[Prompt] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)  # one an item; [] = examples of a dataset


class Source(Protocol):
    """Experience as a pure function of (seed, step, weights); see `experience/`."""

    def next(self, step: int, params: Params, version: int, timer: Timer) -> Experience:
        """Return the experience of step 0, 1, ... of a stage."""

    def snapshot(self) -> dict[str, bytes]:
        """Return the files, by name, that a checkpoint needs besides the state. A collective."""

    def resume(self, files: Mapping[str, bytes], step: int, params: Params, version: int) -> None:
        """Continue at a step from the files of its checkpoint."""


@dataclass
class Stage:
    """Steps [start, start + steps) of a run: the SFT warm-up, or the run itself.

    Frozen teachers replace the reference. A critic that is not updated (`updates_critic` False, in the
    warm-up) is part of the state all the same, so that the states of all stages have the same shapes.
    """

    policy: Learner
    name: str = "train"  # or "warm_start"
    start: int = 0
    steps: int = 0
    source: Source | None = None
    minibatches: int = 1  # of a step, each an update
    epochs: int = 1  # passes over them (`ppo_epochs`)
    whole_prompts: bool = False  # all responses to a prompt are in one of them
    critic: Learner | None = None
    critic_params: Callable[[], Params] | None = None  # loads its own weights; None = the policy's
    critic_warmup: int = 0  # first steps in which the critic alone is updated
    teachers: tuple[Params, ...] = ()  # an item's label is the index of its teacher
    reference_model: Scorer | None = None  # on a separate mesh; None = the policy's
    teacher_model: Scorer | None = None  # the same for all teachers
    updates_critic: bool = True
    reference_cache: LogprobCache = field(default_factory=LogprobCache)

    @property
    def requires(self) -> Requirements:
        return algos.requirements(self.policy.algo)

    @property
    def end(self) -> int:
        return self.start + self.steps

    @property
    def needs_reference(self) -> bool:
        """True if the frozen reference model scores the items."""
        return self.requires.ref_logprobs and not self.teachers

    @functools.cached_property
    def loss_teachers(self) -> Teachers:
        """Teachers that the loss reads, without teachers that are only scored."""
        if self.teacher_model and self.requires.divergence:
            return PlacedTeachers(self.teacher_model, self.teachers, self.policy.mesh)
        return self.teachers if self.requires.divergence else ()

    def abstract_state(self) -> TrainState:
        """Return shapes, types and shardings of the state, to restore a checkpoint into."""
        return replace(self.policy.abstract_state(), critic=self.critic and self.critic.abstract_state())

    def init_state(self, params: Params, critic: TrainState | None = None) -> TrainState:
        """Return a state with fresh optimizers, to which `params` are donated.

        The critic starts from a copy of `params`, or is the previous stage's critic if it has separate
        weights.
        """
        if self.critic and not (critic and self.critic_params):
            fit = jax.jit(functools.partial(models.with_heads, config=self.critic.model))
            start = self.critic_params() if self.critic_params else jax.tree.map(jnp.copy, fit(params))
            critic = self.critic.init_state(reshard(start, self.critic.param_shardings))
        state = self.policy.init_state(params)
        if critic and not self.critic_params:  # one frozen base for both
            critic = replace(critic, params=lora.share_frozen(critic.params, state.params))
        return replace(state, critic=critic)

    def prepare(
        self, state: TrainState, experience: Experience, reference: Params | None, seed: int
    ) -> list[list[PackItem]]:
        """Return the mini-batches of a step: items with advantages, shuffled by `seed`.

        Args:
            reference: weights of the frozen reference; None if the algorithm needs none.
        """
        policy = self.policy
        if not experience.items:  # dynamic sampling found no group to learn from
            return []
        self.score(state, experience.items, reference)
        items = credit.assign_credit(
            policy.algo, experience.items, experience.trajectories, float(state.kl_coef), seed=seed
        )
        return credit.split_minibatches(
            items,
            self.minibatches,
            seed,
            group_size=policy.group_size,
            epochs=self.epochs,
            whole_prompts=self.whole_prompts,
        )

    def update(
        self, state: TrainState, minibatches: Sequence[Sequence[PackItem]], step: int
    ) -> tuple[TrainState, Metrics]:
        """Apply one update of each model for each mini-batch. The state passed in is donated.

        Args:
            step: of the stage, from 0; the policy is not updated during the critic's warm-up.
        """
        metrics: Metrics = {}
        if not minibatches:  # no trajectory was selected
            return state, metrics
        policy, critic = replace(state, critic=None), state.critic
        if self.critic and self.updates_critic:
            critic, values = self.critic.update(critic, minibatches)
            metrics |= {f"critic/{name}": value for name, value in values.items()}
        if not self.critic or step >= self.critic_warmup:
            policy, values = self.policy.update(policy, minibatches, self.loss_teachers)
            metrics |= values
        return replace(policy, critic=critic), metrics

    def measure(self, state: TrainState, items: Sequence[PackItem], reference: Params | None) -> Metrics:
        """Return loss and metrics on held-out items, without an update."""
        self.score(state, items, reference)
        return self.policy.measure(state, items, self.loss_teachers)

    def score(self, state: TrainState, items: Sequence[PackItem], reference: Params | None) -> None:
        """Write the signals that the algorithm requires of the models before the update into the items."""
        if self.policy.config.old_logprobs_source == "rollout":
            for item in items:
                item.signals["old_logprobs"] = item.signals["rollout_logprobs"]
        started = []  # start all, then wait: models on disjoint devices overlap
        if outputs := policy_scores(self.requires, self.policy.config):
            started.append(self._start(self.policy.scorer, state.params, items, outputs))
        if self.critic and self.updates_critic:
            started.append(self._start(self.critic.scorer, state.critic.params, items, ("values",)))
        if self.requires.ref_logprobs and self.teachers:
            started += start_teachers(self.teacher_model or self.policy.scorer, self.teachers, items)
        elif reference is not None:
            cache = None if algos.of(self.policy.algo).on_rollouts else self.reference_cache
            started.append(
                start_reference(self.reference_model or self.policy.scorer, reference, items, cache)
            )
        for write in started:
            write()

    def _start(
        self, model: Scorer, params: Params, items: Sequence[PackItem], names: tuple[str, ...]
    ) -> Callable[[], None]:
        """Start a model, and return the function that waits for its outputs and writes them."""
        pending = model.start(params, items, names, replay=True)

        def write() -> None:
            for item, outputs in zip(items, pending(), strict=True):
                item.routes = outputs.pop(ROUTES, item.routes)
                item.signals |= {
                    "old_logprobs" if name == "logprobs" else name: x for name, x in outputs.items()
                }

        return write
