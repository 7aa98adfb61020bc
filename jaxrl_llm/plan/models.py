"""Models as shapes: nothing is downloaded, no weight is made."""

from __future__ import annotations

from pathlib import Path

import jax
from jax.typing import DTypeLike

from jaxrl_llm import models
from jaxrl_llm.config import ModelConfig
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.presets import PRESETS, preset
from jaxrl_llm.sharding.rules import laid_out
from jaxrl_llm.structs import Params


class Shapes:
    """`hf.load.PretrainedModels` without files: folders are asked for their config.json alone."""

    def config(self, path: str) -> TransformerConfig:
        """The shape of a local folder's model, or of one whose name is known.

        Raises:
            ConfigError: neither.
        """
        folder = Path(path).expanduser()
        if folder.is_dir():
            return read_config(folder)
        if (found := preset(path)) is None:
            raise ConfigError(
                f"--model.path {path}: no such folder, and no shape of that name is known. Give a folder "
                f"with its config.json (weights are not needed), or one of {', '.join(PRESETS)}."
            )
        return found

    def params(self, path: str, config: TransformerConfig, shardings: Params, dtype: DTypeLike) -> Params:
        """Abstract weights."""
        shapes = jax.eval_shape(lambda weights: models.cast(weights, dtype), models.abstract(config))
        return laid_out(shapes, shardings)


SHAPES = Shapes()


def shape_of(config: ModelConfig) -> TransformerConfig:
    """The model that a recipe trains."""
    return SHAPES.config(config.path) if config.path else config.architecture
