"""Reward models in the memory of the run: outcome, process and generative ones, in any combination."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import models
from jaxrl_llm.data.chat import encode_prompt, prompt_messages, prompt_row, question_text
from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.data.preference import conversation_text, pointwise_prompt
from jaxrl_llm.data.rows import Example
from jaxrl_llm.data.template import ChatRenderer, find_template
from jaxrl_llm.errors import UserError
from jaxrl_llm.forks import contexts
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.json_file import read_json
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.resolve import resolve_model
from jaxrl_llm.hf.tokenizer import load_tokenizer, text_ends, vocabulary_difference
from jaxrl_llm.host.processes import print_on_first
from jaxrl_llm.learn.scoring import BucketedScorer, Scorer
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models.attention import for_length
from jaxrl_llm.models.kernels import prefix_sharing
from jaxrl_llm.rewards.config import RewardModelConfig
from jaxrl_llm.rewards.extract import verdict_probability
from jaxrl_llm.sharding.rules import TRAIN
from jaxrl_llm.structs import Params, Trajectory

EXTRA_TOKENS = 128
"""Tokens of a row beyond the longest trajectory: the judge's prompt, and one token after the last."""
PendingRewards = Callable[[], list[np.ndarray]]
"""Waits for a reward model that has been started, and returns its scores."""


