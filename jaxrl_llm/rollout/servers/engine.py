"""The engine on servers: responses from a pool of servers, token ids in, token ids and log-probs out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxrl_llm.bridge.adapters import AdapterPublisher
from jaxrl_llm.bridge.push import Publisher
from jaxrl_llm.errors import ServerError
from jaxrl_llm.forks import contexts
from jaxrl_llm.loop_thread import result_of
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.lora import split_params
from jaxrl_llm.rollout.checks import check_requests
from jaxrl_llm.rollout.config import RolloutConfig, ServersConfig
from jaxrl_llm.rollout.engine import Engine, GenerationCall, PartialResponse, eos_ids_of
from jaxrl_llm.rollout.partial import new_responses, trajectory_of
from jaxrl_llm.rollout.servers import launch
from jaxrl_llm.rollout.servers.generate import ResponseGenerator
from jaxrl_llm.rollout.servers.pool import ServerPool
from jaxrl_llm.structs import Metrics, Params, Trajectory


@dataclass(eq=False)
class PendingResponses:
    """Responses that the servers are generating."""

    engine: ServerEngine
    responses: list[PartialResponse]
    call: GenerationCall
    future: Future[None] | None  # in process 0
    rejected: set[int] = field(default_factory=set)  # places of responses with tokens of excluded servers

    def result(self) -> list[Trajectory]:
        """Return all of them, when they are finished. A collective.

        Raises:
            ServerError: one that no server could complete.
            DialogueError: no conversation can continue.
        """
        return self.engine.on_first(self._finish)

    def _finish(self) -> list[Trajectory]:
        result_of(self.future)
        while self.rejected:
            again = [self.responses[i] for i in self.rejected]
            self.rejected.clear()
            for response in again:
                vars(response).update(vars(response.restarted()))
            work = self.engine.generator.finish_all(again, self.call.sampling, self.call.dialogue)
            self.future = self.engine.pool.start(work)
            result_of(self.future)
        ends = self.call.sampling.stop_ids(self.engine.eos_ids)
        return [trajectory_of(response, self.engine.tokenizer, ends) for response in self.responses]


class ServerEngine(Engine):
    """A pool of servers behind the engine protocol.

    Args:
        pool: in process 0, which sends all requests; None elsewhere.
        publisher: pushes weights, or adapters, to the pool.
        on_first: runs a function in process 0; every process gets its result, or its error.
        tokenizer, eos_ids, routes: as of NativeEngine.
    """

    def __init__(
        self,
        config: RolloutConfig,
        servers: ServersConfig,
        model: TransformerConfig,
        pool: ServerPool | None,
        *,
        publisher: Publisher | AdapterPublisher,
        on_first: Callable[[Callable[[], Any]], Any],
        tokenizer: Any = None,
        eos_ids: Sequence[int] = (),
        routes: bool = False,
    ):
        self.config, self.servers, self.model, self.tokenizer = config, servers, model, tokenizer
        self.pool, self.publisher, self.on_first = pool, publisher, on_first
        self._pushes, self._version = 0, 0
        self._leaf: jax.Array | None = None  # the first trained weight that the servers hold
        self._versions: dict[str, int] = {}  # label -> policy version
        self._pending: weakref.WeakSet[PendingResponses] = weakref.WeakSet()
        self._mismatch = MismatchTotals()
        self.eos_ids = eos_ids_of(tokenizer, eos_ids)
        # Process 0 alone has the pool.
        if pool:
            pool.names_adapters = bool(publisher.base)
            self.generator = ResponseGenerator(
                pool,
                self.eos_ids,
                self._versions,
                model,
                base=publisher.base,
                routes=routes,
                tokenizer=tokenizer,
            )

    def publish(self, params: Params, version: int) -> Metrics:
        """Give the servers these weights, and probe that each of them computes with them.

        Raises:
            ServerError: no server took them.
        """
        leaf = jax.tree.leaves(split_params(params)[0])[0]  # that training changes
        if self._leaf is leaf:
            return {}
        self._pushes += 1
        label = f"{self.publisher.base}-{version}-{self._pushes}".removeprefix("-")
        self._versions[label] = version
        metrics = self.publisher.publish(params, label)
        self._leaf, self._version = leaf, version
        return metrics

    def start(self, call: GenerationCall) -> PendingResponses:
        """Start to generate responses in order (request, response index); each sample (p, g) has a separate
        seed.

        A response that a server interrupts (because its weights change) continues at the same token; each
        token has the version that generated it.

        Raises:
            UserError: an impossible request or sampling setting.
        """
        check_requests(call.requests, call.sampling, self.model, self.tokenizer)
        if self._leaf is None:
            raise ValueError("rollout: no weights; call publish(params, version) before generate")
        responses = new_responses(call.requests, call.key, call.partial)
        future = None
        if self.pool:
            future = self.pool.start(self.generator.finish_all(responses, call.sampling, call.dialogue))
        started = PendingResponses(self, responses, call, future)
        self._pending.add(started)
        return started

    def first_finished(
        self, groups: Sequence[Sequence[PendingResponses]], count: int, required: Collection[int]
    ) -> tuple[list[int], list[list[int]]]:
        """Wait until `count` of the groups, the required ones among them, are finished. A collective.

        Args:
            required: places in `groups`, at most `count`.

        Returns: (the places of the required ones and of the first others, `count` in all, in order; the
            tokens of each response of each group so far).

        Raises:
            ServerError, DialogueError: as `PendingResponses.result`.
        """
        return self.on_first(lambda: self._first_finished(groups, count, required))

    def _first_finished(
        self, groups: Sequence[Sequence[PendingResponses]], count: int, required: Collection[int]
    ) -> tuple[list[int], list[list[int]]]:
        waiting = {pending.future for group in groups for pending in group}
        while waiting:
            ended, waiting = futures.wait(waiting, return_when=futures.FIRST_COMPLETED)
            for future in ended:
                future.result()
            finished = [i for i, each in enumerate(groups) if waiting.isdisjoint(p.future for p in each)]
            if len(finished) >= count and set(required) <= set(finished):
                break
        others = [i for i in finished if i not in required]
        lengths = [[len(one.ids) for pending in group for one in pending.responses] for group in groups]
        return sorted([*required, *others[: count - len(required)]]), lengths

    def snapshot(self, pending: Sequence[PendingResponses]) -> list[list[PartialResponse]]:
        """Return copies of the responses as they are now, in process 0; generation continues."""
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
        """Have colocated servers release their memory, and with it the weights."""
        if self.servers.colocated and self._leaf is not None:
            self._leaf = None
            self.on_first(lambda: self.pool.run(launch.release_memory(self.pool)))

    def check_logprobs(self, params: Params, trajectories: Sequence[Trajectory]) -> list[int]:
        """Compare some responses of each server with the trainer's own log-probs. A collective.

        Compares finished responses (at least two of a server and `MIN_TOKENS` tokens if it has them) and one
        pending response of each server, since in asynchronous rollout the weights of finished ones are gone.
        A server whose mean difference exceeds the probe's tolerance is excluded permanently, and its parts of
        pending responses are generated again. Skips tokens of other weights than `params`, and rollouts with
        `weight_noise` or temperature 0. Routes that servers reported are replayed, as in training.

        Args:
            params: the weights that were published last.

        Returns: indices of trajectories that must not be trained on.
        """
        temperature = self.config.sampling.temperature
        if temperature <= 0 or self.config.weight_noise:
            return []
        pending = self.on_first(lambda: self.pool.run(self._samples()))
        compared = [*choose_compared(trajectories, self._version), *pending]
        trainer_logprobs = []
        served_params = self.publisher.served_params(params) if compared else params
        for each in compared:
            trainer_logprobs.append(self._scored(served_params, each, temperature))
        tolerance = self.publisher.tolerance / min(temperature, 1.0)
        false = self.on_first(lambda: self._find_false(compared, trainer_logprobs, tolerance))
        return [i for i, t in enumerate(trajectories) if not false.isdisjoint({t.server, *t.server.split()})]

    def _scored(self, params: Params, trajectory: Trajectory, temperature: float) -> np.ndarray:
        """Return the trainer's log-probs of the response's tokens, each after its own context."""
        tokens, routes = np.concatenate([trajectory.prompt_ids, trajectory.response_ids]), trajectory.routes
        found = np.zeros(len(tokens), np.float32)
        for read, keep in contexts(len(tokens), trajectory.forks):
            of_context = None if routes is None else routes[read]
            logprobs = self.publisher.score(params, tokens[read], temperature, of_context)
            found[read[keep:]] = np.concatenate([[0.0], logprobs])[keep:]
        return found[len(trajectory.prompt_ids) :]

    def _find_false(
        self, trajectories: Sequence[Trajectory], trainer_logprobs: Sequence[np.ndarray], tolerance: float
    ) -> set[str]:
        """Return the servers with false log-probs; exclude them if they are in the pool."""
        in_place = self.servers.pause == "in_place"
        gaps = [
            logprob_differences(trajectory, logprobs, self._version, in_place)
            for trajectory, logprobs in zip(trajectories, trainer_logprobs, strict=True)
        ]
        known = {server.url for server in self.pool.servers}
        false, alone = self._mismatch.find_mismatches(trajectories, gaps, tolerance, known)
        for url, mean in false.items():
            self.pool.run(self._exclude(url, mean, tolerance))
        return {*self.pool.excluded, *(trajectories[i].server for i in alone)}

    async def _exclude(self, url: str, mean: float, tolerance: float) -> None:
        """Exclude a server permanently; reject its parts of pending responses."""
        problem = (
            f"{url}: log-probs of its responses differ from the trainer's by {mean:.3g} on average, more "
            f"than {tolerance:g} (--servers.probe_tolerance): it is not used again, nor are they trained on"
        )
        self.pool.exclude(url, ServerError(problem))
        for pending in self._pending:
            pending.rejected |= {i for i, each in enumerate(pending.responses) if url in each.servers}

    async def _samples(self) -> list[Trajectory]:
        """Return of each server the pending response with most tokens of the newest weights."""
        best: dict[str, tuple[int, Trajectory]] = {}
        for pending in self._pending:
            if pending.call.sampling.temperature != self.config.sampling.temperature:
                continue
            for i, response in enumerate(pending.responses):
                if len(response.servers) != 1 or i in pending.rejected:
                    continue
                trajectory = trajectory_of(response, None)
                count = int(((trajectory.versions == self._version) & (trajectory.mask > 0)).sum())
                if count > best.get(trajectory.server, (0, None))[0]:
                    best[trajectory.server] = count, trajectory
        return [trajectory for _, trajectory in best.values()]


MIN_TOKENS = 24  # of a mean that is compared: as many as the probe has


def logprob_differences(
    trajectory: Trajectory, trainer_logprobs: np.ndarray, version: int, in_place: bool
) -> np.ndarray:
    """Return |trainer - reported|, nats, of tokens that depend only on the weights of `version`, float64 [n].

    Args:
        trainer_logprobs: log-probs of the response, [R'], under the weights of `version` and at the sampling
            temperature; values that are not finite are skipped.
        in_place: weights change in place, so that tokens after a change depend on older keys and values.
    """
    same = trajectory.versions == version
    if in_place and not same.all():
        return np.zeros(0)
    gaps = np.abs(np.asarray(trainer_logprobs, np.float64) - trajectory.logprobs)[
        same & (trajectory.mask > 0)
    ]
    return gaps[np.isfinite(gaps)]


def choose_compared(trajectories: Sequence[Trajectory], version: int) -> list[Trajectory]:
    """Return trajectories to compare, of every server: at least two and `MIN_TOKENS` tokens of `version`.

    Trajectories with the most such tokens come first; every process chooses the same.
    """
    counts = [int(((t.versions == version) & (t.mask > 0)).sum()) for t in trajectories]
    chosen: list[Trajectory] = []
    taken: dict[str, tuple[int, int]] = {}  # server -> trajectories and tokens chosen
    for i in sorted(range(len(trajectories)), key=lambda i: -counts[i]):
        number, tokens = taken.get(trajectories[i].server, (0, 0))
        if counts[i] and (number < 2 or tokens < MIN_TOKENS):
            taken[trajectories[i].server] = number + 1, tokens + counts[i]
            chosen.append(trajectories[i])
    return chosen


class MismatchTotals:
    """Differences summed by server, until the tokens suffice for a mean.

    Attributes:
        worst: the largest mean difference since it was last set to 0, nats.
    """

    def __init__(self):
        self.worst = 0.0
        self._totals: dict[str, tuple[float, int]] = {}

    def find_mismatches(
        self,
        trajectories: Sequence[Trajectory],
        gaps: Sequence[np.ndarray],
        tolerance: float,
        servers: Collection[str],
    ) -> tuple[dict[str, float], list[int]]:
        """Return ({server: mean difference} beyond the tolerance, single trajectories beyond it).

        Args:
            gaps: the `logprob_differences` of each trajectory.
            tolerance: largest mean difference, nats.
            servers: addresses with a separate mean. A trajectory of several servers, or from a router, is
                compared alone.
        """
        alone = []
        for i, (trajectory, each) in enumerate(zip(trajectories, gaps, strict=True)):
            if trajectory.server in servers:
                total, count = self._totals.get(trajectory.server, (0.0, 0))
                self._totals[trajectory.server] = total + float(each.sum()), count + len(each)
            elif len(each) >= MIN_TOKENS and each.mean() > tolerance:
                alone.append(i)
        means = {url: total / count for url, (total, count) in self._totals.items() if count >= MIN_TOKENS}
        self._totals = {url: value for url, value in self._totals.items() if url not in means}
        self.worst = max([self.worst, *means.values()])
        return {url: mean for url, mean in means.items() if mean > tolerance}, alone
