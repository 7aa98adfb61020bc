"""Trainer: all models of a stage. The policy and its critic learn, the frozen ones are asked."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import algos, models
from jaxrl_llm.algos.contract import AlgoConfig, old_logprobs
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.structs import Metrics, Params, TrainState


@dataclass
class Trainer:
    """Asks and updates the models of one stage."""

    policy: Learner
    critic: Learner | None = None
    critic_params: Params | None = None  # pretrained weights of the critic; None = the policy's
    critic_warmup: int = 0  # first steps in which the critic alone learns
    teachers: tuple[Params, ...] = ()  # frozen models that are learned from; an item's label says which
    updates_critic: bool = True  # False in a supervised start, which only carries it along
    seen: dict[bytes, np.ndarray] = field(default_factory=dict)  # reference log-probs of a dataset's rows

    def abstract_state(self) -> TrainState:
        """What a checkpoint is restored into."""
        return replace(self.policy.abstract_state(), critic=self.critic and self.critic.abstract_state())

    def init_state(self, params: Params) -> TrainState:
        """Fresh optimizers; the policy's weights are taken over, the critic starts from a copy of them."""
        critic = None
        if self.critic:
            fit = functools.partial(models.with_heads, config=self.critic.model)
            start = self.critic_params or jax.tree.map(jnp.copy, jax.jit(fit)(params))
            critic = self.critic.init_state(jax.device_put(start, self.critic.param_shardings))
        return replace(self.policy.init_state(params), critic=critic)

    def score(
        self, state: TrainState, items: Sequence[PackItem], updates: int, reference: Params | None
    ) -> None:
        """Write into the items' signals what the algorithm asks of the models before the first update.

        Args:
            updates: that this step will make; with several, the old log-probs are not the policy's own.
            reference: weights of the frozen reference; None where the algorithm needs none.
        """
        algo = self.policy.algo
        requires = algos.requirements(algo)
        if old_logprobs(algos.of(algo), requires, updates) == "rollout":
            for item in items:
                item.signals["old"] = item.signals["rollout"]
        if wants := scores_before_update(algo, updates):
            self._ask(self.policy, state.params, items, wants)
        if self.critic and self.updates_critic:
            self._ask(self.critic, state.critic.params, items, ("values",))
        if requires.reference and self.teachers:
            self._ask_teachers(items)
        elif reference is not None:
            self._ask_reference(reference, items)

    def update(
        self, state: TrainState, minibatches: Sequence[Sequence[PackItem]], step: int
    ) -> tuple[TrainState, Metrics]:
        """One update of each model for each mini-batch. The state passed in is donated."""
        metrics: Metrics = {}
        if not minibatches:  # nothing was selected
            return state, metrics
        policy, critic = replace(state, critic=None), state.critic
        if self.critic and self.updates_critic:
            critic, found = self.critic.update(critic, minibatches)
            metrics |= {f"critic/{name}": value for name, value in found.items()}
        if not self.critic or step >= self.critic_warmup:
            policy, found = self.policy.update(policy, minibatches, self.teachers)
            metrics |= found
        return replace(policy, critic=critic), metrics

    def measure(self, state: TrainState, items: Sequence[PackItem], reference: Params | None) -> Metrics:
        """Loss and metrics on held-out items."""
        self.score(state, items, 1, reference)
        return self.policy.measure(state, items, self.teachers)

    def _ask(
        self, learner: Learner, params: Params, items: Sequence[PackItem], wants: tuple[str, ...]
    ) -> None:
        for item, found in zip(items, learner.score(params, items, wants), strict=True):
            item.signals |= {"old" if name == "policy" else name: array for name, array in found.items()}

    def _ask_teachers(self, items: Sequence[PackItem]) -> None:
        """Log-probs of each item under its own teacher, as the reference."""
        for index, teacher in enumerate(self.teachers):
            mine = [i for i, item in enumerate(items) if round(float(item.signals["labels"][0])) == index]
            answers = self.policy.score(teacher, [items[i] for i in mine]) if mine else []
            for i, found in zip(mine, answers, strict=True):
                items[i].signals["reference"] = found["policy"]

    def _ask_reference(self, reference: Params, items: Sequence[PackItem]) -> None:
        """Rows of a dataset come again every epoch, and the reference says the same of them: asked once."""
        keys = [item.tokens.tobytes() for item in items]
        fixed = not algos.of(self.policy.algo).on_rollouts
        new = [i for i, key in enumerate(keys) if not (fixed and key in self.seen)]
        new = complete_groups(new, self.policy.group_size)
        answers = self.policy.score(reference, [items[i] for i in new]) if new else []
        said = {i: found["policy"] for i, found in zip(new, answers, strict=True)}
        if fixed:
            self.seen |= {keys[i]: answer for i, answer in said.items()}
        for i, item in enumerate(items):
            item.signals["reference"] = said[i] if i in said else self.seen[keys[i]]


def scores_before_update(algo: AlgoConfig, updates: int) -> tuple[str, ...]:
    """Return the outputs of the policy that are computed before the first of so many updates."""
    requires = algos.requirements(algo)
    recompute = old_logprobs(algos.of(algo), requires, updates) == "recompute"
    return (
        ("policy",) * recompute
        + ("sum_pi_squared",) * requires.sum_pi_squared
        + ("values",) * requires.values
    )


def complete_groups(indices: Sequence[int], group_size: int) -> list[int]:
    """Return all members of the groups that these belong to."""
    groups = sorted({index // group_size for index in indices})
    return [group_size * group + i for group in groups for i in range(group_size)]
