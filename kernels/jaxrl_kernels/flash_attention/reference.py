"""The definition of attention here: dense, float32 statistics, readable in a minute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_kernels.flash_attention.spec import NOTHING, Place, Spec, cap, visible


def attention(
    q: Float[Array, "B T H E"],
    k: Float[Array, "B C K E"],
    v: Float[Array, "B C K E"],
    visible: Bool[Array, "B T C"],
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B T H E"]:
    """softmax(scale * q k^T) v over the visible keys, H/K query heads sharing each key head.

    A query that sees nothing (padding) returns zeros. With `softcap` c the scores become
    c * tanh(score / c) (Gemma 2, arXiv 2408.00118, section 2).

    Returns: the type of q; scores and softmax are float32.
    """
    return attend(Spec(scale, softcap=softcap), q, k, v, visible)[0]


def attend(
    spec: Spec,
    q: Float[Array, "B T H E"],
    k: Float[Array, "B C K E"],
    v: Float[Array, "B C K E"],
    visible: Bool[Array, "B T C"],
) -> tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
    """`attention` and the log-sum-exp of its scores, float32, NOTHING where nothing is visible."""
    batch, length, heads, dim = q.shape
    kv_heads, group = k.shape[2], heads // k.shape[2]
    # Queries and the heads that share keys are one dim, X = T * G: plain batched matrix products, which
    # take a CPU two thirds of the time of products over (K, G, T).
    q = jnp.moveaxis(q.reshape(batch, length, kv_heads, group, dim), 1, 2)
    q = q.reshape(batch, kv_heads, length * group, dim)
    scores = cap(spec, jnp.einsum("bkxe,bcke->bkxc", q, k, preferred_element_type=jnp.float32))
    shape = scores.shape
    scores = scores.reshape(batch, kv_heads, length, group, -1)
    scores = jnp.where(visible[:, None, :, None], scores, -jnp.inf).reshape(shape)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=NOTHING)  # finite: a blind row stays NaN-free
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    sees = total > 0
    total = jnp.where(sees, total, 1)
    out = jnp.einsum("bkxc,bcke->bkxe", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = (out / total).astype(q.dtype).reshape(batch, kv_heads, length, group, dim)
    lse = jnp.where(sees, top + jnp.log(total), NOTHING).reshape(batch, kv_heads, length, group)
    return (
        jnp.moveaxis(out, 2, 1).reshape(batch, length, heads, dim),
        jnp.moveaxis(lse, 2, 3).reshape(batch, heads, length),
    )


def forward(
    spec: Spec,
    q: Float[Array, "B Tq H E"],
    k: Float[Array, "B Tk K E"],
    v: Float[Array, "B Tk K E"],
    q_segments: Int[Array, "B Tq"],
    kv_segments: Int[Array, "B Tk"],
    place: Place,
) -> tuple[Float[Array, "B Tq H E"], Float[Array, "B H Tq"]]:
    """Attention of the queries to the keys that `spec` and `place` let them see.

    Args:
        q_segments, kv_segments: which sequence of the row each token belongs to, 0 = padding.

    Returns:
        out: like q; 0 for a query that sees nothing.
        lse: log-sum-exp of its scores in nats, float32; NOTHING for a query that sees nothing.
    """
    rows, columns = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    seen = visible(spec, place, rows, columns, q_segments[:, :, None], kv_segments[:, None])
    return attend(spec, q, k, v, seen)


def backward(
    spec: Spec,
    q: Float[Array, "B Tq H E"],
    k: Float[Array, "B Tk K E"],
    v: Float[Array, "B Tk K E"],
    q_segments: Int[Array, "B Tq"],
    kv_segments: Int[Array, "B Tk"],
    place: Place,
    out: Float[Array, "B Tq H E"],
    lse: Float[Array, "B H Tq"],
    d_out: Float[Array, "B Tq H E"],
    d_lse: Float[Array, "B H Tq"] | None = None,
) -> tuple[Float[Array, "B Tq H E"], Float[Array, "B Tk K E"], Float[Array, "B Tk K E"]]:
    """Gradients of `forward`: those of sum_ij exp(score_ij - lse_i) (d_out_i v_j - delta_i).

    lse, d_out and delta = sum(d_out * out) - d_lse are constants of that sum.

    Args:
        out, lse: of `forward`, or of a longer sequence of keys of which k, v are a part.
        d_out, d_lse: gradients of out and lse.

    Returns: (dq, dk, dv), like q, k, v. What padding sees or is has gradient 0.
    """
    group = q.shape[2] // k.shape[2]
    rows, columns = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    seen = visible(spec, place, rows, columns, q_segments[:, :, None], kv_segments[:, None])[:, None]
    d_out = d_out.astype(jnp.float32)
    delta = jnp.einsum("bthe,bthe->bht", d_out, out.astype(jnp.float32)) - (0 if d_lse is None else d_lse)

    def total(q, k, v):
        k, v = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (k, v))
        scores = cap(spec, jnp.einsum("bthe,bche->bhtc", q.astype(jnp.float32), k))
        weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - lse[..., None], 0)), 0)
        return jnp.sum(weights * (jnp.einsum("bthe,bche->bhtc", d_out, v) - delta[..., None]))

    return jax.grad(total, (0, 1, 2))(q, k, v)
