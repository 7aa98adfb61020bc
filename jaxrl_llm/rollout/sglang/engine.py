"""The SGLang engine: responses from a pool of servers, token ids in, token ids and log-probs out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxrl_llm.bridge.probe import tolerance_of
from jaxrl_llm.bridge.push import Publisher
from jaxrl_llm.errors import ServerError
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.rollout.checks import check_requests
from jaxrl_llm.rollout.config import RolloutConfig, SGLangConfig
from jaxrl_llm.rollout.engine import Dialogue, PartialResponse, Request, SamplingConfig, end_ids
from jaxrl_llm.rollout.partial import new_responses, trajectory_of
from jaxrl_llm.rollout.sglang import colocated
from jaxrl_llm.rollout.sglang.generate import ResponseGenerator
from jaxrl_llm.rollout.sglang.mismatch import MismatchTotals, differences
from jaxrl_llm.rollout.sglang.pool import ServerPool, wait
from jaxrl_llm.structs import Metrics, Params, Trajectory


@dataclass(eq=False)
class PendingResponses:
    """Responses that the servers are generating."""

    engine: SGLangEngine
    responses: list[PartialResponse]
    sampling: SamplingConfig
    dialogue: Dialogue | None
    future: Future[None] | None  # in process 0
    rejected: set[int] = field(default_factory=set)  # places of responses with tokens of excluded servers

    def result(self) -> list[Trajectory]:
        """Return all of them, when they are finished. A collective.

        Raises:
            ServerError: one that no server could complete.
            DialogueError: no conversation can go on.
        """
        return self.engine.on_first(self._finish)

    def _finish(self) -> list[Trajectory]:
        wait(self.future)
        while self.rejected:
            again = [self.responses[i] for i in self.rejected]
            self.rejected.clear()
            for response in again:
                vars(response).update(vars(response.restarted()))
            generator = self.engine.generator
            self.future = self.engine.pool.start(generator.finish_all(again, self.sampling, self.dialogue))
            wait(self.future)
        return [trajectory_of(response, self.engine.tokenizer) for response in self.responses]


class SGLangEngine:
    """A pool of SGLang servers behind the engine protocol.

    Args:
        pool: in process 0, which sends all requests; None elsewhere.
        publisher: pushes weights to the pool.
        on_first: runs a function in process 0; every process gets its result, or its error.
        tokenizer, eos_ids: as of NativeEngine.
    """

    def __init__(
        self,
        config: RolloutConfig,
        sglang: SGLangConfig,
        model: TransformerConfig,
        pool: ServerPool | None,
        publisher: Publisher,
        on_first: Callable[[Callable[[], Any]], Any],
        tokenizer: Any = None,
        eos_ids: Sequence[int] = (),
    ):
        self.config, self.sglang, self.model, self.tokenizer = config, sglang, model, tokenizer
        self.pool, self.publisher, self.on_first = pool, publisher, on_first
        self._pushes, self._version = 0, 0
        self._leaf: jax.Array | None = None  # the first weight that the servers hold
        self._versions: dict[str, int] = {}  # label -> policy version
        self._pending: weakref.WeakSet[PendingResponses] = weakref.WeakSet()
        self._mismatch = MismatchTotals()
        if pool:
            ends = end_ids(tokenizer, eos_ids)
            self.generator = ResponseGenerator(pool, ends, self._versions, model.vocab_size)

    def publish(self, params: Params, version: int) -> Metrics:
        """Give the servers these weights, and probe that each of them computes with them.

        Raises:
            ServerError: no server took them.
        """
        leaf = jax.tree.leaves(params)[0]
        if self._leaf is leaf:
            return {}
        self._pushes += 1
        label = f"{version}-{self._pushes}"
        self._versions[label] = version
        metrics = self.publisher.publish(params, label)
        self._leaf, self._version = leaf, version
        return metrics

    def start(
        self,
        requests: list[Request],
        sampling: SamplingConfig,
        key: jax.Array,
        dialogue: Dialogue | None = None,
        partial: Sequence[PartialResponse] = (),
    ) -> PendingResponses:
        """Begin to generate responses in order (request, response index); sample (p, g) has its own seed.

        A response that a server breaks off (its weights change) continues where it stopped; each token
        carries the version that generated it.

        Args:
            partial: of each response, to be continued; () = none.

        Raises:
            UserError: an impossible request or sampling setting.
        """
        check_requests(requests, sampling, self.model, self.tokenizer)
        if self._leaf is None:
            raise ValueError("rollout: no weights; call publish(params, version) before generate")
        responses = new_responses(requests, key, partial)
        future = None
        if self.pool:
            future = self.pool.start(self.generator.finish_all(responses, sampling, dialogue))
        started = PendingResponses(self, responses, sampling, dialogue, future)
        self._pending.add(started)
        return started

    def generate(
        self,
        requests: list[Request],
        sampling: SamplingConfig,
        key: jax.Array,
        dialogue: Dialogue | None = None,
    ) -> list[Trajectory]:
        """`start`, and wait."""
        return self.start(requests, sampling, key, dialogue).result()

    def snapshot(self, pending: Sequence[PendingResponses]) -> list[list[PartialResponse]]:
        """Return copies of the responses as they are now, in process 0; generation goes on."""
        if self.pool is None:
            return [[] for _ in pending]
        copies = self.pool.run(self.generator.snapshot([each.responses for each in pending]))
        for each, responses in zip(pending, copies, strict=True):
            for i in each.rejected:
                responses[i] = responses[i].restarted()
        return copies

    def usage(self) -> Metrics:
        """Return how busy the servers were since the last call. A collective."""
        worst, self._mismatch.worst = self._mismatch.worst, 0.0
        return self.on_first(
            lambda: self.pool.run(self.generator.usage()) | {"servers/mismatch_mean_abs": worst}
        )

    def release_memory(self) -> None:
        """Colocated: have the servers release their memory, and with it the weights."""
        if self.sglang.colocated and self._leaf is not None:
            self._leaf = None
            self.on_first(lambda: self.pool.run(colocated.release_memory(self.pool)))

    def report_mismatch(
        self, trajectories: Sequence[Trajectory], logprobs: Sequence[np.ndarray], version: int, dtype: str
    ) -> list[int]:
        """Compare reported log-probs with the trainer's own; leave out servers whose mean difference exceeds
        the probe's tolerance, for good. A collective.

        What such a server generated of pending responses is generated again. Tokens of other versions, and
        of rollouts with `weight_noise` or temperature 0, are not compared.

        Args:
            logprobs: of each trajectory the trainer's own, float32 [R'], under the weights of `version` and
                at the sampling temperature.
            dtype: "float32" or "bfloat16", in which they were computed.

        Returns: places of trajectories that must not be trained on.
        """
        if not self._is_comparable:
            return []
        widest = max(tolerance_of(each, self.sglang.probe_tolerance) for each in (dtype, self.config.dtype))
        tolerance = widest / min(self.config.sampling.temperature, 1.0)  # it divides differences of logits
        return self.on_first(lambda: self._judge(trajectories, logprobs, version, tolerance))

    def spot_check(self, params: Params) -> None:
        """Compare one pending response of each server with the trainer's own log-probs. A collective.

        Asynchronous rollout needs it: when a response is trained on, the weights that generated it are gone.

        Args:
            params: the weights that were published last.
        """
        if not self._is_comparable:
            return
        samples = self.on_first(lambda: self.pool.run(self._samples()))
        own = []
        for each in samples:
            tokens = np.concatenate([each.prompt_ids, each.response_ids])
            scored = self.publisher.score(params, tokens, self.config.sampling.temperature)
            own.append(scored[len(each.prompt_ids) - 1 :])
        if samples:
            self.report_mismatch(samples, own, self._version, self.config.dtype)

    @property
    def _is_comparable(self) -> bool:
        """Whether the trainer's log-probs are those that servers should report."""
        return self.config.sampling.temperature > 0 and not self.config.weight_noise

    def _judge(
        self,
        trajectories: Sequence[Trajectory],
        logprobs: Sequence[np.ndarray],
        version: int,
        tolerance: float,
    ) -> list[int]:
        in_place = self.sglang.pause == "in_place"
        gaps = [
            differences(trajectory, own, version, in_place)
            for trajectory, own in zip(trajectories, logprobs, strict=True)
        ]
        servers = {server.url for server in self.pool.servers}
        false, alone = self._mismatch.judge(trajectories, gaps, tolerance, servers)
        for url, mean in false.items():
            self.pool.run(self._exclude(url, mean, tolerance))
        excluded = self.pool.excluded.keys()
        theirs = {i for i, each in enumerate(trajectories) if not excluded.isdisjoint(each.server.split())}
        return sorted(theirs.union(alone))

    async def _exclude(self, url: str, mean: float, tolerance: float) -> None:
        """Leave a server out for good; reject what it generated of pending responses."""
        problem = (
            f"{url}: log-probs of its responses differ from the trainer's by {mean:.3g} on average, more "
            f"than {tolerance:g} (--sglang.probe_tolerance): it is not used again, nor are they trained on"
        )
        self.pool.exclude(url, ServerError(problem))
        for pending in self._pending:
            pending.rejected |= {i for i, each in enumerate(pending.responses) if url in each.servers}

    async def _samples(self) -> list[Trajectory]:
        """Return of each server the pending response with most tokens of the newest weights."""
        best: dict[str, tuple[int, Trajectory]] = {}
        for pending in self._pending:
            if pending.sampling.temperature != self.config.sampling.temperature:
                continue
            for i, response in enumerate(pending.responses):
                if len(response.servers) != 1 or i in pending.rejected:
                    continue
                trajectory = trajectory_of(response, None)
                count = int(((trajectory.versions == self._version) & (trajectory.mask > 0)).sum())
                if count > best.get(trajectory.server, (0, None))[0]:
                    best[trajectory.server] = count, trajectory
        return [trajectory for _, trajectory in best.values()]
