"""The definition of attention: dense, float32 statistics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_kernels.flash_attention.spec import MASKED_LSE, AttentionSpec, DynamicMask, capped_scores, visible


def dense_attention(
    spec: AttentionSpec,
    q: Float[Array, "B T H E"],
    k: Float[Array, "B C K E"],
    v: Float[Array, "B C K E"],
    visible: Bool[Array, "B T C"],
) -> tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
    """Compute softmax(scale * q k^T) v over the visible keys; H/K query heads share each key head.

    A fully masked query (padding) returns zeros. With `softcap` c the scores become
    c * tanh(score / c) (Gemma 2, arXiv 2408.00118, section 2).

    Returns:
        out: the type of q; scores and softmax are float32.
        lse: float32 log-sum-exp of the scores; MASKED_LSE for a query without a visible key.
    """
    batch, length, heads, dim = q.shape
    kv_heads, group = k.shape[2], heads // k.shape[2]
    # Queries and the heads that share keys are one dim, X = T * G: plain batched matrix products, which
    # take a CPU two thirds of the time of products over (K, G, T).
    q = jnp.moveaxis(q.reshape(batch, length, kv_heads, group, dim), 1, 2)
    q = q.reshape(batch, kv_heads, length * group, dim)
    scores = capped_scores(spec, jnp.einsum("bkxe,bcke->bkxc", q, k, preferred_element_type=jnp.float32))
    shape = scores.shape
    scores = scores.reshape(batch, kv_heads, length, group, -1)
    scores = jnp.where(visible[:, None, :, None], scores, -jnp.inf).reshape(shape)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=MASKED_LSE)  # finite: no NaN in a masked row
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    attends = total > 0
    total = jnp.where(attends, total, 1)
    out = jnp.einsum("bkxc,bcke->bkxe", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = (out / total).astype(q.dtype).reshape(batch, kv_heads, length, group, dim)
    lse = jnp.where(attends, top + jnp.log(total), MASKED_LSE).reshape(batch, kv_heads, length, group)
    return (
        jnp.moveaxis(out, 2, 1).reshape(batch, length, heads, dim),
        jnp.moveaxis(lse, 2, 3).reshape(batch, heads, length),
    )


def merge_keys(
    a: tuple[Float[Array, "B T H E"], Float[Array, "B H T"]],
    b: tuple[Float[Array, "B T H E"], Float[Array, "B H T"]],
) -> tuple[Float[Array, "B T H E"], Float[Array, "B H T"]]:
    """Merge (out, lse), float32, of the same queries over two disjoint sets of keys."""
    lse = jnp.logaddexp(a[1], b[1])
    weigh = lambda out, part: out * jnp.exp(part - lse).transpose(0, 2, 1)[..., None]
    return weigh(*a) + weigh(*b), lse


def forward(
    spec: AttentionSpec,
    q: Float[Array, "B Tq H E"],
    k: Float[Array, "B Tk K E"],
    v: Float[Array, "B Tk K E"],
    q_segments: Int[Array, "B Tq"],
    kv_last: Int[Array, "B Tk"],
    mask: DynamicMask,
) -> tuple[Float[Array, "B Tq H E"], Float[Array, "B H Tq"]]:
    """Compute attention of the queries to the keys that `spec` and `mask` leave visible.

    Args:
        q_segments: number of the segment of each query in its row, 0 = padding.
        kv_last: number of the last segment that continues each key's segment, 0 = padding (`DynamicMask`).

    Returns:
        out: like q; 0 for a fully masked query.
        lse: log-sum-exp of its scores in nats, float32; MASKED_LSE for a fully masked query.
    """
    return dense_attention(spec, q, k, v, _visible_keys(mask, q_segments, kv_last))


def backward(
    spec: AttentionSpec,
    q: Float[Array, "B Tq H E"],
    k: Float[Array, "B Tk K E"],
    v: Float[Array, "B Tk K E"],
    q_segments: Int[Array, "B Tq"],
    kv_last: Int[Array, "B Tk"],
    mask: DynamicMask,
    out: Float[Array, "B Tq H E"],
    lse: Float[Array, "B H Tq"],
    d_out: Float[Array, "B Tq H E"],
    d_lse: Float[Array, "B H Tq"] | None = None,
) -> tuple[Float[Array, "B Tq H E"], Float[Array, "B Tk K E"], Float[Array, "B Tk K E"]]:
    """Compute the gradients of `forward`, as gradients of sum_ij exp(score_ij - lse_i) (d_out_i v_j -
    delta_i).

    lse, d_out and delta = sum(d_out * out) - d_lse are constants of that sum.

    Args:
        out, lse: of `forward`, or of a longer sequence of keys of which k, v are a part.
        d_out, d_lse: gradients of out and lse.

    Returns: (dq, dk, dv), like q, k, v; 0 for padding.
    """
    group = q.shape[2] // k.shape[2]
    allowed = _visible_keys(mask, q_segments, kv_last)[:, None]
    # The gradients of a sum whose lse, d_out and delta are constants.
    d_out = d_out.astype(jnp.float32)
    delta = jnp.einsum("bthe,bthe->bht", d_out, out.astype(jnp.float32)) - (0 if d_lse is None else d_lse)

    def total(q, k, v):
        k, v = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (k, v))
        scores = capped_scores(spec, jnp.einsum("bthe,bche->bhtc", q.astype(jnp.float32), k))
        weights = jnp.where(allowed, jnp.exp(jnp.where(allowed, scores - lse[..., None], 0)), 0)
        return jnp.sum(weights * (jnp.einsum("bthe,bche->bhtc", d_out, v) - delta[..., None]))

    return jax.grad(total, (0, 1, 2))(q, k, v)


def _visible_keys(
    mask: DynamicMask, q_segments: Int[Array, "B Tq"], kv_last: Int[Array, "B Tk"]
) -> Bool[Array, "B Tq Tk"]:
    """Return which keys each query attends to."""
    rows, columns = jnp.arange(q_segments.shape[1])[:, None], jnp.arange(kv_last.shape[1])
    windows = mask.windows(q_segments)[:, :, None]
    return visible(mask, rows, columns, windows, q_segments[:, :, None], kv_last[:, None])
