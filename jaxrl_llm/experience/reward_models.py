"""Reward models that score rollouts in this run's own memory: outcome, process and generative ones, mixed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import models
from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.data.judge import ask_one
from jaxrl_llm.data.packing import PackItem, pack, unpack
from jaxrl_llm.data.rows import Example
from jaxrl_llm.data.template import ChatConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.folder import resolve
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.tokenizer import load_tokenizer
from jaxrl_llm.learn.update import StepConfig, outputs
from jaxrl_llm.rewards.sample import RewardModelConfig
from jaxrl_llm.rewards.verdict import probability
from jaxrl_llm.sharding.rules import TRAIN, put_rows
from jaxrl_llm.structs import Params, Trajectory

ROOM = 128
"""Tokens of a row beyond the longest trajectory: for the judge's question, and the token after the last."""


@dataclass
class RewardModel:
    """One frozen reward model."""

    config: RewardModelConfig
    params: Params
    step: StepConfig
    mesh: Mesh
    tokenizer: Any
    translate: bool  # its tokenizer is not the policy's: it reads the text anew

    def __call__(self, trajectories: Sequence[Trajectory], prompts: Sequence[str]) -> list[np.ndarray]:
        """Scores of each trajectory's response tokens, float32 [R']: 0 but where the model judges.

        Args:
            prompts: the prompt of each trajectory as text, for a model that reads it anew.
        """
        if self.config.kind == "generative":
            return self._verdicts(trajectories, prompts)
        items = [self._item(t, p) for t, p in zip(trajectories, prompts, strict=True)]
        values = [row[1:] for row in self._outputs(items, "values")]  # after each token
        return [self._place(t, v) for t, v in zip(trajectories, values, strict=True)]

    def _item(self, trajectory: Trajectory, prompt: str) -> PackItem:
        """The trajectory and one token more, so that place t of the values is the state after token t - 1."""
        ids = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
        if self.translate:
            ids = self.tokenizer.encode(prompt + trajectory.text, add_special_tokens=False)
        return self._made([*ids, 0])

    def _made(self, ids: Sequence[int]) -> PackItem:
        """What is too long loses its beginning."""
        ids = np.asarray(ids[-self.step.row_tokens :], np.int32)
        return PackItem(ids, np.ones(len(ids), np.float32))

    def _verdicts(self, trajectories: Sequence[Trajectory], prompts: Sequence[str]) -> list[np.ndarray]:
        """Probability of Yes against No that the response is right, at its last token (arXiv 2408.15240)."""
        words = [self.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("Yes", "No")]
        items = []
        for trajectory, prompt in zip(trajectories, prompts, strict=True):
            message = {"role": "user", "content": ask_one(prompt, trajectory.text)}
            ids = encode_prompt(self.tokenizer, Example((message,), None), ChatConfig())
            items += [self._made([*ids, word]) for word in words]
        logprobs = [row[-1] for row in self._outputs(items, "policy")]
        scores = [np.zeros(len(t.response_ids), np.float32) for t in trajectories]
        for row, yes, no in zip(scores, logprobs[::2], logprobs[1::2], strict=True):
            row[-1] = (probability({"Yes": yes, "No": no}) - self.config.mean) / self.config.scale
        return scores

    def _outputs(self, items: Sequence[PackItem], name: str) -> list[np.ndarray]:
        """One of `step.outputs` for each item."""
        with jax.set_mesh(self.mesh):
            batches = pack(items, self.step.row_tokens, self.step.rows)
            found = [
                np.asarray(_run(self.params, put_rows(self.mesh, batch), self.step, name))
                for batch in batches
            ]
        return unpack(found, items, self.step.row_tokens)

    def _place(self, trajectory: Trajectory, values: np.ndarray) -> np.ndarray:
        scores = np.zeros(len(trajectory.response_ids), np.float32)
        values = (values - self.config.mean) / self.config.scale
        if self.config.kind == "outcome":
            scores[-1] = values[-1]
            return scores
        ids = trajectory.response_ids
        ends = [i for i, token in enumerate(ids) if "\n" in self.tokenizer.decode([token])]
        last = max(len(ids) - 1 - int(ids[-1] == self.tokenizer.eos_token_id), 0)  # the end token is no step
        ends = sorted({*ends, last})
        scores[ends] = values[len(trajectory.prompt_ids) :][ends]
        return scores


@functools.partial(jax.jit, static_argnames=("step", "name"))
def _run(params: Params, batch, step: StepConfig, name: str) -> jax.Array:
    return outputs(params, batch, step, (name,))[name]


def load_reward_model(
    config: RewardModelConfig, step: StepConfig, mesh: Mesh, policy_tokenizer: Any
) -> RewardModel:
    """The model of a folder, in the compute type, sharded over the mesh.

    Raises:
        ValueError: no such folder, no value head in it, or a process model that reads other tokens.
    """
    folder: Path = resolve(config.path)
    model = read_config(folder)
    if model.value_head == (config.kind == "generative"):
        raise UserError(
            f"--reward.models {config.path}: a language model without a score head; train one with "
            "--algo reward_model, or give a ...ForSequenceClassification folder with one label."
            if config.kind != "generative"
            else f"--reward.models {config.path}: a score head cannot say Yes or No; kind generative wants a "
            "language model."
        )
    tokenizer = load_tokenizer(folder)
    translate = tokenizer.get_vocab() != policy_tokenizer.get_vocab()
    if translate and config.kind == "process":
        raise UserError(
            f"--reward.models {config.path}: a process reward model judges the policy's own tokens, but its "
            "tokenizer is another; use one with the policy's tokenizer, or kind outcome."
        )
    shardings = models.shardings(model, mesh, TRAIN)
    params = load_params(folder, model, shardings, jnp.dtype(step.dtype))
    step = replace(step, row_tokens=step.row_tokens + ROOM, temperature=1.0)
    return RewardModel(config, params, step, mesh, tokenizer, translate)


def add_scores(
    judges: Sequence[RewardModel], trajectories: Sequence[Trajectory], prompts: Sequence[str]
) -> None:
    """Add each model's weighted scores to the trajectories' rewards and components.

    A process model's scores go to its steps (`token_rewards`), an outcome model's to the response's reward.
    """
    for judge in judges:
        for trajectory, scores in zip(trajectories, judge(trajectories, prompts), strict=True):
            weighted = judge.config.weight * scores
            trajectory.components = (*trajectory.components, float(scores.sum()))
            if judge.config.kind != "process":
                trajectory.reward += float(weighted[-1])
            else:
                before = trajectory.token_rewards
                trajectory.token_rewards = weighted if before is None else before + weighted
