"""The frozen reference of a run before it is loaded: shapes, types and shardings of its weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from jaxrl_llm import models
from jaxrl_llm.builders.models import has_own_reference
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.hf.load import PRETRAINED, PretrainedModels
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.sharding.config import REFERENCE
from jaxrl_llm.sharding.rules import TRAIN, with_shardings
from jaxrl_llm.structs import Params


def reference_model(
    config: TrainConfig, stage: Stage, stored: PretrainedModels = PRETRAINED
) -> TransformerConfig:
    """Return the reference's model: `reference.path`, or the policy's."""
    return stored.config(config.reference.path) if config.reference.path else stage.policy.model


def own_reference(
    config: TrainConfig, stage: Stage, mesh: Mesh, stored: PretrainedModels = PRETRAINED
) -> Params:
    """Return the abstract weights, on the devices, of a reference that has weights of its own."""
    model = reference_model(config, stage, stored)
    frozen = functools.partial(models.cast_weights, dtype=config.model.dtype)
    shapes = jax.eval_shape(frozen, models.abstract(model))
    return with_shardings(shapes, models.shardings(model, mesh, TRAIN))


def abstract_reference(
    config: TrainConfig, stage: Stage, meshes: Mapping[str, Mesh], stored: PretrainedModels = PRETRAINED
) -> Params:
    """Return the abstract weights that score: with adapters, those of the policy, whose base it shares."""
    if not has_own_reference(config, stage.policy.model, meshes):
        return stage.policy.abstract_state().params
    params = own_reference(config, stage, meshes[REFERENCE], stored)
    return models.to_host(params) if config.reference.offload else params
