"""Log-probs of given sequences under a model; several responses to a prompt read it once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.learn.scoring import BucketedScorer
from jaxrl_llm.structs import Params


class Sequences(NamedTuple):
    """Sequences of token ids that all begin with the same `shared` ones; 0 = read each by itself."""

    tokens: list[list[int]]
    shared: int = 0


def logprobs_of(
    scorer: BucketedScorer, params: Params, groups: Sequence[Sequences]
) -> list[list[np.ndarray]]:
    """Return the log-prob of each token after the first, nats, of each sequence of each group."""
    splits = lambda group: scorer.config.share_prefixes and len(group.tokens) > 1 and group.shared > 1
    groups = [group if splits(group) else group._replace(shared=0) for group in groups]
    items = [_items(group, i) for i, group in enumerate(groups)]
    scores = iter(scorer.start(params, [item for group in items for item in group])())
    found = [[next(scores)["logprobs"][1:] for _ in group] for group in items]
    return [_joined(group, each) for group, each in zip(groups, found, strict=True)]


def _items(group: Sequences, prompt: int) -> list[PackItem]:
    """Return the items to pack: the prompt, if it is shared, and each sequence, its response in the mask."""
    prompts = [group.tokens[0][: group.shared]] if group.shared else []
    starts = [0] * len(prompts) + [group.shared] * len(group.tokens)
    return [
        PackItem(np.array(ids, np.int32), (np.arange(len(ids)) >= start).astype(np.float32), prompt=prompt)
        for ids, start in zip([*prompts, *group.tokens], starts, strict=True)
    ]


def _joined(group: Sequences, scores: list[np.ndarray]) -> list[np.ndarray]:
    """Return the log-probs of whole sequences; scores of the prompt come first, if it is shared."""
    if not group.shared:
        return scores
    prompt, *responses = scores
    return [np.concatenate([prompt, response[group.shared - 1 :]]) for response in responses]
