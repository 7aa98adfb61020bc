"""Choice of the kernels that compute attention and log-probs of a model."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from jaxrl_kernels.chips import lacks_bfloat16
from jaxrl_kernels.dispatch import choose, device, kernels_setting
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


def turing_warning(dtypes: dict[str, str], mesh: Mesh) -> str:
    """Return a warning of bfloat16 on GPUs without units for it; "" where there is nothing to warn of.

    Args:
        dtypes: key -> type, such as {"--model.dtype": "bfloat16"}.
    """
    with jax.set_mesh(mesh):
        _, kind = device()
    keys = [key for key, dtype in dtypes.items() if dtype == "bfloat16"]
    if not keys or not lacks_bfloat16(kind):
        return ""
    fix = " ".join(f"{key} float16" for key in keys)
    return f"warning: {kind} has no bfloat16 units, so its products run as float32. Set {fix}"


def check_kernels_setting() -> None:
    """Refuse a bad JAXRL_KERNELS in the environment.

    Raises:
        UserError: it is neither "auto" nor "jax".
    """
    try:
        kernels_setting()
    except ValueError as error:
        raise UserError(str(error)) from error
