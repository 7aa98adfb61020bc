"""Weights of a run's models: read from their files, with the heads and adapters of the run."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm import algos, models
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.folder import read_headers, refuse_remote_code
from jaxrl_llm.hf.load import PRETRAINED, PretrainedModels
from jaxrl_llm.hf.resolve import resolve_model
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.attention import for_length, original_length, with_yarn
from jaxrl_llm.models.lora import add_adapters, frozen_config
from jaxrl_llm.rollout.keys import Purpose, run_key
from jaxrl_llm.sharding.rules import TRAIN
from jaxrl_llm.structs import Params


def load_with_heads(
    path: Path | str, model: TransformerConfig, mesh: Mesh, stored: PretrainedModels = PRETRAINED
) -> Params:
    """Return float32 weights with the heads of `model`; a value head that its files lack is zero.

    Args:
        model: without adapters, perhaps quantized.
    """
    saved = frozen_config(stored.config(path), model.quantize)
    with jax.set_mesh(mesh):
        params = stored.params(path, saved, models.shardings(saved, mesh, TRAIN), jnp.float32)
        if saved == model:
            return params
        fit = functools.partial(models.with_heads, config=model)
        return jax.jit(fit, out_shardings=models.shardings(model, mesh, TRAIN), donate_argnums=0)(params)


def read_architecture(config: TrainConfig, path: str, stored: PretrainedModels) -> TransformerConfig:
    """Return the architecture of a teacher, reference or critic for the sequences of a run.

    A model of the policy's files has the policy's YaRN; others have the RoPE of their config.json.
    """
    model, policy = stored.config(path), config.model
    if path == policy.path:
        model = with_yarn(model, policy.yarn_factor, policy.yarn_original)
    return for_length(model, config.max_tokens)


def load_frozen(config: TrainConfig, path: str, mesh: Mesh, stored: PretrainedModels = PRETRAINED) -> Params:
    """Return the weights of a teacher or reference, in the compute type, where `offload` puts them."""
    model = read_architecture(config, path, stored)
    shardings, dtype = models.shardings(model, mesh, TRAIN), jnp.dtype(config.model.dtype)
    with jax.set_mesh(mesh):
        params = stored.params(path, model, shardings, dtype)
        return models.to_host(params) if config.reference.offload else params


def with_new_adapters(params: Params, model: TransformerConfig, mesh: Mesh, seed: int) -> Params:
    """Return the weights with new adapters where the architecture has some; they are donated."""
    if model.lora is None:
        return params
    shardings = models.shardings(model, mesh, TRAIN)
    add = jax.jit(add_adapters, static_argnums=1, out_shardings=shardings, donate_argnums=0)
    with jax.set_mesh(mesh):
        return add(params, model, run_key(seed, Purpose.ADAPTERS))


def check_critic_files(config: TrainConfig) -> None:
    """Check the files of a pretrained critic, whose weights are read when everything else is ready.

    Raises:
        UserError: as `read_headers`.
    """
    if config.critic.path and algos.requirements(config.algo).critic:
        folder = resolve_model(config.critic.path)
        refuse_remote_code(folder)
        read_headers(folder, read_config(folder))


def check_frozen(saved: str, frozen: str, path: str, run_dir: Path | str) -> None:
    """Refuse other frozen weights than the ones that the adapters of a run were trained on.

    Args:
        saved, frozen: `models.lora.frozen_fingerprint` of the checkpoint's run and of these weights.
        path: source of the weights, for the message.

    Raises:
        UserError: the weights differ.
    """
    if saved != frozen:
        raise UserError(
            f"{path or 'the random weights'}: not the weights that the adapters of {run_dir} were trained on "
            f"(fingerprint {frozen}, not {saved}). Put them back; on other weights, start a new "
            "run with another --run_dir."
        )


def check_frequencies(saved: Mapping[str, Any], model: TransformerConfig, config: TrainConfig) -> None:
    """Refuse to continue a run with the other set of frequencies of longrope (`attention.for_length`).

    Args:
        saved: the architecture of the checkpoint, as a dict.

    Raises:
        UserError: the longest sequence of one of both runs is above the model's original length.
    """
    was = saved.get("rope", {}).get("is_long", model.rope.is_long)
    if was != model.rope.is_long:
        of = lambda is_long: f"{'long' if is_long else 'short'}_factor"
        relation = "above" if was else "up to"
        raise UserError(
            f"the checkpoints in {config.run_dir} were trained with longrope's {of(was)}, for sequences "
            f"{relation} {original_length(model):,} tokens, but --max_prompt_tokens + --max_response_tokens "
            f"{config.max_tokens:,} needs {of(model.rope.is_long)}. Put the old lengths back, or start a new "
            f"run from {config.run_dir}/hf with another --run_dir."
        )
