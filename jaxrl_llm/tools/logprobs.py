"""Log-probs of given sequences under a model; several responses to a prompt read it once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.data.packing import PackItem, arrange
from jaxrl_llm.learn.scoring import Scorer
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.kernels import can_share_prefixes
from jaxrl_llm.rollout.native.shapes import bucket
from jaxrl_llm.sharding.rules import num_shards
from jaxrl_llm.structs import Params
from jaxrl_llm.tools.response_rewards import SHORTEST_ROW


class Sequences(NamedTuple):
    """Sequences of token ids that all begin with the same `shared` ones; 0 = read each by itself."""

    tokens: list[list[int]]
    shared: int = 0


class LogprobModel:
    """A model that computes log-probs on its mesh, in few shapes of rows, each of which compiles.

    Args:
        batch_tokens: of one forward pass, padding included, but for a longer sequence.
    """

    def __init__(
        self, config: TransformerConfig, temperature: float, dtype: str, batch_tokens: int, mesh: Mesh
    ):
        self.shares = can_share_prefixes(config, dtype, mesh)
        self.settings = {"dtype": dtype, "temperature": temperature, "share_prefixes": self.shares}
        self.batch_tokens, self.mesh = batch_tokens, mesh
        self._by_shape: dict[tuple[int, int], Scorer] = {}

    def logprobs(self, params: Params, groups: Sequence[Sequences]) -> list[list[np.ndarray]]:
        """Return the log-prob of each token after the first, nats, of each sequence of each group."""
        groups = [group if self._splits(group) else group._replace(shared=0) for group in groups]
        results: list[list[np.ndarray]] = [[] for _ in groups]
        by_width: dict[int, list[int]] = {}
        items = [_items(group) for group in groups]
        for i, group in enumerate(groups):
            by_width.setdefault(self._width(group), []).append(i)
        for width in sorted(by_width):
            together = [item for i in by_width[width] for item in items[i]]
            scores = iter(self._of_width(width, together).score(params, together))
            for i in by_width[width]:
                results[i] = _joined(groups[i], [next(scores)["logprobs"][1:] for _ in items[i]])
        return results

    def _splits(self, group: Sequences) -> bool:
        return self.shares and len(group.tokens) > 1 and group.shared > 1

    def _width(self, group: Sequences) -> int:
        """Return the tokens of a row: of the longest sequence, or of all where a pass has room for these."""
        longest = bucket(max(len(ids) for ids in group.tokens), SHORTEST_ROW)
        if not group.shared:
            return longest
        responses = sum(len(ids) - group.shared + 1 for ids in group.tokens)  # +1: the prompt's last token
        whole = bucket(group.shared + responses, SHORTEST_ROW)
        return whole if whole <= self.batch_tokens else longest

    def _of_width(self, width: int, items: Sequence[PackItem]) -> Scorer:
        """Return the model whose micro-batches have as many rows as these items need, a power of two."""
        needed = len(arrange(items, width, share=self.shares))
        shards = num_shards("batch", self.mesh.shape)
        rows = min(1 << (needed - 1).bit_length(), max(self.batch_tokens // width, 1))
        rows = -(-rows // shards) * shards
        if (width, rows) not in self._by_shape:
            step = StepConfig(width, rows, **self.settings)
            self._by_shape[width, rows] = Scorer(step, self.mesh)
        return self._by_shape[width, rows]


def _items(group: Sequences) -> list[PackItem]:
    """Return what is packed: the prompt, where it is shared, and what follows it in each sequence."""
    prompts = [group.tokens[0][: group.shared]] if group.shared else []
    return [_item(ids, 0) for ids in prompts] + [_item(ids, group.shared) for ids in group.tokens]


def _item(ids: list[int], start: int) -> PackItem:
    """Return a sequence whose tokens from `start` on have log-probs."""
    return PackItem(np.array(ids, np.int32), (np.arange(len(ids)) >= start).astype(np.float32))


def _joined(group: Sequences, scores: list[np.ndarray]) -> list[np.ndarray]:
    """Return the log-probs of whole sequences; scores of the prompt come first, where it is apart."""
    if not group.shared:
        return scores
    prompt, *responses = scores
    return [np.concatenate([prompt, response[group.shared - 1 :]]) for response in responses]
