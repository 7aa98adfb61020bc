"""Pretrained models by the names that recipes give them."""

from __future__ import annotations

from typing import Protocol

from jax.typing import DTypeLike

from jaxrl_llm.hf.folder import resolve
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.names import read_config
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.structs import Params


class Stored(Protocol):
    """Where models are read from: a folder or the hub; or nothing is read, and weights are abstract."""

    def config(self, path: str) -> TransformerConfig:
        """What the model is."""

    def params(self, path: str, config: TransformerConfig, shardings: Params, dtype: DTypeLike) -> Params:
        """Its weights."""


class _Folders:
    """Hugging Face folders, and hub names."""

    def config(self, path: str) -> TransformerConfig:
        return read_config(resolve(path))

    def params(self, path: str, config: TransformerConfig, shardings: Params, dtype: DTypeLike) -> Params:
        return load_params(resolve(path), config, shardings, dtype)


STORED: Stored = _Folders()
