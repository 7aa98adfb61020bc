"""The rollout engine of a run, from its config."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.bridge.disk import DiskTransport, own_folder, size_of, within
from jaxrl_llm.checkpoint.hf_export import save_description
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.scorer import make_scorer
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.launch import Launched
from jaxrl_llm.rollout.native import NativeEngine
from jaxrl_llm.rollout.servers import ServerPool
from jaxrl_llm.rollout.sglang import SGLangEngine
from jaxrl_llm.signals import share


def make_engine(
    config: TrainConfig,
    model: TransformerConfig,
    mesh: Mesh,
    tokenizer: Any,
    eos_ids: Sequence[int],
    closing: contextlib.ExitStack,
) -> Engine:
    """The native engine, or a pool of SGLang servers, which are started here if they are to be.

    Args:
        closing: gets what must be closed at the end.
    """
    if config.rollout.engine == "sglang":
        return _sglang(config, model, mesh, tokenizer, eos_ids, closing)
    engine = NativeEngine(config.rollout, model, mesh, tokenizer, eos_ids, share)
    if config.rollout.warm_up:
        samplings = [config.rollout.sampling, config.eval.sampling]
        engine.warm_up(
            config.max_prompt_tokens, config.max_response_tokens, samplings, turns=config.env.active
        )
    return engine


def _sglang(config: TrainConfig, model, mesh, tokenizer, eos_ids, closing) -> SGLangEngine:
    model = dataclasses.replace(model, value_head=False)  # it serves training alone
    rollout, sglang, run_dir = config.rollout, config.sglang, Path(config.run_dir)
    if sglang.folder:
        folder = within(Path(sglang.folder), run_dir)
    else:
        folder = own_folder(rollout.launch > 0, run_dir, size_of(model, rollout.dtype))
    transport = DiskTransport(folder, rollout.dtype, tokenizer)
    closing.callback(transport.close)
    pool = wait = None
    if jax.process_index() == 0:
        urls: Sequence[str] = rollout.servers
        if rollout.launch:
            shell = save_description(model, folder / "shell", tokenizer, rollout.dtype)
            launched = Launched(rollout, sglang, shell, run_dir)
            closing.callback(launched.close)
            urls, wait = launched.urls, launched.wait
        pool = ServerPool(urls, sglang.timeout, sglang.retries, rollout.slots)
        closing.callback(pool.close)
        if rollout.servers:
            pool.check_reachable()
    scorer = make_scorer(model, 1.0, rollout.dtype, mesh)

    def score(params, ids: np.ndarray) -> np.ndarray:
        with jax.set_mesh(mesh):
            return np.asarray(scorer(params, ids[None], np.array([len(ids)])))[0, : len(ids) - 1]

    return SGLangEngine(rollout, sglang, model, pool, transport, score, share, tokenizer, eos_ids, wait)
