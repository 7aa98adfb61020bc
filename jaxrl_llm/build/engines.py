"""The rollout engine of a run, from its config."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.bridge.transports.cuda_ipc import IpcTransport
from jaxrl_llm.bridge.transports.disk import DiskTransport, own_folder, within
from jaxrl_llm.bridge.transports.over_http import HttpTransport
from jaxrl_llm.bridge.transports.process_group import GroupTransport
from jaxrl_llm.bridge.update import WeightTransport
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.export import as_written, save_description
from jaxrl_llm.hf.folder import read_headers
from jaxrl_llm.host.processes import share
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.scorer import make_scorer
from jaxrl_llm.rollout.config import SGLangConfig
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.sglang.engine import SGLangEngine
from jaxrl_llm.rollout.sglang.health import ServerList, tend
from jaxrl_llm.rollout.sglang.launch import Launched
from jaxrl_llm.rollout.sglang.pool import ServerPool


def make_engine(
    config: TrainConfig,
    model: TransformerConfig,
    mesh: Mesh,
    tokenizer: Any,
    eos_ids: Sequence[int],
    closing: contextlib.ExitStack,
    folder: Path | None = None,
    resident: int = 0,
) -> Engine:
    """The native engine, or a pool of SGLang servers, which are started here if they are to be.

    Args:
        closing: gets what must be closed at the end.
        folder: that the model is read from.
        resident: bytes that the trainer will hold on each device.
    """
    if config.rollout.engine == "sglang":
        return _sglang(config, model, mesh, tokenizer, eos_ids, closing, folder)
    engine = NativeEngine(config.rollout, model, mesh, tokenizer, eos_ids, share, config.strict, resident)
    if config.rollout.warm_up:
        samplings = [config.rollout.sampling, config.eval.sampling]
        engine.warm_up(
            config.max_prompt_tokens, config.max_response_tokens, samplings, turns=config.env.active
        )
    return engine


def _sglang(config: TrainConfig, model, mesh, tokenizer, eos_ids, closing, stored) -> SGLangEngine:
    model = dataclasses.replace(model, value_head=False)  # it serves training alone
    rollout, sglang, run_dir = config.rollout, config.sglang, Path(config.run_dir)
    source = WeightSource(model, rollout.dtype, sglang.bucket_bytes)
    if stored is not None:
        _check_names(source, model, stored)
    if sglang.folder:
        folder = within(Path(sglang.folder), run_dir)
    else:
        folder = own_folder(rollout.launch > 0, run_dir, source.size)
    disk = DiskTransport(folder, rollout.dtype, tokenizer)
    closing.callback(disk.close)
    transport = disk if sglang.transport == "disk" else _transport(sglang, source)
    pool = wait = None
    if jax.process_index() == 0:
        urls: Sequence[str] = rollout.servers
        members = revive = None
        if rollout.servers and rollout.servers[0].startswith("@"):
            members = ServerList(Path(rollout.servers[0][1:]))
            urls = members()
        if rollout.launch:
            shell = save_description(model, folder / "shell", tokenizer, rollout.dtype)
            launched = Launched(rollout, sglang, shell, run_dir)
            closing.callback(launched.close)
            urls, wait, revive = launched.urls, launched.wait, launched.revive
        pool = ServerPool(urls, sglang.timeout, sglang.retries, rollout.slots, sglang.patience, sglang.router)
        closing.callback(pool.close)
        if isinstance(transport, GroupTransport):
            closing.callback(transport.close)
        if rollout.servers and not members:
            pool.check_reachable()
        pool.start(tend(pool, members, revive))
    scorer = make_scorer(model, 1.0, rollout.dtype, mesh)

    def score(params, ids: np.ndarray) -> np.ndarray:
        with jax.set_mesh(mesh):
            return np.asarray(scorer(params, ids[None], np.array([len(ids)])))[0, : len(ids) - 1]

    return SGLangEngine(rollout, sglang, model, pool, transport, score, share, tokenizer, eos_ids, wait)


def _transport(sglang: SGLangConfig, source: WeightSource) -> WeightTransport:
    """What sends the weights itself, without files."""
    if sglang.transport == "group":
        return GroupTransport(source, sglang.relay_python, sglang.group_backend, sglang.timeout)
    if jax.process_index() == 0:
        print(
            f"--sglang.transport {sglang.transport}: weights go to the servers as pickles, which SGLang "
            "reads. Whoever can reach a server can send it one, too: keep it on a private network.",
            file=sys.stderr,
        )
    if sglang.transport == "http":
        return HttpTransport(source)
    return IpcTransport(source, sglang.devices)


def _check_names(source: WeightSource, model: TransformerConfig, folder: Path) -> None:
    """The files that the model was read from say which tensors there are."""
    stored = read_config(folder)
    if as_written(stored) != model:  # sent under other names than those of the folder
        return
    found = read_headers(folder, stored)
    source.check({name: entry.shape for name, entry in found.items()}, str(folder))
