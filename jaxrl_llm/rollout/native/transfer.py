"""Transfer of the policy's weights from the trainer's devices to a rollout on devices of its own."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.decode import DecodeWeights, decode_shardings, decode_weights
from jaxrl_llm.models.lora import MARK, split_params
from jaxrl_llm.sharding.rules import TRAIN
from jaxrl_llm.structs import Params


class WeightTransfer:
    """Copies weights into the type of the rollout on the trainer's devices, then to those of the rollout.

    No program runs on the rollout's devices. Frozen weights of a model with adapters are sent once: later
    copies share them.

    Args:
        shardings: of the copy, on the mesh of the rollout.
    """

    def __init__(self, config: TransformerConfig, dtype: str, shardings: DecodeWeights):
        self.config, self.dtype, self.shardings = config, dtype, shardings
        self._sent: DecodeWeights | None = None  # the last copy, of a model with adapters
        self._frozen: Sequence[weakref.ref] = ()  # the trainer's frozen weights that it was made of

    def __call__(self, params: Params) -> DecodeWeights:
        """Return the copy; the caller may donate its own weights at once."""
        mesh = jax.tree.leaves(params)[0].sharding.mesh
        adapted = self.config.lora is not None
        frozen = jax.tree.leaves(split_params(params)[1]) if adapted else []
        with jax.set_mesh(mesh):
            if frozen and self._has_frozen(frozen):
                new = _adapters_program(self.config, mesh, self.dtype)(params)
                new = jax.device_put(new, adapter_leaves(self.shardings))
                return with_adapters(self._sent, new)
            copy = _copy_program(self.config, mesh, self.dtype)(params)
        copy = jax.device_put(copy, self.shardings)
        if adapted:
            self._sent, self._frozen = copy, [weakref.ref(x) for x in frozen]
        return copy

    def _has_frozen(self, frozen: Sequence[jax.Array]) -> bool:
        return self._sent is not None and all(ref() is x for ref, x in zip(self._frozen, frozen, strict=True))


@functools.cache
def _copy_program(config: TransformerConfig, mesh: Mesh, dtype: str):
    """Return the jitted copy, with the trainer's shardings: each device casts its own shards."""
    return jax.jit(
        functools.partial(decode_weights, dtype=dtype), out_shardings=decode_shardings(config, mesh, TRAIN)
    )


@functools.cache
def _adapters_program(config: TransformerConfig, mesh: Mesh, dtype: str):
    """Return the jitted copy of the adapters alone; XLA drops the other weights."""
    return jax.jit(
        lambda params: adapter_leaves(decode_weights(params, dtype)),
        out_shardings=adapter_leaves(decode_shardings(config, mesh, TRAIN)),
    )


def adapter_leaves(weights: DecodeWeights) -> list:
    """Return the adapters of a tree of weights or shardings, in order."""
    return [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(weights) if _is_adapter(path)]


def with_adapters(weights: DecodeWeights, adapters: Sequence[jax.Array]) -> DecodeWeights:
    """Return the weights with other adapters, in the order of `adapter_leaves`."""
    remaining = iter(adapters)
    return jax.tree_util.tree_map_with_path(
        lambda path, w: next(remaining) if _is_adapter(path) else w, weights
    )


def _is_adapter(path: tuple) -> bool:
    return MARK in jax.tree_util.keystr(path)
