"""Weights to a pool of servers: sent, then seen to compute what the trainer computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_llm.bridge.servers import Pool, Server
from jaxrl_llm.bridge.update import Pause, Update, WeightTransport
from jaxrl_llm.errors import ServerError
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.structs import Metrics, Params

PROBE_TOKENS = 24
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


class Publisher:
    """Sends weights under a label, and checks each server with fixed tokens.

    Args:
        pause: becomes of responses in flight; see SGLangConfig.
        tolerance: largest mean difference of log-probs, nats; None = by the dtype.
        pool: of process 0; None elsewhere.
        score: (params, ids [T]) -> the trainer's log-prob of ids[1:], [T - 1].
        on_first: runs something in process 0 and gives everybody its result, or its error.
        wait: returns when servers that are being started answer.
    """

    def __init__(
        self,
        dtype: str,
        pause: Pause,
        tolerance: float | None,
        model: TransformerConfig,
        pool: Pool | None,
        transport: WeightTransport,
        score: Callable[[Params, np.ndarray], np.ndarray],
        on_first: Callable[[Callable[[], Any]], Any],
        wait: Callable[[], None] | None = None,
    ):
        self.pool, self.transport, self.score = pool, transport, score
        self._on_first, self._wait = on_first, wait
        self.pause = pause
        self.tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
        self._ids = (np.arange(min(PROBE_TOKENS, model.max_position - 1)) * 7919 + 1) % model.vocab_size

    def publish(self, params: Params, label: str) -> Metrics:
        """Give the servers these weights. A collective.

        Raises:
            ServerError: no server took them.
        """
        start = time.perf_counter()
        expected = self.score(params, self._ids)
        self._on_first(self._wait_once)
        differences: list[float] = []

        async def check(server: Server) -> None:
            differences.append(await self._probe(server, label, expected))

        update = Update(self.pool, self.transport, self.pause, label, check) if self.pool else None
        size, gathering, parcels = 0, 0.0, self.transport.parcels(params, label)
        try:
            while True:
                before = time.perf_counter()
                parcel = next(parcels, None)
                gathering += time.perf_counter() - before
                if parcel is None:
                    break
                size += parcel.size
                if update:
                    update.put(parcel)
        except BaseException:
            if update:
                update.abandon()
            raise
        found = self._on_first(lambda: self._finish(update, differences))
        seconds = time.perf_counter() - start
        return {
            "rollout/publish_seconds": seconds,
            "rollout/publish_bytes": size,
            "bridge/gather_seconds": gathering,
            "bridge/gigabytes_per_second": size / seconds / 1e9,
            **found,
        }

    def _wait_once(self) -> None:
        if self._wait:
            self._wait()
            self._wait = None

    def _finish(self, update: Update, differences: list[float]) -> Metrics:
        update.finish()
        return {
            "bridge/wire_seconds": max(update.wire_seconds.values()),
            "bridge/pause_seconds": max(update.pause_seconds.values()),
            "bridge/probe_mean_abs": max(differences),
            "servers/usable": len(self.pool.usable),
        }

    async def _probe(self, server: Server, label: str, expected: np.ndarray) -> float:
        """Mean difference of the server's log-probs from the trainer's.

        Raises:
            ServerError: it is too large, or the weights are not those that were sent.
        """
        body = {
            "input_ids": self._ids.tolist(),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        meta = (await self.pool.ask(server, "/generate", body))["meta_info"]
        if meta.get("weight_version") != label:
            has = meta.get("weight_version")
            raise ServerError(f"{server.url} answers with weights {has!r} after {label!r} was sent")
        found = np.array([logprob for logprob, *_ in meta["input_token_logprobs"][1:]], np.float32)
        difference = float(np.abs(found - expected).mean()) if len(found) == len(expected) else np.inf
        if not difference <= self.tolerance:
            raise ServerError(
                f"{server.url}: log-probs differ from the trainer's by {difference:.3g} on average, more "
                f"than {self.tolerance:g} (--sglang.probe_tolerance): other weights, type or model code"
            )
        return difference
