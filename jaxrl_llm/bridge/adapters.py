"""Push adapters (LoRA) to servers: the base once, and the adapters of each version under a separate name.

    base -> test adapters, probe | each version: load -> probe through it -> in use; unload unused ones

A request names its adapters and keeps them to its end, so nothing pauses for new ones. A server that was left
out gets the base again: its process may be another one.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import math
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import numpy as np

from jaxrl_llm.bridge.buckets import ITEMSIZE, Bucket
from jaxrl_llm.bridge.probe import Probe
from jaxrl_llm.bridge.push import (
    Part,
    Publisher,
    Push,
    check_finite,
    gather_into,
    make_receiver,
    paused_generation,
    push_metrics,
)
from jaxrl_llm.bridge.servers import WEIGHTS, Json, Receiver, ServerLike, parsing_reply
from jaxrl_llm.bridge.transports.http_weights import pickle_bucket
from jaxrl_llm.errors import ServerError, UserError
from jaxrl_llm.hf.gather import gather_tensors
from jaxrl_llm.hf.names import adapter_tensors, tensor_bytes
from jaxrl_llm.hf.peft import save_adapter
from jaxrl_llm.hf.peft_config import peft_config
from jaxrl_llm.models import LoraConfig, abstract, named_leaves, without_value_head
from jaxrl_llm.models.lora import base as without_effect
from jaxrl_llm.models.lora import base_config, with_lora, with_random_b, without_adapters
from jaxrl_llm.models.lora_config import TARGETS
from jaxrl_llm.structs import Metrics, Params

PREFIX = "jaxrl_llm-"
"""Prefix of every name, which identifies leftovers of a killed run on a server."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that servers compute as one: SGLang mixes up or ignores adapters of some of them."""

TEST_SIZES = (0.3, 1.0, 3.0, 10.0)
"""Sizes of the outputs of test adapters, relative to outputs of layers: the first with enough effect is
used."""
TEST_EFFECT = 4.0
"""Mean change of log-probs by the test adapters, in tolerances of the probe."""


def fit_lora(lora: LoraConfig) -> LoraConfig:
    """Return equivalent adapters that SGLang computes correctly.

    SGLang multiplies by alpha / rank, even if `use_rslora` is set, and adapts fused layers together.
    """
    names = {name for name in TARGETS if name in lora.adapted}
    for group in FUSED:
        names |= set(group) if names & set(group) else set()
    targets = tuple(name for name in TARGETS if name in names)
    alpha = lora.alpha * math.sqrt(lora.rank) if lora.rank_stabilized else lora.alpha
    return replace(lora, alpha=alpha, rank_stabilized=False, targets=targets)


