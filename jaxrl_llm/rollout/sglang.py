"""The SGLang engine: responses from a pool of servers, token ids in, token ids and log-probs out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.rollout.checks import check_requests
from jaxrl_llm.rollout.config import RolloutConfig, SGLangConfig
from jaxrl_llm.rollout.engine import Dialogue, DialogueError, Request, SamplingConfig, end_ids
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.publisher import Publisher, WeightTransport
from jaxrl_llm.rollout.servers import ServerError, ServerPool
from jaxrl_llm.rollout.writer import Draft, Writer
from jaxrl_llm.structs import Metrics, Params, Trajectory


class SGLangEngine:
    """A pool of SGLang servers behind the engine protocol.

    Process 0 talks to the servers and tells the others what they said.

    Args:
        share: gives every process process 0's value (a collective).
        score: (params, ids [T]) -> the trainer's log-prob of ids[1:], [T - 1].
        tokenizer, eos_ids: as of NativeEngine.
        wait: returns when servers that are being started answer.
    """

    def __init__(
        self,
        config: RolloutConfig,
        sglang: SGLangConfig,
        model: TransformerConfig,
        pool: ServerPool | None,
        transport: WeightTransport,
        score: Callable[[Params, np.ndarray], np.ndarray],
        share: Callable[[Any], Any],
        tokenizer: Any = None,
        eos_ids: Sequence[int] = (),
        wait: Callable[[], None] | None = None,
    ):
        self.model, self.tokenizer, self.pool, self.share = model, tokenizer, pool, share
        self.metrics: Metrics = {}
        self._pushes = 0
        self._leaf: jax.Array | None = None  # the first weight that the servers hold
        self._versions: dict[str, int] = {}  # label -> policy version
        self._publisher = Publisher(config.dtype, sglang, model, pool, transport, score, self._on_first, wait)
        self._writer = Writer(pool, tokenizer, end_ids(tokenizer, eos_ids), self._versions) if pool else None

    def publish(self, params: Params, version: int) -> Metrics:
        """Give the servers these weights, and see that each of them computes with them.

        Raises:
            ServerError: no server took them.
        """
        leaf = jax.tree.leaves(params)[0]
        if self._leaf is leaf:
            return {}
        self._pushes += 1
        label = f"{version}-{self._pushes}"
        self._versions[label] = version
        metrics = self._publisher.publish(params, label)
        self._leaf = leaf
        return metrics

    def generate(
        self,
        requests: list[Request],
        sampling: SamplingConfig,
        key: jax.Array,
        dialogue: Dialogue | None = None,
    ) -> list[Trajectory]:
        """Responses in order (request, response index). Sample (p, g) draws with a seed of its own.

        A response that a server breaks off (its weights change) goes on where it stopped; each token
        carries the version that wrote it.

        Raises:
            ValueError: no weights published, an impossible request or sampling setting.
            ServerError: a response that no server could complete.
            DialogueError: no conversation can go on.
        """
        check_requests(requests, sampling, self.model, self.tokenizer)
        if self._leaf is None:
            raise ValueError("rollout: no weights; call publish(params, version) before generate")
        pairs = [(request, g) for request in requests for g in range(request.num_responses)]
        names = np.array([(r.prompt_index, g) for r, g in pairs], np.int32).reshape(-1, 2)
        seeds = (sample_keys(key, names)[: len(pairs), 1] & 0x7FFFFFFF).tolist()
        drafts = [Draft(request, g, seed) for (request, g), seed in zip(pairs, seeds, strict=True)]
        start = time.perf_counter()
        write = lambda: self.pool.run(self._writer.write_all(drafts, sampling, dialogue))
        trajectories = self._on_first(write)
        tokens = sum(len(t.response_ids) for t in trajectories)
        self.metrics = {"rollout/tokens_per_second": tokens / max(time.perf_counter() - start, 1e-9)}
        return trajectories

    def _on_first(self, work: Callable[[], Any]) -> Any:
        """What process 0 gets from `work`; its error is everybody's."""
        if self.pool is None:
            result = None
        else:
            try:
                result = work()
            except (ServerError, DialogueError) as error:
                result = error
        result = self.share(result)
        if isinstance(result, (ServerError, DialogueError)):
            raise result
        return result
