"""Attention within rows of packed sequences: one function, several implementations, one choice."""

from __future__ import annotations

import importlib
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_kernels import target
from jaxrl_kernels.flash_attention.spec import EVERYTHING, Place, Spec

NAMES = ("reference", "blockwise", "pallas_tpu", "pallas_gpu")
"""Of the modules here with `forward` and `backward`."""
SAVED = "flash_attention"
"""The name of what the backward pass needs of the forward pass, for `jax.checkpoint` policies: keeping it
(as much as q, and a number a head and token) saves the second forward pass."""


class _Implementations(dict):
    """Name -> module, imported when first asked for: one chip's kernels may need what another lacks."""

    def __missing__(self, name: str) -> ModuleType:
        if name not in NAMES:
            raise ValueError(f'no attention is called "{name}"; there are {", ".join(NAMES)}, cudnn, auto')
        return self.setdefault(name, importlib.import_module(f"jaxrl_kernels.flash_attention.{name}"))


IMPLEMENTATIONS = _Implementations()


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
        causal: False: also the later ones.
        window: how far back a token sees, itself included; may be traced. None = everything.
        softcap: c: scores become c * tanh(score / c) (Gemma 2, arXiv 2408.00118, section 2).
        implementation: one of NAMES, "cudnn", or "auto" for what `choose` says.
        return_lse: also return the log-sum-exp of the scores, float32, in nats.

    Returns: like q, 0 for a token that sees nothing; with `return_lse` (out, lse).

    Raises: ValueError for what an implementation cannot do, naming one that can.
    """
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads: it is no multiple")
    spec = Spec(scale, causal, softcap)
    name = choose(q.shape[3], q.dtype)[0] if implementation == "auto" else implementation
    if name == "cudnn":
        return _cudnn(spec, q, k, v, segments, window, return_lse)
    segments = jnp.ones(q.shape[:2], jnp.int32) if segments is None else segments
    place = Place(window=EVERYTHING if window is None else window).array()
    out, lse = _attention(name, spec, q, k, v, segments, place)
    return (out, lse) if return_lse else out


def choose(head_dim: int, dtype: DTypeLike) -> tuple[str, str]:
    """(implementation, why) for the device that is traced for: that of the mesh in use, or the default."""
    name, why = target.kernels()
    problem = IMPLEMENTATIONS[name].unsupported(head_dim, dtype) if name else why
    return ("blockwise", problem) if problem else (name, why)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(name: str, spec: Spec, q, k, v, segments, place):
    return IMPLEMENTATIONS[name].forward(spec, q, k, v, segments, segments, Place(*place))


def _attention_forward(name: str, spec: Spec, q, k, v, segments, place):
    out, lse = (checkpoint_name(x, SAVED) for x in _attention(name, spec, q, k, v, segments, place))
    return (out, lse), (q, k, v, segments, place, out, lse)


def _attention_backward(name: str, spec: Spec, residuals, gradients):
    q, k, v, segments, place, *results = residuals
    d = IMPLEMENTATIONS[name].backward(spec, q, k, v, segments, segments, Place(*place), *results, *gradients)
    return *d, None, None


_attention.defvjp(_attention_forward, _attention_backward)


def _cudnn(spec: Spec, q, k, v, segments, window, return_lse: bool):
    """NVIDIA's kernels, as far as JAX's public function reaches them."""
    cannot = {
        "packed segments": segments is not None,
        "a float32 log-sum-exp": return_lse,
        "a softcap": spec.softcap is not None,
        "a traced window": isinstance(window, jax.core.Tracer),
        "a window without causal order": window is not None and not spec.causal,
        f"{q.dtype} (bfloat16 and float16 only)": q.dtype not in (jnp.bfloat16, jnp.float16),
        f"head_dim={q.shape[3]} (multiples of 8 up to 256 only)": q.shape[3] % 8 or q.shape[3] > 256,
    }
    if wrong := [what for what, is_so in cannot.items() if is_so]:
        raise ValueError(f'implementation="cudnn" cannot do {", ".join(wrong)}; "auto" can')
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=spec.scale,
        is_causal=spec.causal,
        local_window_size=None if window is None else (int(window) - 1, 0),
        implementation="cudnn",
    )
