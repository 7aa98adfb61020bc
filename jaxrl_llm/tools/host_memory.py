"""Lower bound of a recipe's host memory, which `doctor` compares with free memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.builders.sizes import make_meshes, on_one_device, with_prefixes
from jaxrl_llm.checkpoint.state import saved_arrays
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.host.devices import available_bytes
from jaxrl_llm.host.start import find_cluster
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.models.lora import split_params, trained_state
from jaxrl_llm.plan.models import ABSTRACT_MODELS, UnknownModelError, planned_model, planned_stage
from jaxrl_llm.plan.phases import always_resident, phases
from jaxrl_llm.plan.report import format_bytes
from jaxrl_llm.plan.savings import MEMORY_SETTINGS
from jaxrl_llm.recipe.checks import architectures, check_config, check_models
from jaxrl_llm.sharding.config import POLICY
from jaxrl_llm.sharding.rules import HOST, bytes_per_device
from jaxrl_llm.tools.devices import Finding, has_tpu, nvidia_gpus

NAME = "host memory"
STATE = "weights, optimizer, gradients and frozen models take"
STAGED = "offloaded arrays and a checkpoint on its way to the disk take"


def check_run_memory(config: TrainConfig) -> Finding:
    """Compare free memory with a lower bound for the recipe: its arrays, without activations.

    On accelerators with several processes each has a share, which is larger if arrays are replicated.
    """
    least, subject = (staged_bytes, STAGED) if has_accelerator() else (state_bytes, STATE)
    try:
        processes = num_processes()
        needed = least(config) / processes
    except UnknownModelError as error:
        text = f"the size of {error.name} is not known, nor is the memory of the recipe"
        return Finding(NAME, "note", f"{text}: give an existing folder instead")
    free = available_bytes()
    if free is None:
        return Finding(NAME, "note", f"{subject} {format_bytes(needed)}; how much is free is not known")
    text = f"{subject} {format_bytes(needed)}, {format_bytes(free)} are free"
    if needed > free:
        lower = [f"{flag} ({format_bytes(size / processes)})" for flag, size in lower_settings(config, least)]
        return Finding(NAME, "fix", f"{text}: set {', '.join(lower)}" if lower else text)
    if least is state_bytes and (full := largest_bytes(config) / processes) > free:
        more = f"up to {format_bytes(full)} with the rollout's weights, KV cache and batch"
        return Finding(NAME, "note", f"{text}; {more}: lower --rollout.slots or --prompts_per_step")
    return Finding(NAME, "ok", text)


def num_processes() -> int:
    """Return the number of processes of the run, 1 if they are not described (`start_host` refuses)."""
    with contextlib.suppress(UserError):
        cluster = find_cluster()
        return cluster.num_processes if cluster else 1
    return 1


def has_accelerator() -> bool:
    """Return whether training would use an accelerator, as far as can be seen without opening it."""
    return os.environ.get("JAX_PLATFORMS") != "cpu" and bool(nvidia_gpus() or has_tpu())


def state_bytes(config: TrainConfig) -> int:
    """Return the bytes of weights, optimizer, frozen models, and the gradients of the larger learner."""
    alone, meshes = _with_meshes(config)
    stage = planned_stage(alone, meshes)
    learners = [stage.policy, stage.critic] if stage.critic else [stage.policy]
    return all_bytes(always_resident(alone, stage, meshes)) + max(map(_gradient_bytes, learners))


def staged_bytes(config: TrainConfig) -> int:
    """Return the bytes in host memory while a run on accelerators saves a checkpoint.

    They are the offloaded arrays, and a copy of the saved arrays on the devices: Orbax copies all arrays
    before it writes the first. Weights are read one matrix at a time, which takes less.
    """
    alone, meshes = _with_meshes(config)
    stage = planned_stage(alone, meshes)
    saved = saved_arrays(config.checkpoint, trained_state(stage.abstract_state()))
    return bytes_per_device(always_resident(alone, stage, meshes), HOST) + bytes_per_device(saved)


def largest_bytes(config: TrainConfig) -> int:
    """Return the bytes of all arrays, activations not counted, in the phase of a step that has the most."""
    return max(all_bytes(phase.resident) for phase in phases(*_with_meshes(config)))


def lower_settings(config: TrainConfig, least: Callable[[TrainConfig], int]) -> Iterator[tuple[str, int]]:
    """Yield (setting, bytes with it) of the settings with which the recipe takes less.

    Args:
        least: `state_bytes` or `staged_bytes`.
    """
    before = least(config)
    for setting in MEMORY_SETTINGS:
        changed = setting.changed(config)
        if not setting.applies(config) or changed == config:
            continue
        with contextlib.suppress(UserError):  # not for this model, optimizer or mesh
            check_config(changed, writes=False)
            check_models(changed, architectures(changed, ABSTRACT_MODELS.config))
            if (size := least(changed)) < before:
                yield setting.flag, size


def on_one_cpu(config: TrainConfig) -> tuple[TrainConfig, dict[str, Mesh]]:
    """Return the recipe with all models on one device of the CPU, and its meshes."""
    jax.config.update("jax_platforms", "cpu")  # another process examines the accelerators
    alone = on_one_device(config)
    return alone, make_meshes(alone, jax.devices("cpu")[:1])


def _with_meshes(config: TrainConfig) -> tuple[TrainConfig, dict[str, Mesh]]:
    """Return recipe and meshes as `on_one_cpu`, with shared prefixes where the models can have them."""
    alone, meshes = on_one_cpu(config)
    return with_prefixes(alone, planned_model(alone.model), meshes[POLICY], ABSTRACT_MODELS), meshes


def all_bytes(arrays: Any) -> int:
    """Return the bytes of arrays on one device and in the memory of its host."""
    return bytes_per_device(arrays) + bytes_per_device(arrays, HOST)


def _gradient_bytes(learner: Learner) -> int:
    trained = split_params(learner.abstract_state().params)[0]
    return sum(x.size for x in jax.tree.leaves(trained)) * jnp.dtype(learner.config.grad_dtype).itemsize
