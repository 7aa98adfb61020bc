"""Abstract models: known architectures, and shapes of weights without download or allocation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from typing import Any

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl_llm import models
from jaxrl_llm.builders.models import make_stages, trained_config
from jaxrl_llm.config import ModelConfig, TrainConfig
from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.gguf import read_gguf_config
from jaxrl_llm.hf.hub import SUFFIX, parse_hub_name
from jaxrl_llm.hf.resolve import other_folder
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.models.attention import with_yarn
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.sharding.rules import with_shardings
from jaxrl_llm.structs import Params
from jaxrl_llm.user_file import expand_home


def _read_architectures() -> dict[str, TransformerConfig]:
    """Return the models of architectures.json: the keys of the model `like`, and its own in their place."""
    text = (resources.files("jaxrl_llm.plan") / "architectures.json").read_text(encoding="utf-8")
    files: dict[str, dict[str, Any]] = {}
    for name, keys in json.loads(text).items():
        files[name] = files.get(keys.pop("like", ""), {}) | keys
    return {name: read_config(keys) for name, keys in files.items()}


PRESETS = _read_architectures()
"""Hub name -> architecture. A suffix such as -Instruct or -Base does not matter, except for
QWEN3_BASE."""
QWEN3_BASE = 32_768
"""`max_position` of Qwen3's base models: with the others' value `plan` would accept rows that `train`
refuses."""


def preset(name: str) -> TransformerConfig | None:
    """Return the architecture of a known model, or None."""
    known = PRESETS.get(re.sub("-(Instruct|Base|Chat|it)$", "", name))
    if known and known.family in ("qwen3", "qwen3_moe") and name.endswith("-Base"):
        return replace(known, max_position=QWEN3_BASE)
    return known


class UnknownModelError(ConfigError):
    """A model whose architecture is neither in a local folder nor in `plan.models`."""

    def __init__(self, name: str):
        super().__init__(
            f"{name}: no such folder, and no architecture of that name is known. Give a "
            f"folder with its config.json (weights are not needed), or one of {', '.join(PRESETS)}."
        )
        self.name = name


class AbstractModels:
    """`hf.load.PretrainedModels` with abstract weights; reads only config.json of a folder."""

    def config(self, path: str) -> TransformerConfig:
        """Return the architecture of a local folder's model, or of one in `plan.models`.

        Raises:
            UnknownModelError: neither a folder nor a preset has this name.
            UserError: a folder that is not a model's, such as the directory of a run.
        """
        folder = expand_home(path)
        if folder.is_dir():
            if other := other_folder(folder):
                raise UserError(f"{folder}: {other}")
            return read_config(folder)
        if folder.suffix == SUFFIX and folder.is_file():
            return read_gguf_config(folder)
        hub = parse_hub_name(path)
        if (known := preset(hub.repo if hub and not hub.file else path)) is None:
            raise UnknownModelError(path)
        return known

    def params(self, path: str, config: TransformerConfig, shardings: Params, dtype: DTypeLike) -> Params:
        """Return abstract weights with shardings."""
        shapes = jax.eval_shape(lambda weights: models.cast_weights(weights, dtype), models.abstract(config))
        return with_shardings(shapes, shardings)


ABSTRACT_MODELS = AbstractModels()


def read_known(path: str) -> TransformerConfig | None:
    """Return the architecture of a model; None = it is not known without a download."""
    try:
        return ABSTRACT_MODELS.config(path)
    except UnknownModelError:
        return None


def planned_model(config: ModelConfig) -> TransformerConfig:
    """Return the architecture of the model that a recipe trains."""
    model = ABSTRACT_MODELS.config(config.path) if config.path else config.architecture
    return with_yarn(model, config.yarn_factor, config.yarn_original)


def planned_stage(config: TrainConfig, meshes: Mapping[str, Mesh]) -> Stage:
    """Return the last stage of a run, the run itself, with abstract models.

    Raises:
        UnknownModelError: the architecture of a model is not known.
    """
    model = trained_config(planned_model(config.model), config)
    return make_stages(config, model, meshes, ABSTRACT_MODELS)[-1]
