"""All HF tensors of a model from its weights and back, in memory; the package streams files (`hf.load`)."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.hf.layouts import from_hf, to_hf
from jaxrl_llm.hf.names import hf_tensors, stack_dims, tensor_rows
from jaxrl_llm.models import TransformerConfig, abstract, named_leaves
from jaxrl_llm.structs import Params


def params_from_tensors(config: TransformerConfig, tensors: dict[str, np.ndarray]) -> Params:
    """Return the weights; KeyError for a missing tensor."""
    leaves = []
    for (ours, parts), (_, leaf) in zip(
        tensor_rows(config).items(), named_leaves(abstract(config)), strict=True
    ):
        value = np.zeros(leaf.shape, np.float32)
        for part in parts:
            rows = np.asarray(tensors[part.name])[part.start : part.start + part.rows]
            value[part.index] = from_hf(rows, part.layout, leaf.shape[stack_dims(ours) :])
        leaves.append(jnp.asarray(value))
    return jax.tree.unflatten(jax.tree.structure(abstract(config)), leaves)


def tensors_of(config: TransformerConfig, params: Params) -> dict[str, np.ndarray]:
    """Return the HF tensors of the weights."""
    leaves = dict(named_leaves(params))
    return {
        tensor.name: np.concatenate(
            [
                to_hf(np.asarray(leaves[ours])[index], layout)
                for (ours, index), layout in zip(tensor.parts, tensor.layouts, strict=True)
            ]
        )
        for tensor in hf_tensors(config)
    }