@dataclass
class RewardModel:
    """One frozen reward model."""

    config: RewardModelConfig
    params: Params
    scorer: Scorer | BucketedScorer
    tokenizer: Any
    chat: ChatConfig  # of the policy: system prompt, and whether prompts are chats
    rerenders: bool  # renders the conversation with its own template and tokenizer
    max_tokens: int  # of a text: it reads the last ones
    pad_id: int = -1  # of its config.json; -1 = none

    def __call__(self, trajectories: Sequence[Trajectory], examples: Sequence[Example]) -> list[np.ndarray]:
        """Return the scores of each trajectory's response tokens, float32 [R']: 0 where the model gives none.

        Args:
            examples: the row of each trajectory's prompt.
        """
        return self.start(trajectories, examples)()

    def start(self, trajectories: Sequence[Trajectory], examples: Sequence[Example]) -> PendingRewards:
        """Dispatch the forward passes, and return the function that waits and returns the scores."""
        if self.config.kind == "generative":
            return self._start_verdicts(trajectories, examples)
        prompts = _number_prompts(trajectories)
        items = [self._items(*each) for each in zip(trajectories, examples, prompts, strict=True)]
        pending = self.scorer.start(self.params, list(itertools.chain(*items)), ("values",))

        def finish() -> list[np.ndarray]:
            values = iter(outputs["values"][1:] for outputs in pending())  # after each token
            read = [[(item.tokens[:-1], next(values)) for item in of_one] for of_one in items]
            return [self._scores(*each) for each in zip(trajectories, read, strict=True)]

        return finish

    def _items(self, trajectory: Trajectory, example: Example, prompt: int) -> list[PackItem]:
        """Return the texts that are read, each with one more token: value t belongs to the state after token
        t - 1.

        Where the history was rewritten, an outcome model reads the last context, and a process model every
        context: each step is scored in the context that it was written in.

        Args:
            prompt: the item's `PackItem.prompt`; a text with another rendering shares no prompt.
        """
        if self.rerenders:
            return [self._truncated([*self.render(trajectory, example), 0])]
        ids = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
        found = contexts(len(ids), trajectory.forks)
        keeps = [len(trajectory.prompt_ids), *(context.keep for context in found[1:])]
        first = 0 if self.config.kind == "process" else -1
        items = zip(found[first:], keeps[first:], strict=True)
        return [self._truncated([*ids[context.read], 0], keep, prompt) for context, keep in items]

    def render(self, trajectory: Trajectory, example: Example) -> list[int]:
        """Return the ids of prompt and response, every turn of them, up to the end token of the last.

        A chat is rendered with the model's own template; without a chat or a template, texts are joined, and
        have the model's start and end tokens.
        """
        messages = prompt_messages(example, self.chat)
        if messages is None or not self.tokenizer.chat_template:
            text = prompt_row(example, self.chat)["prompt"] if messages is None else _joined(messages)
            return self._plain(text + trajectory.text, trajectory.finish)
        turns = [*messages, *trajectory.messages]
        chat = ChatRenderer(self.tokenizer, turns, example, _own_chat(self.chat), own=False)
        return chat.tokenize(chat.render().rstrip())

    def _plain(self, text: str, finish: str) -> list[int]:
        """Return the ids of text as reward models learn it: with the start token, and the end token if the
        response ended."""
        start = not text.startswith(self.tokenizer.bos_token or "\0")
        ids, end = self.tokenizer.encode(text, add_special_tokens=start), self.tokenizer.eos_token_id
        return ids if finish != "stop" or end is None or ids[-1:] == [end] else [*ids, end]

    def _truncated(self, ids: Sequence[int], context: int = 0, prompt: int | None = None) -> PackItem:
        """Return the last `max_tokens` of the ids as an item; others may share the first `context` ids."""
        first = max(len(ids) - self.max_tokens, 0)
        mask = np.arange(first, len(ids)) >= context
        return PackItem(np.asarray(ids[first:], np.int32), mask.astype(np.float32), prompt=prompt)

    def _start_verdicts(
        self, trajectories: Sequence[Trajectory], examples: Sequence[Example]
    ) -> PendingRewards:
        """Start the probability of Yes against No, at each response's last token."""
        prompts = [
            pointwise_prompt(question_text(example, self.chat), conversation_text(trajectory.messages))
            for trajectory, example in zip(trajectories, examples, strict=True)
        ]
        pending = self.start_replies(prompts, ("Yes", "No"))

        def finish() -> list[np.ndarray]:
            scores = [np.zeros(len(t.response_ids), np.float32) for t in trajectories]
            for row, probability in zip(scores, pending(), strict=True):
                row[-1] = probability - self.config.mean
            return scores

        return finish

    def start_replies(self, prompts: Sequence[str], words: tuple[str, str]) -> Callable[[], list[float]]:
        """Start the probability of the first of two words against the second as reply to each prompt.

        By the log-probs of the reply's first token (arXiv 2408.15240); of a generative model.
        """
        ids = [self.tokenizer.encode(word, add_special_tokens=False)[0] for word in words]
        items = []
        for number, prompt in enumerate(prompts):
            example = Example(({"role": "user", "content": prompt},), None)
            tokens = encode_prompt(self.tokenizer, example, _own_chat(self.chat))
            items += [self._truncated([*tokens, word], len(tokens), number) for word in ids]
        pending = self.scorer.start(self.params, items)

        def finish() -> list[float]:
            logprobs = [outputs["logprobs"][-1] for outputs in pending()]
            pairs = zip(logprobs[::2], logprobs[1::2], strict=True)
            return [verdict_probability(dict(zip(words, pair, strict=True)), *words) for pair in pairs]

        return finish

    def _scores(self, trajectory: Trajectory, read: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """Return the scores of the response's tokens.

        Args:
            read: of each text that was read, its tokens and their values.
        """
        scores = np.zeros(len(trajectory.response_ids), np.float32)
        if self.config.kind == "outcome":
            ((tokens, values),) = read
            unpadded = np.flatnonzero(tokens != self.pad_id)  # transformers scores the last of these
            scores[-1] = values[unpadded[-1] if len(unpadded) else 0] - self.config.mean
            return scores
        found = contexts(trajectory.num_tokens, trajectory.forks)
        after = np.concatenate([v[c.keep :] for c, (_, v) in zip(found, read, strict=True)])
        ends = self.step_ends(trajectory)
        scores[ends] = after[len(trajectory.prompt_ids) :][ends] - self.config.mean
        return scores

    def step_ends(self, trajectory: Trajectory) -> list[int]:
        """Return the positions of a response's tokens that end a step: the policy's line ends, and the last
        token."""
        ids, own = trajectory.response_ids, trajectory.mask
        ends = [i for i, token in enumerate(ids) if own[i] and "\n" in self.tokenizer.decode([token])]
        last = max(len(ids) - 1 - int(ids[-1] == self.tokenizer.eos_token_id), 0)  # not the end token
        return sorted({*ends, last})


def _number_prompts(trajectories: Sequence[Trajectory]) -> list[int]:
    """Return a number for each trajectory; neighbours with equal prompts have the same number."""
    changes = [not np.array_equal(a.prompt_ids, b.prompt_ids) for a, b in itertools.pairwise(trajectories)]
    return list(itertools.accumulate(changes, initial=0))[: len(trajectories)]


def _own_chat(chat: ChatConfig) -> ChatConfig:
    """Return the chat settings of a reward model: its own template, not the policy's, on the same date."""
    return ChatConfig(date=chat.date)


def _joined(messages: Sequence[dict[str, Any]]) -> str:
    return "".join(f"{message['content']}\n\n" for message in messages)


def load_reward_model(
    config: RewardModelConfig,
    step: StepConfig,
    mesh: Mesh,
    policy_tokenizer: Any,
    *,
    chat: ChatConfig,
    responses: int = 1,
    longest: int = 0,
) -> RewardModel:
    """Return the model of a folder, in the compute type, sharded over the mesh.

    Args:
        policy_tokenizer: of the trajectories that it gets; None = its own.
        chat: chat settings of the policy.
        responses: in a prompt of the model; 2 = it also compares two.
        longest: tokens of the longest prompt and response, by which `for_length` chooses; 0 = of a row.

    Raises:
        UserError: no such folder, no value head in it, a process model that reads other tokens, or a template
            that refuses the policy's chats.
    """
    # The kind of model and its tokenizer must fit the kind of reward.
    folder: Path = resolve_model(config.path)
    model = read_config(folder)
    if problem := config.head_problem(model.value_head):
        raise UserError(f"--reward.models {config.path}: {problem}")
    tokenizer = load_tokenizer(folder, model)
    policy_tokenizer = policy_tokenizer or tokenizer
    same = not vocabulary_difference(tokenizer, policy_tokenizer)
    if not same and config.kind == "process":
        raise UserError(
            f"--reward.models {config.path}: a process reward model scores the policy's own tokens, but its "
            "tokenizer is another; use one with the policy's tokenizer, or kind outcome."
        )
    if rerenders := config.kind == "outcome" and not (
        same and _same_template(tokenizer, policy_tokenizer, chat)
    ):
        _check_template(config.path, tokenizer, chat)
    # Weights, and the settings of its forward pass.
    shardings = models.shardings(model, mesh, TRAIN)
    step = replace(step, row_tokens=responses * step.row_tokens + EXTRA_TOKENS, temperature=1.0)
    model = for_length(model, responses * longest + EXTRA_TOKENS if longest else step.row_tokens)
    params = load_params(folder, model, shardings, jnp.dtype(step.dtype))
    shares = step.share_prefixes and prefix_sharing(model, step.dtype, mesh)
    step = replace(step, share_prefixes=shares)
    pad_id = read_json(folder / "config.json").get("pad_token_id")
    if config.kind == "outcome" and pad_id in text_ends(tokenizer):
        print_on_first(
            f"reward model {config.path}: its pad_token_id {pad_id} ends texts, so the token before is "
            "scored, as in transformers"
        )
    pad_id = -1 if pad_id is None else pad_id
    scorer = Scorer(step, mesh)
    return RewardModel(
        config,
        params,
        scorer,
        tokenizer,
        chat=chat,
        rerenders=rerenders,
        max_tokens=step.row_tokens,
        pad_id=pad_id,
    )


def _same_template(tokenizer: Any, policy_tokenizer: Any, chat: ChatConfig) -> bool:
    """Return whether both models render a chat alike; a tokenizer without a template uses the other's."""
    policy = (
        find_template(policy_tokenizer, chat) if policy_tokenizer.chat_template or chat.chat_template else ""
    )
    return not tokenizer.chat_template or not policy or find_template(tokenizer, _own_chat(chat)) == policy


def _check_template(path: str, tokenizer: Any, chat: ChatConfig) -> None:
    """Render a chat like the policy's with the reward model's template.

    Raises:
        UserError: the template refuses it.
    """
    example = Example(({"role": "user", "content": "question"},), None)
    response = {"role": "assistant", "content": "answer"}
    messages = prompt_messages(example, chat)
    if messages is None or not tokenizer.chat_template:
        return
    try:
        ChatRenderer(tokenizer, [*messages, response], example, _own_chat(chat)).render()
    except UserError as error:
        raise UserError(
            f"--reward.models {path}: its chat template refuses the policy's chats ({error}). Use one that "
            f"takes the roles {', '.join(message['role'] for message in messages)}."
        ) from error


def add_scores(
    reward_models: Sequence[RewardModel],
    trajectories: Sequence[Trajectory],
    pending: Sequence[PendingRewards],
) -> None:
    """Add each model's weighted scores to the trajectories' rewards and components.

    Args:
        pending: `RewardModel.start` of each.

    A process model's scores go to its steps (`token_rewards`), an outcome model's to the response's reward.
    """
    for model, finish in zip(reward_models, pending, strict=True):
        for trajectory, scores in zip(trajectories, finish(), strict=True):
            weighted = model.config.weight * scores
            trajectory.components = (*trajectory.components, float(weighted.sum()))
            if model.config.kind != "process":
                trajectory.reward += float(weighted[-1])
            else:
                before = trajectory.token_rewards
                trajectory.token_rewards = weighted if before is None else before + weighted
