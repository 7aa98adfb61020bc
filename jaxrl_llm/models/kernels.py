"""Choice of the kernels that compute attention, log-probs, experts and the delta rule of a model."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from jaxrl_kernels.chips import lacks_bfloat16
from jaxrl_kernels.dispatch import choose, device, kernels_setting
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.attention import key_dim
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.global_heads import config_of_layers
from jaxrl_llm.structs import Sharing

_ATTENTION = ("attention", "global attention")


def describe_kernels(config: TransformerConfig, dtype: str, mesh: Mesh, strict: bool = False) -> str:
    """Return one line that names the implementations of attention, log-probs, experts and delta rule.

    Args:
        dtype: of the activations, "bfloat16", "float16" or "float32".
        strict: as of `Transformer.__call__`.
    """
    if strict:
        return "attention and log-probs batch_invariant (--strict: the same bits in rollout and trainer)"
    check_kernels_setting()
    with jax.set_mesh(mesh):
        chosen = {
            **dict(zip(_ATTENTION, _attention_choices(config, dtype), strict=False)),
            "log-probs": choose("linear_logprob", config.hidden_size, dtype),
        }
        if config.moe:
            chosen["experts"] = choose("grouped_matmul", dtype)
        if delta := config.delta:
            group = delta.value_heads // delta.key_heads
            chosen["delta rule"] = choose("gated_delta", delta.key_dim, delta.value_dim, group, dtype, True)
    if len({reason for _, reason in chosen.values()}) == 1:
        names = ", ".join(f"{part} {name}" for part, (name, _) in chosen.items())
        return f"{names} ({chosen['attention'][1]})"
    return ", ".join(f"{part} {name} ({reason})" for part, (name, reason) in chosen.items())


def prefix_sharing(config: TransformerConfig, dtype: str, mesh: Mesh) -> Sharing:
    """Return how sequences of the rows that a model reads may share prefixes.

    Dynamic RoPE needs the length of each sequence, and cuDNN does not support the mask. Recurrent layers keep
    few states of a row's prefixes.
    """
    with jax.set_mesh(mesh):
        names = [name for name, _ in _attention_choices(config, dtype)]
    if config.rope.scaling == "dynamic" or "cudnn" in names:
        return False
    return "flat" if config.layer_kinds else True


def _attention_choices(config: TransformerConfig, dtype: str) -> list[tuple[str, str]]:
    """Return (implementation, reason) for the layers with a window, or all, and for global heads."""
    views = [config, *([config_of_layers(config, has_window=False)] if config.global_heads else [])]
    return [choose("flash_attention", key_dim(of), dtype, of.attention_softcap) for of in views]


def turing_warning(dtypes: dict[str, str], mesh: Mesh) -> str:
    """Return a warning about bfloat16 on GPUs without bfloat16 units, or "".

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
        UserError: the value is not "auto", "jax" or "all".
    """
    try:
        kernels_setting()
    except ValueError as error:
        raise UserError(str(error)) from error