def fit_adapters(params: Params) -> Params:
    """Return a model with the adapters of `fit_lora`, without value head; adapters that it lacks are
    zeros."""
    params = without_value_head(params)
    shapes = abstract(with_lora(base_config(params.config), fit_lora(params.config.lora)))
    weights = dict(named_leaves(params))
    leaves = [
        weights[name] if name in weights else np.zeros(leaf.shape, np.float32)
        for name, leaf in named_leaves(shapes)
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def lora_flags(lora: LoraConfig, max_versions: int) -> list[str]:
    """Return the flags that a server needs to take these adapters.

    Args:
        max_versions: of adapters in one batch of requests.
    """
    return [
        *("--enable-lora", "--lora-strict-loading", "--max-lora-rank", str(lora.rank)),
        *("--max-loras-per-batch", str(max_versions), "--lora-target-modules", *fit_lora(lora).targets),
    ]


def server_problem(info: Json, lora: LoraConfig, max_versions: int) -> str:
    """Return why a server cannot take these adapters, with the flags to add; "" = it can.

    Args:
        info: its reply to /server_info.
        max_versions: as for `lora_flags`.
    """
    targets = {str(name) for name in info.get("lora_target_modules") or ()}
    fused = {"qkv_proj": FUSED[0], "gate_up_proj": FUSED[1]}
    targets |= {name for one, group in fused.items() if one in targets for name in group}
    missing = [] if "all" in targets else [name for name in fit_lora(lora).targets if name not in targets]
    rank, batch, loaded = (
        info.get(f"max_{name}") for name in ("lora_rank", "loras_per_batch", "loaded_loras")
    )
    problems = {
        "it was started without --enable-lora": not info.get("enable_lora"),
        f"its --max-lora-rank is {rank}": (rank or 0) < lora.rank,
        f"its --lora-target-modules lack {', '.join(missing)}": bool(missing),
        f"its --max-loras-per-batch is {batch}, {max_versions} are needed": (batch or 0) < max_versions,
        f"its --max-loaded-loras is {loaded}, {max_versions + 1} are needed": (
            loaded is not None and loaded <= max_versions
        ),
    }
    first = next((text for text, holds in problems.items() if holds), "")
    flags = " ".join(lora_flags(lora, max_versions))
    return first and f"cannot take adapters of --lora.rank {lora.rank}: {first}. Start it with {flags}"


@dataclass
class Adapter:
    """Adapters of one version, ready to be sent, and their probe.

    Attributes:
        name: that requests give.
        payload: pickled tensors in base64. options: the other fields of the request that loads them.
        folder: with the adapter, for servers that read it from files; then there is no payload.
        tried: addresses of servers that it was sent to, successfully or not.
    """

    name: str
    payload: bytes
    options: Json
    num_bytes: int
    probe: Probe
    folder: Path | None = None
    tried: set[str] = field(default_factory=set)

    async def load(self, receiver: Receiver) -> list[str]:
        """Load the adapter on a server. A server accepts a name once, so leftovers of an earlier attempt are
        unloaded first. Returns the names of all loaded adapters.

        Raises:
            ServerError: the adapter is not loaded, or not certainly.
        """
        if receiver.server.url in self.tried:
            with contextlib.suppress(ServerError):  # usually it is not loaded
                await receiver.pool.kind.unload_adapter(receiver, self.name)
        self.tried.add(receiver.server.url)
        with parsing_reply(receiver.server.url):
            return await receiver.pool.kind.load_adapter(receiver, self)


def write_adapter(params: Params, folder: Path, name: str, probe: Probe) -> Adapter:
    """Write the adapters of a model as a PEFT folder `name` in a folder. A collective; process 0 writes.

    Raises:
        ServerError: it cannot be written. The run then ends as without servers, and saves its state.
    """
    params = fit_adapters(params)
    num_bytes = sum(tensor_bytes(tensor, "float32") for tensor in adapter_tensors(params.config))
    try:
        written = save_adapter(params, folder / name, "")
    except (OSError, UserError) as error:
        raise ServerError(f"the adapters for the servers are not written: {error}") from error
    return Adapter(name, b"", {}, num_bytes, probe=probe, folder=written)


def prepare_adapter(params: Params, dtype: str, name: str, probe: Probe) -> Adapter:
    """Gather the adapters of a model, as tensors in a request. A collective; process 0 gets the tensors.

    For SGLang a file would not do: a server whose own weights are dummies (`--load-format dummy`) reads none.

    Args:
        dtype: "float32" or "bfloat16", of the tensors.
    """
    params = fit_adapters(params)
    tensors = adapter_tensors(params.config)
    (gathered,) = gather_tensors(params, [tensors], dtype)
    num_bytes = ITEMSIZE[dtype] * sum(math.prod(tensor.shape) for tensor in tensors)
    options: Json = {"lora_name": name, "config_dict": peft_config(params.config, "")}
    payload = b""
    if jax.process_index() == 0:
        bucket = Bucket(tensors, [np.ascontiguousarray(array) for array in gathered], dtype)
        sums = [hashlib.sha256(content).hexdigest() for content in bucket.bytes()]
        options["expected_checksums"] = {t.name: s for t, s in zip(tensors, sums, strict=True)}
        payload = base64.b64encode(pickle_bucket(bucket, as_dict=True))
    return Adapter(name, payload, options, num_bytes, probe=probe)


class AdapterPublisher:
    """Push the adapters of a model, and the base to servers without it.

    The first adapters that a server gets are random ones, with a separate probe: adapters of a new run have
    no effect yet, so that a server that ignores adapters would pass.

    Args:
        publisher: of the base.
        dtype: "float32" or "bfloat16", of the tensors that are sent.
        folder: that servers read adapters from; None = they get them in requests.

    Attributes: base: label of the base on the servers, unique to this run; names of adapters start with it.
    """

    def __init__(self, publisher: Publisher, dtype: str, folder: Path | None = None):
        self.publisher, self.dtype, self.problem = publisher, dtype, publisher.problem
        self.folder = folder
        self.pool, self.score, self.tolerance = publisher.pool, publisher.score, publisher.tolerance
        self.served_params = publisher.served_params
        self.base: str = publisher.on_first(lambda: PREFIX + uuid.uuid4().hex[:8])
        self._push: Push | None = None  # of the base; each publish restarts it
        self._test: Adapter | None = None

    def publish(self, params: Params, label: str) -> Metrics:
        """Give all servers these adapters under the name `label`. A collective.

        Raises:
            ServerError: no server took them.
            RunError: weights are NaN or Inf; the servers keep their weights.
        """
        start, publisher = time.perf_counter(), self.publisher
        check_finite(params)
        if self._test is None:
            self._test = self._prepare_test(params)
        adapter = self._prepare(params, label, publisher.make_probe(params, self.base, label))
        publisher.on_first(publisher.wait_for_servers)
        # The base, for servers that lack it, and then the adapters.
        parts: Iterator[Part] = iter(())
        if sends_base := publisher.on_first(self._needs_base):
            parts = publisher.transport.parts(without_adapters(params), self.base)
        if self.pool:
            receivers: list[ServerLike] = []
            if sends_base:
                receivers = [server for server in self.pool.servers if lacks_base(server)]
                self._push = Push(publisher, self.base, self._check_base)
            self._push.start(functools.partial(self._update, adapter), label, receivers)
        base_bytes, gather_seconds = gather_into(self._push, parts)
        metrics = publisher.on_first(
            lambda: self._push.finish() | {"bridge/probe_mean_abs": max(adapter.probe.differences.values())}
        )
        if self.pool and self.folder:
            self._remove_unused(label)
        return metrics | push_metrics(start, gather_seconds, base_bytes + adapter.num_bytes)

    def _prepare_test(self, params: Params) -> Adapter:
        """Return random adapters, so large that the probe fails if a server ignores them. A collective."""
        name, publisher = f"{self.base}-test", self.publisher
        plain = publisher.make_probe(without_effect(params), self.base).expected
        for size in TEST_SIZES:
            changed = with_random_b(params, size)
            probe = publisher.make_probe(changed, self.base, name)
            if np.abs(probe.expected - plain).mean() > TEST_EFFECT * self.tolerance:
                break
        return self._prepare(changed, name, probe)

    def _prepare(self, params: Params, name: str, probe: Probe) -> Adapter:
        if self.folder:
            return write_adapter(params, self.folder, name, probe)
        return prepare_adapter(params, self.dtype, name, probe)

    def _remove_unused(self, label: str) -> None:
        """Remove folders of adapters that no request names; servers may read the others again."""
        used = {label, self._test.name, *self.pool.labels_in_use}
        for old in self.folder.iterdir():
            if old.name not in used:
                shutil.rmtree(old, ignore_errors=True)

    def _needs_base(self) -> bool:
        """Return whether the base has to be gathered: it cannot be sent again, and a server lacks it.

        A server that does not reply is not waited for as long as another one holds the base.
        """
        if self._push is None:
            return True
        lacking = [server for server in self.pool.servers if lacks_base(server)]
        reached = len(lacking) == len(self.pool.servers) or not all(server.unreachable for server in lacking)
        return not self._push.complete and bool(lacking) and reached

    async def _update(self, adapter: Adapter, server: ServerLike) -> None:
        """Give one server the base, if it lacks it, and the adapters."""
        if self._push.expects(server) or lacks_base(server):
            await self._push.update(server)
        receiver = await make_receiver(self.pool, server, self.problem)
        async with server.update_lock:
            start = time.perf_counter()
            names = await self._load(adapter, receiver)
            self._push.wire_seconds[server.url] += time.perf_counter() - start
            await adapter.probe.check(receiver)
            loaded = {name for name in names if name.startswith(PREFIX)}
            for name in sorted(loaded - {adapter.name} - self.pool.labels_in_use):
                await self.pool.kind.unload_adapter(receiver, name)

    async def _load(self, adapter: Adapter, receiver: Receiver) -> list[str]:
        """Load adapters; in mode "abort", responses in flight are aborted and continue with the new
        adapters."""
        if self.publisher.pause != "abort":
            return await adapter.load(receiver)
        async with paused_generation(receiver, "abort"):
            return await adapter.load(receiver)

    async def _check_base(self, receiver: Receiver) -> None:
        """Probe a server that has received the base, through random adapters."""
        await self._test.load(receiver)
        await self._test.probe.check(receiver)
        await self.pool.kind.unload_adapter(receiver, self._test.name)


def lacks_base(server: ServerLike) -> bool:
    """Return whether a server is not known to hold the base: new, left out, or without its memory."""
    return not server.label or WEIGHTS in server.released
