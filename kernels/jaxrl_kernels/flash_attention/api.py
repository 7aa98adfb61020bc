"""Attention within rows of packed sequences: one function, several implementations, one choice."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl_kernels.flash_attention import blockwise, reference
from jaxrl_kernels.flash_attention.spec import EVERYTHING, Place, Spec

IMPLEMENTATIONS = {"reference": reference, "blockwise": blockwise}
"""Name -> module with `forward` and `backward`."""
SAVED = "flash_attention"
"""The name of what the backward pass needs of the forward pass, for `jax.checkpoint` policies: keeping it
(small: the size of q and a number a head and token) saves the second forward pass."""


def flash_attention(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B T K E"],
    v: Float[Array, "B T K E"],
    segments: Int[Array, "B T"] | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int | Int[Array, ""] | None = None,
    softcap: float | None = None,
    implementation: str = "auto",
    return_lse: bool = False,
) -> Float[Array, "B T H E"] | tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
    """softmax(scale * q k^T) v, each token seeing the earlier ones of its own segment.

    Args:
        segments: which sequence of the row each token belongs to, 0 = padding; None = one a row.
        window: tokens that a token sees at most, itself included; may be traced. None = all.
        softcap: c: scores become c * tanh(score / c) (Gemma 2, arXiv 2408.00118, section 2).
        implementation: a name of IMPLEMENTATIONS, or "auto" for what `choose` says.
        return_lse: also return the log-sum-exp of the scores, float32, in nats.

    Returns: like q, 0 for a token that sees nothing; with `return_lse` (out, lse).
    """
    if segments is None:
        segments = jnp.ones(q.shape[:2], jnp.int32)
    name = "blockwise" if implementation == "auto" else implementation
    place = Place(0, 0, EVERYTHING if window is None else window).array()
    out, lse = _attention(name, Spec(scale, causal, softcap), q, k, v, segments, place)
    return (out, lse) if return_lse else out


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(name: str, spec: Spec, q, k, v, segments, place):
    return IMPLEMENTATIONS[name].forward(spec, q, k, v, segments, segments, Place(*place))


def _attention_forward(name: str, spec: Spec, q, k, v, segments, place):
    out, lse = _attention(name, spec, q, k, v, segments, place)
    out, lse = checkpoint_name(out, SAVED), checkpoint_name(lse, SAVED)
    return (out, lse), (q, k, v, segments, place, out, lse)


def _attention_backward(name: str, spec: Spec, residuals, gradients):
    q, k, v, segments, place, out, lse = residuals
    d = IMPLEMENTATIONS[name].backward(spec, q, k, v, segments, segments, Place(*place), out, lse, *gradients)
    return *d, None, None


_attention.defvjp(_attention_forward, _attention_backward)
