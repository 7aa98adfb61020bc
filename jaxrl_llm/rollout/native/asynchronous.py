"""Asynchronous rollout: the native engine in a thread, on devices that no trained or scoring model uses.

Calls of `start` are served in order, each with the weights that were published last before the call. So a
response and its version depend on the order of the calls, not on time: with `max_staleness` k, the weights
before step max(0, s - k) generate the responses of step s, in every run of the recipe.

Only the thread starts programs on the rollout's devices, and only the trainer's thread on the others: if two
threads started programs with collectives on the same devices, the programs could wait for each other.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxrl_llm.errors import RunError
from jaxrl_llm.models.decode import DecodeWeights
from jaxrl_llm.rollout.checks import check_requests
from jaxrl_llm.rollout.engine import Engine, GenerationCall, PartialResponse
from jaxrl_llm.rollout.meter import Meter
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.partial import is_complete, new_responses, trajectory_of
from jaxrl_llm.structs import Metrics, Params, Trajectory

CLOSE_TIMEOUT = 10.0  # seconds that the thread has to end: a chunk of tokens, or a reply of an environment


@dataclass(eq=False)
class QueuedGeneration:
    """Responses that the thread generates; holds their weights until then."""

    engine: AsynchronousEngine
    responses: list[PartialResponse]
    call: GenerationCall
    weights: DecodeWeights | None
    version: int
    metrics: Future[Metrics] = field(default_factory=Future)

    def result(self) -> list[Trajectory]:
        """Wait for all responses and return them.

        Raises:
            Exception: the one that ended the thread.
        """
        self.engine.metrics = self.metrics.result()
        ends = self.call.sampling.stop_ids(self.engine.engine.eos_ids)
        return [trajectory_of(response, self.engine.tokenizer, ends) for response in self.responses]


class AsynchronousEngine(Engine):
    """Engine that generates while the trainer learns.

    Args:
        engine: on separate devices; from here on only the thread starts programs there.
    """

    def __init__(self, engine: NativeEngine):
        self.engine, self.model, self.tokenizer = engine, engine.model, engine.tokenizer
        self.metrics: Metrics = {}
        own = (d for d in engine.mesh.devices.flat if d.process_index == jax.process_index())
        self._device = next(own)  # for small programs, such as keys, which the trainer's programs would delay
        self._error: BaseException | None = None  # that ended the thread
        self._queue: queue.SimpleQueue[QueuedGeneration | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._meter = Meter()
        self._thread = threading.Thread(target=self._serve, name="rollout", daemon=True)
        self._thread.start()

    def publish(self, params: Params, version: int) -> Metrics:
        """Copy the weights to the rollout's devices, for the responses that are started from now on.

        The weights of earlier calls stay there until their responses are generated.
        """
        self._raise_error()
        return self.engine.publish(params, version)

    def start(self, call: GenerationCall) -> QueuedGeneration:
        """Queue the generation of responses with the weights that are published now.

        Complete responses among `call.partial` are kept; the others are generated again.

        Raises:
            UserError: an impossible prompt or sampling setting.
            ValueError: no weights are published. Exception: the error that ended the thread.
        """
        self._raise_error()
        check_requests(call.requests, call.sampling, self.model, self.tokenizer)
        if self.engine.published is None:
            raise ValueError("rollout: no weights; call publish(params, version) before start")
        responses = [
            replace(r, servers=[]) if is_complete(r, turns=call.dialogue is not None) else r.restarted()
            for r in new_responses(call.requests, call.key, call.partial)
        ]
        queued = QueuedGeneration(self, responses, call, *self.engine.published)
        self._queue.put(queued)
        return queued

    def snapshot(self, pending: Sequence[QueuedGeneration]) -> list[list[PartialResponse]]:
        """Wait for pending responses and return copies: a run that is resumed has their weights no more."""
        for queued in pending:
            queued.metrics.result()
        return [[response.copy() for response in queued.responses] for queued in pending]

    def usage(self) -> Metrics:
        """Return the metrics of the last result, and the idle share of the time since the last call."""
        return self.metrics | {"rollout/idle_fraction": self._meter.read()[1]}

    def warm_up(self, *args: Any, **kwargs: Any) -> None:
        """Call `NativeEngine.warm_up`, before anything is started."""
        with jax.default_device(self._device):
            self.engine.warm_up(*args, **kwargs)

    def close(self) -> None:
        """End the thread before the next chunk of tokens; unfinished responses are lost."""
        self._closed.set()
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _raise_if_closed(self) -> None:
        if self._closed.is_set():
            raise RunError("rollout: the engine is closed")

    def _serve(self) -> None:
        """Generate queued responses until the engine is closed; stop after an error."""
        with jax.default_device(self._device):
            self._serve_queue()

    def _serve_queue(self) -> None:
        while (queued := self._queue.get()) is not None:
            if self._error is None:
                try:
                    with self._meter:
                        queued.metrics.set_result(self._generate(queued))
                except BaseException as error:  # raised in the trainer's thread
                    self._error = error
            queued.weights = None
            if self._error is not None:
                queued.metrics.set_exception(self._error)
            del queued  # it is not kept while the next one is awaited

    def _generate(self, queued: QueuedGeneration) -> Metrics:
        self._raise_if_closed()
        empty = [response for response in queued.responses if not response.finish]
        if not empty:
            return {}
        return self.engine.finish(
            empty,
            queued.weights,
            queued.version,
            queued.call.sampling,
            dialogue=queued.call.dialogue,
            before_chunk=self._raise_if_closed,
        )
