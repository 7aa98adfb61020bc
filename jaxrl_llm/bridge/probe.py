"""Probe: a server's log-probs of fixed tokens against the trainer's, after every push.

It finds weights that did not arrive, another model or type, and wrong names or layouts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from jaxrl_llm.bridge.servers import Receiver, parsing_reply
from jaxrl_llm.errors import ServerError
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.structs import Params

NUM_TOKENS = 24
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "fp8": 0.4}
"""Largest mean difference of log-probs, nats, by the type in which they are computed. fp8: servers round
activations, too, and the trainer does not; docs/servers.md has the measurement."""


class SequenceScorer(Protocol):
    """The trainer's own log-probs of one sequence. A collective."""

    def __call__(
        self, params: Params, ids: np.ndarray, temperature: float = 1.0, routes: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the log-probs of ids[1:], float32 [T - 1], nats.

        Args:
            ids: tokens [T].
            routes: experts that the tokens pass [T, L, K] (`moe.route_spec`); None = the routers choose.
        """


def tolerance_of(dtype: str, chosen: float | None) -> float:
    """Return the largest mean difference, nats, for log-probs computed in `dtype`, if none is chosen."""
    return TOLERANCE[dtype] if chosen is None else chosen


def probe_tokens(model: TransformerConfig) -> np.ndarray:
    """Return fixed tokens, spread over the vocabulary, int32 [T]."""
    return ((np.arange(min(NUM_TOKENS, model.max_position - 1)) * 7919 + 1) % model.vocab_size).astype(
        np.int32
    )


@dataclass
class Probe:
    """The probe of one push.

    Attributes:
        ids: fixed tokens [T]. expected: the trainer's log-probs of ids[1:], [T - 1].
        label: of the weights. tolerance: largest mean absolute difference, nats.
        adapter: name of the adapters that the request gives; "" = none.
        differences: server's address -> mean absolute difference.
    """

    ids: np.ndarray
    expected: np.ndarray
    label: str
    tolerance: float
    adapter: str = ""
    differences: dict[str, float] = field(default_factory=dict)

    async def check(self, receiver: Receiver) -> None:
        """Score the tokens on a server and compare.

        Raises:
            ServerError: the difference is too large, or the server has other weights than the pushed ones.
        """
        url, score = receiver.server.url, receiver.pool.kind.score
        version, scores = await receiver.in_health(score(receiver, self.ids.tolist(), self.adapter))
        with parsing_reply(url):
            logprobs = np.array(scores, np.float32)
        # The label shows which weights answered, the difference whether they are right.
        if version != self.label:
            raise ServerError(f"{url} answers with weights {version!r} after {self.label!r} was sent")
        difference = np.inf
        if logprobs.shape == self.expected.shape:
            difference = float(np.abs(logprobs - self.expected).mean())
        if not difference <= self.tolerance:
            raise ServerError(
                f"{url}: log-probs differ from the trainer's by {difference:.3g} on average, more "
                f"than {self.tolerance:g} (--servers.probe_tolerance): other weights, type or model code"
                + " or adapters"
                * bool(self.adapter)
            )
        self.differences[url] = difference
