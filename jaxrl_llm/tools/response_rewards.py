"""Rewards of responses, for commands: a verifier and reward models, each as in training."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.addresses import mask_text
from jaxrl_llm.builders.data import check_answers
from jaxrl_llm.data.chat import encode_supervised
from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.rows import Example
from jaxrl_llm.experience.reward_models import RewardModel, load_reward_model
from jaxrl_llm.experience.rewards import reward_sample
from jaxrl_llm.host.processes import on_first, print_on_first
from jaxrl_llm.learn.scoring import BucketedScorer, bucketed_step
from jaxrl_llm.models.attention import original_length
from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.config import RewardConfig, RewardModelConfig
from jaxrl_llm.rewards.environment import ANSWERED_ROWS
from jaxrl_llm.rewards.gold import has_answer
from jaxrl_llm.rewards.load import choose_reward
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.sample import RewardResult
from jaxrl_llm.sharding.config import ALL_DEVICES, MeshConfig, PlacementConfig, reward_role
from jaxrl_llm.sharding.placement import place
from jaxrl_llm.structs import Trajectory
from jaxrl_llm.tools.selection import RewardedResponse, plain_json


class ResponseRewarder:
    """A verifier and reward models, which `open` starts and loads.

    Args:
        closing: ends the workers of the verifier.
        mesh: of reward models without a separate mesh.
        dtype: of the reward models.
        batch_tokens: of one forward pass, including padding.
        chat: of the prompts.
        policy_tokenizer: of the trajectories that `score` gets; None = only `score_texts` is called.

    Raises:
        UserError: the verifier or a reward model cannot be used.
    """

    def __init__(
        self,
        config: RewardConfig,
        mesh: MeshConfig,
        dtype: str,
        batch_tokens: int,
        *,
        chat: ChatConfig,
        closing: contextlib.ExitStack,
        policy_tokenizer: Any = None,
    ):
        self.config, self.chat, self.batch_tokens = config, chat, batch_tokens
        self.mesh, self.dtype = PlacementConfig(mesh=mesh, devices=ALL_DEVICES), dtype
        self.policy_tokenizer, self.closing = policy_tokenizer, closing
        self.pool, self.models = RewardPool(config), []

    def open(self, examples: Iterable[Example]) -> None:
        """Try the verifier on the first rows of each data source, then load the reward models."""
        first = first_of_each_source(examples)
        samples = [reward_sample(example) for example in first.rows]
        if self.config.name != "none":
            config = choose_reward(self.config, samples, required=True)
            self.pool = self.closing.enter_context(RewardPool(config))
            fix = "They get no reward."
            check_answers(first.unanswered, first.count, self.pool.can_score, fix)
            on_first(lambda: self.pool.check(samples))
        self.models = [self._load(i, model) for i, model in enumerate(self.config.models)]

    def _load(self, i: int, config: RewardModelConfig) -> RewardModel:
        mesh = place(reward_role(i), config, self.mesh, jax.devices())
        step = bucketed_step(self.dtype, share_prefixes=True)
        model = load_reward_model(config, step, mesh, self.policy_tokenizer, chat=self.chat)
        scorer, max_tokens = BucketedScorer(model.scorer.config, mesh, self.batch_tokens), sys.maxsize
        if model.params.config.rope.scaling == "longrope":
            # Texts come later, and one set of frequencies serves them all.
            max_tokens = original_length(model.params.config)
            print_on_first(f"reward model {config.path}: reads the last {max_tokens:,} tokens (longrope)")
        return replace(model, scorer=scorer, max_tokens=max_tokens)

    def score(
        self, examples: Sequence[Example], trajectories: Sequence[Trajectory]
    ) -> list[RewardedResponse]:
        """Return the rewards of generated responses; `examples` are the rows of their prompts."""
        by_model = [self._start(i, examples, trajectories) for i in range(len(self.models))]
        return self._combine(examples, trajectories, by_model)

    def score_texts(self, examples: Sequence[Example], texts: Sequence[str]) -> list[RewardedResponse]:
        """Return the rewards of given responses, each of which a model reads with its own tokenizer."""
        by_model = []
        for i, model in enumerate(self.models):
            read = [given_trajectory(model, e, t, self.chat) for e, t in zip(examples, texts, strict=True)]
            by_model.append(self._start(i, examples, read))
        opened = [True if e.columns.get("opens_thought") is True else None for e in examples]
        plain = [replace(text_trajectory(t), opens_thought=o) for t, o in zip(texts, opened, strict=True)]
        return self._combine(examples, plain, by_model)

    def _start(self, i: int, examples: Sequence[Example], trajectories: Sequence[Trajectory]):
        """Start a reward model, and return the function that waits for (score, columns) of each response."""
        model = self.models[i]
        finish = model.start(trajectories, examples)

        def scores() -> list[tuple[float, dict[str, Any]]]:
            results = []
            for trajectory, by_token in zip(trajectories, finish(), strict=True):
                if model.config.kind == "process":
                    steps = [float(by_token[k]) for k in model.step_ends(trajectory)]
                    results.append((min(steps), {"steps": steps}))
                else:
                    results.append((float(by_token[-1]), {}))
            return results

        return scores

    def _combine(
        self, examples: Sequence[Example], trajectories: Sequence[Trajectory], by_model: Sequence[Any]
    ) -> list[RewardedResponse]:
        """Return total rewards: the verifier's, and each model's score times its weight."""
        samples = [reward_sample(e, t) for e, t in zip(examples, trajectories, strict=True)]
        verified = on_first(lambda: self.pool.score(samples))
        scores = [finish() for finish in by_model]
        return [
            self._rewarded(trajectory, result, [column[n] for column in scores])
            for n, (trajectory, result) in enumerate(zip(trajectories, verified, strict=True))
        ]

    def _rewarded(
        self,
        trajectory: Trajectory,
        result: RewardResult,
        scores: Sequence[tuple[float, Mapping[str, Any]]],
    ) -> RewardedResponse:
        columns: dict[str, Any] = {"rewards": {}}
        total = 0.0
        if self.pool.config.name != "none":
            total = result.score
            names = map(mask_text, self.pool.config.used)
            columns["rewards"] |= dict(zip(names, result.components, strict=False))
            columns["outcome"] = Outcome(result.outcome).name.lower()
            if result.reason:
                columns["failure"] = result.reason
        for model, (score, more) in zip(self.models, scores, strict=True):
            total += model.config.weight * score
            columns["rewards"][model.config.path] = plain_json(score)
            columns |= plain_json(more)
        reward, opens_thought = total if np.isfinite(total) else None, trajectory.opens_thought is True
        return RewardedResponse(trajectory.text, reward, columns, opens_thought)


class FirstRows(NamedTuple):
    """First rows of each data source, for a trial of the verifier, and rows without an answer."""

    rows: list[Example]
    unanswered: list[tuple[Example, int]]  # of each source: the first such row, and their number
    count: int  # of all rows


def first_of_each_source(examples: Iterable[Example]) -> FirstRows:
    """Return the first rows of each data source; reads all."""
    kept: dict[str, list[Example]] = {}
    unanswered: dict[str, tuple[Example, int]] = {}
    count = 0
    for example in examples:
        count += 1
        if not has_answer(example.answer):
            row, number = unanswered.get(example.source, (example, 0))
            unanswered[example.source] = row, number + 1
        if len(rows := kept.setdefault(example.source, [])) < ANSWERED_ROWS:
            rows.append(example)
    return FirstRows([row for rows in kept.values() for row in rows], [*unanswered.values()], count)


def given_trajectory(model: RewardModel, example: Example, text: str, chat: ChatConfig) -> Trajectory:
    """Return a response that was not generated here as a reward model was trained to read it.

    Raises:
        RowError: its prompt or the response cannot be rendered.
    """
    if example.messages is not None and not model.tokenizer.chat_template:
        ids = model.render(text_trajectory(text), example)
        return text_trajectory(text, ids[:-1], ids[-1:])
    return text_trajectory(text, *encode_response(model.tokenizer, example, text, chat))


def encode_response(
    tokenizer: Any, example: Example, text: str, chat: ChatConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Return (prompt ids, ids of a given response and its end), int32 [.], as training reads them.

    Raises:
        RowError: prompt or response cannot be rendered.
    """
    whole = replace(example, response=text, turns=(), thought="")
    ids, mask = encode_supervised(tokenizer, whole, replace(chat, loss="last"))
    start = int(mask.argmax())
    return ids[:start], ids[start:]


def text_trajectory(
    text: str, prompt_ids: Sequence[int] = (), response_ids: Sequence[int] = (0,)
) -> Trajectory:
    """Return a response of which only text and ids are known."""
    zeros = np.zeros(len(response_ids), np.int32)
    return Trajectory(
        prompt_ids=np.asarray(prompt_ids, np.int32), response_ids=np.asarray(response_ids, np.int32),
        logprobs=zeros.astype(np.float32), mask=zeros.astype(np.int8) + 1, versions=zeros, prompt_index=0,
        response_index=0, finish="stop", text=text,
    )  # fmt: skip
