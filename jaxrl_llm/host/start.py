"""The machine under a run: processes, compilation cache."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import jax

CACHE = "~/.cache/jaxrl_llm/compiled"


def start_host() -> None:
    """Join the other processes of the run, if there are any, and share compiled programs between runs.

    Several processes: on TPU VM, SLURM and GKE they find each other; elsewhere set
    JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID.
    JAX_COMPILATION_CACHE_DIR says where compiled programs are kept ("" = nowhere).
    """
    quiet_transformers()
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path(CACHE).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    if jax.distributed.is_initialized():
        return
    env = os.environ
    if "JAX_COORDINATOR_ADDRESS" in env and "JAX_NUM_PROCESSES" in env:
        jax.distributed.initialize(
            env["JAX_COORDINATOR_ADDRESS"], int(env["JAX_NUM_PROCESSES"]), int(env["JAX_PROCESS_ID"])
        )
    elif int(env.get("SLURM_NTASKS", 1)) > 1 or "," in env.get("TPU_WORKER_HOSTNAMES", ""):
        jax.distributed.initialize()


def quiet_transformers() -> None:
    """Without torch, which we do not need, transformers says at its import that it was not found."""
    logging.getLogger("transformers").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()
