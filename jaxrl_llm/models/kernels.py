"""Choice of the kernels that compute attention and log-probs of a model."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from jaxrl_kernels.dispatch import choose, kernels_setting
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.config import TransformerConfig


def describe_kernels(config: TransformerConfig, dtype: str, mesh: Mesh, strict: bool = False) -> str:
    """Return one line that names the implementations of attention and log-probs on `mesh`, and why.

    Args:
        dtype: of the activations, "bfloat16", "float16" or "float32".
        strict: as of `Transformer.__call__`.
    """
    if strict:
        return "attention and log-probs batch_invariant (--strict: the same bits in rollout and trainer)"
    check_kernels_setting()
    with jax.set_mesh(mesh):
        attention, reason = choose("flash_attention", config.head_dim, dtype, config.attention_softcap)
        logprob, logprob_reason = choose("linear_logprob", config.hidden_size, dtype)
    if reason == logprob_reason:
        return f"attention {attention}, log-probs {logprob} ({reason})"
    return f"attention {attention} ({reason}), log-probs {logprob} ({logprob_reason})"


def check_kernels_setting() -> None:
    """Refuse a bad JAXRL_KERNELS in the environment.

    Raises:
        UserError: it is neither "auto" nor "jax".
    """
    try:
        kernels_setting()
    except ValueError as error:
        raise UserError(str(error)) from error
