"""The SGLang engine: responses from a pool of servers, token ids in, token ids and log-probs out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.rollout.checks import check_requests
from jaxrl_llm.rollout.config import RolloutConfig, SGLangConfig
from jaxrl_llm.rollout.engine import Request, SamplingConfig, end_ids, text_of
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.servers import Json, Server, ServerError, ServerPool
from jaxrl_llm.structs import Metrics, Params, Trajectory

PROBE_TOKENS = 24
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


class WeightTransport(Protocol):
    """How weights reach the servers: written once, then read by each of them."""

    def write(self, params: Params, label: str) -> tuple[Path, int]:
        """(what the servers are told to read, bytes). A collective: every process calls it."""


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
        self.config, self.sglang, self.model, self.tokenizer = config, sglang, model, tokenizer
        self.pool, self.transport, self.score, self.share = pool, transport, score, share
        self.eos_ids = end_ids(tokenizer, eos_ids)
        self.metrics: Metrics = {}
        self._wait = wait
        self._pushes = 0
        self._leaf: jax.Array | None = None  # the first weight that the servers hold
        self._versions: dict[str, int] = {}  # label -> policy version

    def publish(self, params: Params, version: int) -> Metrics:
        """Give the servers these weights, and see that each of them computes with them.

        Raises:
            ServerError: no server took them.
        """
        leaf = jax.tree.leaves(params)[0]
        if self._leaf is leaf:
            return {}
        start = time.perf_counter()
        self._pushes += 1
        label = f"{version}-{self._pushes}"
        folder, size = self.transport.write(params, label)
        written = time.perf_counter()
        ids = (np.arange(min(PROBE_TOKENS, self.model.max_position - 1)) * 7919 + 1) % self.model.vocab_size
        expected = self.score(params, ids)
        found = self._on_first(lambda: self._push(folder, label, ids, expected))
        self._leaf, self._versions[label] = leaf, version
        seconds = time.perf_counter() - start
        return {
            "rollout/publish_seconds": seconds,
            "rollout/publish_bytes": size,
            "bridge/write_seconds": written - start,
            "bridge/gigabytes_per_second": size / seconds / 1e9,
            **found,
        }

    def generate(self, requests: list[Request], sampling: SamplingConfig, key: jax.Array) -> list[Trajectory]:
        """Responses in order (request, response index). Sample (p, g) draws with a seed of its own.

        A response that a server breaks off (its weights change) goes on where it stopped; each token
        carries the version that wrote it.

        Raises:
            ValueError: no weights published, an impossible request or sampling setting.
            ServerError: a response that no server could complete.
        """
        check_requests(requests, sampling, self.model, self.tokenizer)
        if self._leaf is None:
            raise ValueError("rollout: no weights; call publish(params, version) before generate")
        pairs = [(request, g) for request in requests for g in range(request.num_responses)]
        names = np.array([(r.prompt_index, g) for r, g in pairs], np.int32).reshape(-1, 2)
        seeds = (sample_keys(key, names)[: len(pairs), 1] & 0x7FFFFFFF).tolist()
        start = time.perf_counter()
        trajectories = self._on_first(lambda: self._respond(pairs, seeds, sampling))
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
            except ServerError as error:
                result = error
        result = self.share(result)
        if isinstance(result, ServerError):
            raise result
        return result

    async def _update(self, server: Server, folder: Path, label: str) -> None:
        body = {
            "model_path": str(folder),
            "load_format": "auto",
            "weight_version": label,
            "flush_cache": True,
        }
        said = await self.pool.ask(server, "/update_weights_from_disk", body)
        if not said.get("success"):
            raise ServerError(
                f"{server.url} did not take the weights in {folder}: {said.get('message', said)!s:.300}"
            )

    def _push(self, folder: Path, label: str, ids: np.ndarray, expected: np.ndarray) -> Metrics:
        """Weights to each server, then fixed tokens: their log-probs must be the trainer's."""
        if self._wait:
            self._wait()
            self._wait = None
        differences: list[float] = []

        async def update_and_check(server: Server) -> None:
            await self._update(server, folder, label)
            differences.append(await self._probe(server, label, ids, expected))

        self.pool.run(self.pool.everywhere(update_and_check))
        return {
            "bridge/probe_mean_abs": max(differences),
            "servers/usable": len(self.pool.usable),
            "servers/retried": self.pool.retried,
        }

    async def _probe(self, server: Server, label: str, ids: np.ndarray, expected: np.ndarray) -> float:
        """Mean difference of the server's log-probs from the trainer's.

        Raises:
            ServerError: it is too large, or the weights are not those that were sent.
        """
        body = {
            "input_ids": ids.tolist(),
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
        limit = self.sglang.probe_tolerance
        limit = TOLERANCE[self.config.dtype] if limit is None else limit
        if not difference <= limit:
            raise ServerError(
                f"{server.url}: log-probs differ from the trainer's by {difference:.3g} on average, more "
                f"than {limit:g} (--sglang.probe_tolerance): other weights, type or model code"
            )
        return difference

    def _respond(self, pairs, seeds: list[int], sampling: SamplingConfig) -> list[Trajectory]:
        home: dict[int, Server] = {}

        async def everything() -> list[Trajectory]:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._one(request, g, seed, sampling, home))
                    for (request, g), seed in zip(pairs, seeds, strict=True)
                ]
            return [task.result() for task in tasks]

        try:
            return self.pool.run(everything())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _one(self, request: Request, g: int, seed: int, sampling: SamplingConfig, home) -> Trajectory:
        """One response, continued for as long as servers break it off."""
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        finish, stalled = "abort", 0
        while finish == "abort":
            body = {
                "input_ids": [*request.prompt_ids.tolist(), *ids],
                "sampling_params": self._sampling(sampling, request.max_tokens - len(ids), seed),
                "return_logprob": True,
            }
            meta = (await self.pool.generate(body, home, request.prompt_index))["meta_info"]
            said = meta["output_token_logprobs"]
            logprobs += [logprob for logprob, *_ in said]
            ids += [token for _, token, *_ in said]
            versions += self._token_versions(meta, len(said))
            finish = meta["finish_reason"]["type"]
            stalled = 0 if said else stalled + 1
            if finish == "abort" and len(ids) >= request.max_tokens:
                finish = "length"
            if stalled > self.sglang.retries:
                raise ServerError(f"a response was broken off {stalled} times before its first token")
        return Trajectory(
            prompt_ids=np.asarray(request.prompt_ids, np.int32),
            response_ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            mask=np.ones(len(ids), np.int8),
            versions=np.array(versions, np.int32),
            prompt_index=request.prompt_index,
            response_index=g,
            finish=finish,
            text=text_of(self.tokenizer, ids),
        )

    def _token_versions(self, meta: Json, count: int) -> list[int]:
        """The policy version that wrote each token."""
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": count}]
        versions = [
            self._versions.get(span["version"]) for span in spans for _ in range(span["start"], span["end"])
        ]
        if None in versions or len(versions) != count:
            raise ServerError(f"wrote with weights {spans}, which this run did not send")
        return versions

    def _sampling(self, sampling: SamplingConfig, max_tokens: int, seed: int) -> Json:
        return {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "max_new_tokens": max_tokens,
            "stop": list(sampling.stop),
            "stop_token_ids": [] if sampling.ignore_eos else [*self.eos_ids, *sampling.stop_tokens],
            "ignore_eos": sampling.ignore_eos,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "sampling_seed": seed,
        }
