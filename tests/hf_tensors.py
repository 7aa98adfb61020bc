"""All HF tensors of a model from its weights and back, in memory; the package streams files (`hf.load`)."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.hf.names import TABLE, from_hf, hf_tensors, tensor_rows, to_hf
from jaxrl_llm.models import TransformerConfig, abstract, named_leaves
from jaxrl_llm.structs import Params


def params_from_tensors(config: TransformerConfig, tensors: dict[str, np.ndarray]) -> Params:
    """Return the weights; KeyError for a missing tensor."""
    leaves = []
    for (ours, parts), (_, leaf) in zip(
        tensor_rows(config).items(), named_leaves(abstract(config)), strict=True
    ):
        stacked = ours.startswith("layers.")
        rows = [np.asarray(tensors[p.name])[p.start : p.start + p.rows] for p in parts]
        layers = [from_hf(piece, parts[0].layout, leaf.shape[stacked:]) for piece in rows]
        leaves.append(jnp.asarray(np.stack(layers) if stacked else layers[0]))
    return jax.tree.unflatten(jax.tree.structure(abstract(config)), leaves)


def tensors_of(config: TransformerConfig, params: Params) -> dict[str, np.ndarray]:
    """Return the HF tensors of the weights."""
    leaves = dict(named_leaves(params))
    take = lambda ours, layer: np.asarray(leaves[ours] if layer is None else leaves[ours][layer])
    return {
        tensor.name: np.concatenate([to_hf(take(*part), TABLE[part[0]][1]) for part in tensor.parts])
        for tensor in hf_tensors(config)
    }
