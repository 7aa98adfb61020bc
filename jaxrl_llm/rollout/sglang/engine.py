"""The SGLang engine: responses from a pool of servers, token ids in, token ids and log-probs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxrl_llm.bridge.push import Publisher
from jaxrl_llm.bridge.update import WeightTransport
from jaxrl_llm.errors import ServerError, UserError
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.rollout.checks import check_requests
from jaxrl_llm.rollout.config import RolloutConfig, SGLangConfig
from jaxrl_llm.rollout.engine import (
    Dialogue,
    DialogueError,
    PartialResponse,
    Request,
    SamplingConfig,
    end_ids,
)
from jaxrl_llm.rollout.partial import new_responses
from jaxrl_llm.rollout.sglang import colocated
from jaxrl_llm.rollout.sglang.generate import Writer
from jaxrl_llm.rollout.sglang.pool import ServerPool, wait
from jaxrl_llm.structs import Metrics, Params, Trajectory


@dataclass
class Responses:
    """Responses that the servers are writing."""

    engine: SGLangEngine
    partial: list[PartialResponse]
    future: Future[list[Trajectory]] | None  # in process 0

    def result(self) -> list[Trajectory]:
        """All of them, when they are done. A collective.

        Raises:
            ServerError: one that no server could complete.
            DialogueError: no conversation can go on.
        """
        return self.engine.on_first(lambda: wait(self.future))


class SGLangEngine:
    """A pool of SGLang servers behind the engine protocol.

    Process 0 talks to the servers and tells the others what they said.

    Args:
        share: gives every process process 0's value (a collective).
        score: (params, ids [T]) -> the trainer's log-prob of ids[1:], [T - 1].
        tokenizer, eos_ids: as of NativeEngine.
        until_up: returns when servers that are being started answer.
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
        until_up: Callable[[], None] | None = None,
    ):
        self.model, self.tokenizer, self.pool, self.share = model, tokenizer, pool, share
        self.colocated = sglang.colocated
        self._pushes = 0
        self._leaf: jax.Array | None = None  # the first weight that the servers hold
        self._versions: dict[str, int] = {}  # label -> policy version
        self._publisher = Publisher(
            config.dtype,
            sglang.pause,
            sglang.probe_tolerance,
            model,
            pool,
            transport,
            score,
            self.on_first,
            until_up,
        )
        ends = end_ids(tokenizer, eos_ids)
        self._writer = Writer(pool, tokenizer, ends, self._versions, model.vocab_size) if pool else None

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

    def start(
        self,
        requests: list[Request],
        sampling: SamplingConfig,
        key: jax.Array,
        dialogue: Dialogue | None = None,
        partial: Sequence[PartialResponse] = (),
    ) -> Responses:
        """Begin to write responses in order (request, response index); sample (p, g) has a seed of its own.

        A response that a server breaks off (its weights change) goes on where it stopped; each token
        carries the version that wrote it.

        Args:
            partial: of each response, to be continued; () = none.

        Raises:
            ValueError: no weights published, an impossible request or sampling setting.
        """
        check_requests(requests, sampling, self.model, self.tokenizer)
        if self._leaf is None:
            raise UserError("rollout: no weights; call publish(params, version) before generate")
        responses = new_responses(requests, key, partial)
        write = lambda: self._writer.write_all(responses, sampling, dialogue)
        return Responses(self, responses, self.pool.start(write()) if self.pool else None)

    def generate(
        self,
        requests: list[Request],
        sampling: SamplingConfig,
        key: jax.Array,
        dialogue: Dialogue | None = None,
    ) -> list[Trajectory]:
        """`start`, and wait."""
        return self.start(requests, sampling, key, dialogue).result()

    def snapshot(self, pending: Sequence[Responses]) -> list[list[PartialResponse]]:
        """What there is of the responses now, in process 0; their writing goes on afterwards."""
        if self.pool is None:
            return [[] for _ in pending]
        return self.pool.run(self._writer.snapshot([one.partial for one in pending]))

    def usage(self) -> Metrics:
        """How busy the servers were since it was last asked. A collective."""
        return self.on_first(lambda: self.pool.run(self._writer.usage()))

    def release_memory(self) -> None:
        """Colocated: the servers give their memory back, and with it the weights."""
        if self.colocated and self._leaf is not None:
            self._leaf = None
            self.on_first(lambda: self.pool.run(colocated.rest(self.pool)))

    def on_first(self, work: Callable[[], Any]) -> Any:
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
