"""All HF tensors of a model from its weights and back, in memory; the package streams files (`hf.load`)."""

import jax
import numpy as np

from jaxrl_llm.hf.layouts import from_hf, hf_shape, to_hf
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
            shape = leaf.shape[stack_dims(ours, config.family) :]
            rows = rows[:, part.inside :][:, : hf_shape(shape, part.layout)[1]] if rows.ndim == 3 else rows
            value[part.index] = from_hf(rows, part.layout, shape)
        leaves.append(value)
    # `jnp.asarray` would compile a program for each shape.
    return jax.device_put(jax.tree.unflatten(jax.tree.structure(abstract(config)), leaves))


def tensors_of(config: TransformerConfig, params: Params) -> dict[str, np.ndarray]:
    """Return the HF tensors of the weights."""
    leaves = dict(named_leaves(params))
    return {
        tensor.name: np.concatenate(
            [
                to_hf(np.asarray(leaves[ours])[index], layout)
                for (ours, index), layout in zip(tensor.parts, tensor.layouts, strict=True)
            ],
            axis=int(tensor.join == "inside"),
        )
        for tensor in hf_tensors(config)
    }
