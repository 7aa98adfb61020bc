"""Meshes of the models, and sizes of micro-batches, which follow from the config and the devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import jax
from jax.sharding import Mesh

from jaxrl_llm import algos
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.hf.load import PRETRAINED, PretrainedModels
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.kernels import prefix_sharing
from jaxrl_llm.recipe.rules_devices import device_grids, with_placements
from jaxrl_llm.sharding.config import ALL_DEVICES, MeshConfig
from jaxrl_llm.sharding.placement import to_mesh
from jaxrl_llm.sharding.rules import num_shards


def derived(config: TrainConfig, num_devices: int) -> dict[str, int]:
    """Return the sizes that follow from the config and the number of devices; printed at the start.

    Rows are sharded over the replicas; a micro-batch has no more of them than an update needs, and one that
    is scored no more than a step.
    """
    sizes = config.mesh.resolved_sizes(num_devices)
    replicas = num_shards("batch", sizes)
    updates = config.minibatches_per_step

    def rows_of(tokens_per_device: int, minibatches: int) -> int:
        in_budget = max(tokens_per_device * num_shards("sequence", sizes) // config.row_tokens, 1)
        return replicas * min(in_budget, math.ceil(rows_needed(config, minibatches) / replicas))

    rows, score_tokens = rows_of(config.tokens_per_device, updates), config.score.tokens_per_device
    return {
        "devices": num_devices,
        "trajectories_per_step": config.trajectories_per_step,
        "trajectories_per_update": config.trajectories_per_step // updates,
        "updates": config.steps * config.updates_per_step,
        "tokens_per_row": config.row_tokens,
        "rows_per_microbatch": rows,
        "tokens_per_microbatch": rows * config.row_tokens,
        "microbatches_per_update_at_most": math.ceil(rows_needed(config, updates) / rows),
        "rows_per_scored_microbatch": rows_of(score_tokens, 1) if score_tokens else rows,
    }


def rows_needed(config: TrainConfig, minibatches: int) -> int:
    """Return the rows of a step's largest mini-batch if all trajectories are as long as they may be."""
    prompts, trajectories = config.prompts_per_step, config.trajectories_per_step // minibatches
    if config.minibatches_of == "prompts" and minibatches <= prompts:
        prompts = math.ceil(prompts / minibatches)
        trajectories = prompts * (config.trajectories_per_step // config.prompts_per_step)
    return min(trajectories, prompts * rows_of_prompt(config)) if config.shares_prompts else trajectories


def rows_of_prompt(config: TrainConfig) -> int:
    """Return the rows of a prompt's responses, each of which has the prompt, if all are as long as may be."""
    if not config.shares_prompts:
        return config.responses_per_prompt
    fitting = 1 + (config.row_tokens - config.max_tokens) // (config.max_response_tokens + 1)
    return math.ceil(config.responses_per_prompt / fitting)


def mean_context(config: TrainConfig) -> float:
    """Return the mean number of keys that a token of the rows attends to, if all are as long as may be.

    A token of a prompt of P tokens attends to P/2 on average, one of a response of R to P + R/2. With a row
    for each response that is (P + R)/2; a response that shares its prompt has more of the row's tokens.
    """
    prompt, response = config.max_prompt_tokens, config.max_response_tokens
    prompts = rows_of_prompt(config) * prompt
    responses = config.responses_per_prompt * response
    keys = prompts * prompt / 2 + responses * (prompt + response / 2)
    return keys / (prompts + responses)


def with_prefixes(
    config: TrainConfig, model: TransformerConfig, mesh: Mesh, stored: PretrainedModels = PRETRAINED
) -> TrainConfig:
    """Return the config, without shared prefixes if a model that reads the rows does not support them.

    Args:
        model: the policy.
        stored: source of the configs of other models.
    """
    requires = algos.requirements(config.algo)
    reference = config.reference.path if requires.ref_logprobs else ""
    paths = [*requires.teachers, reference, config.critic.path if requires.critic else ""]
    others = [stored.config(path) for path in paths if path] if config.share_prefixes else []
    kinds = [prefix_sharing(c, config.model.dtype, mesh) for c in (model, *others)]
    able = all(kinds) and (kinds[0] == "flat" or "flat" not in kinds)
    return config if able else replace(config, share_prefixes=False)


def make_meshes(config: TrainConfig, devices: Sequence[jax.Device] | None = None) -> dict[str, Mesh]:
    """Return the mesh of each role.

    Args:
        devices: devices of all processes; None = `jax.devices()`.

    Raises:
        UserError: a range or mesh that does not fit the devices.
    """
    grids = device_grids(config, jax.devices() if devices is None else devices)
    return {role: to_mesh(grid) for role, grid in grids.items()}


def on_one_device(config: TrainConfig) -> TrainConfig:
    """Return the recipe with all models on one mesh, so that a single device has each array once.

    Its rollout is synchronous: asynchronous rollout needs separate devices.
    """
    config = with_placements(config, lambda role, own: replace(own, mesh=None, devices=""))
    rollout = replace(config.rollout, max_staleness=0)
    return replace(config, mesh=MeshConfig(), devices=ALL_DEVICES, rollout=rollout)
