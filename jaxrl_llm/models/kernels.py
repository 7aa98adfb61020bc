"""Which kernels a model's programs are made of."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from jaxrl_kernels.flash_attention import api as attention
from jaxrl_kernels.linear_logprob import api as linear_logprob
from jaxrl_llm.models.config import TransformerConfig


def describe(config: TransformerConfig, dtype: str, mesh: Mesh, strict: bool = False) -> str:
    """What computes attention and log-probs on the devices of `mesh`, and why; for people.

    Args:
        dtype: of the activations, "bfloat16" or "float32".
        strict: as of `Transformer.__call__`.
    """
    if strict:
        return "attention and log-probs batch_invariant (--strict: the same bits in rollout and trainer)"
    with jax.set_mesh(mesh):
        name, why = attention.choose(config.head_dim, dtype)
        other, because = linear_logprob.choose(config.hidden_size, dtype)
    if why == because:
        return f"attention {name}, log-probs {other} ({why})"
    return f"attention {name} ({why}), log-probs {other} ({because})"
