"""NumPy float64 oracles of the kernels, which compile nothing, and the tolerance of every comparison."""

import jax.numpy as jnp
import numpy as np

TOLERANCE = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 2e-2}
"""Largest error of any element, relative to the largest expected value (at least 1).

float32: results are sums of up to 300 rounded terms (eps 6e-8) whose order, and whether products and sums are
fused, differ with the CPU's vector width: errors to 3e-6 were seen, a wrong term shows above 1e-3. The 16-bit
types round each factor to 8 or 11 bits."""
MASKED_LSE = float(np.float32(-1e30))


def assert_close(got, expected, dtype="float32", name=""):
    """Compare with the tolerance of `dtype`, the type that the kernel multiplies in."""
    expected = np.asarray(expected, np.float64)
    finite = expected[expected > MASKED_LSE]
    scale = max(1.0, np.abs(finite).max(initial=0.0))
    got = np.asarray(got).astype(np.float64)
    tolerance = TOLERANCE[jnp.dtype(dtype).name] * scale
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance, err_msg=name)


def ancestors(parents, count):
    """A table [s, a] that is True where segment a is s or one that s continues, of segments to `count`."""
    table = np.zeros((count + 1, count + 1), bool)
    for segment in range(1, count + 1):
        ancestor = segment
        while ancestor:
            table[segment, ancestor] = True
            ancestor = (parents or {}).get(ancestor, 0)
    return table


def last_segments(segments, parents):
    """The last segment of whole rows that continues each token's."""
    table = ancestors(parents, segments.max())
    return np.array([0, *(np.flatnonzero(column).max() for column in table.T[1:])], np.int32)[segments]


def visible(mask, q_segments, kv_segments, parents=None):
    """Return the keys [B, Tk] that each query [B, Tq] attends to, from the definition of the mask.

    `parents` has for each segment that continues one the latter.
    """
    q_offset, kv_offset, window = (int(x) for x in mask)
    rows, columns = np.arange(q_segments.shape[1])[:, None], np.arange(kv_segments.shape[1])
    distance = (q_offset + rows) - (kv_offset + columns)
    table = ancestors(parents, max(q_segments.max(), kv_segments.max()))
    return table[q_segments[:, :, None], kv_segments[:, None]] & (distance < window) & (distance >= 0)


def newest(allowed, window):
    """The last `window` keys of those that each query attends to: its sliding window in its sequence."""
    return allowed & (np.cumsum(allowed[..., ::-1], axis=-1)[..., ::-1] <= window)


def attention(q, k, v, allowed, *, scale, softcap=None, d_out=None, d_lse=0.0, sinks=None):
    """(out, lse), and with d_out also (dq, dk, dv), of softmax attention with H / K queries a key head.

    With sinks [H], scores of one more key of value 0, the lse is over it, too, and d_sinks comes last.
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    k, v = (x.repeat(group, axis=2) for x in (k, v))
    scores = np.einsum("bthe,bche->bhtc", q, k) * scale
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    masked = np.where(allowed[:, None], scores, -np.inf)
    if sinks is not None:
        extra = np.broadcast_to(np.asarray(sinks, np.float64)[:, None, None], (*masked.shape[:3], 1))
        masked = np.concatenate([masked, extra], axis=-1)
    top = masked.max(axis=-1, keepdims=True, initial=MASKED_LSE)
    weights = np.exp(masked - top)
    total = weights.sum(axis=-1, keepdims=True)
    attends = total > 0
    weights /= np.where(attends, total, 1)
    sink_weights, weights = weights[..., k.shape[1] :], weights[..., : k.shape[1]]
    out = np.einsum("bhtc,bche->bthe", weights, v)
    lse = np.where(attends, top + np.log(np.where(attends, total, 1)), MASKED_LSE)[..., 0]
    if d_out is None:
        return out, lse
    d_out = np.asarray(d_out).astype(np.float64)
    delta = np.einsum("bthe,bthe->bht", d_out, out) - d_lse
    d_scores = weights * (np.einsum("bthe,bche->bhtc", d_out, v) - delta[..., None])
    d_scores *= scale * (1 if softcap is None else 1 - (scores / softcap) ** 2)
    shared = lambda x: x.reshape(*x.shape[:2], kv_heads, group, -1).sum(axis=3)
    dq = np.einsum("bhtc,bche->bthe", d_scores, k)
    dk, dv = np.einsum("bhtc,bthe->bche", d_scores, q), np.einsum("bhtc,bthe->bche", weights, d_out)
    results = out, lse, dq, shared(dk), shared(dv)
    return results if sinks is None else (*results, -(sink_weights[..., 0] * delta).sum(axis=(0, 2)))


def logprob(hidden, head, targets, *, temperature=1.0, softcap=None, d_logprob=None, d_entropy=0.0):
    """(log-prob, entropy), and with d_logprob also (d_hidden, d_head), of a linear head; hidden is [..., D].

    A target that is no row has log-prob 0; gradients are for targets that are rows.
    """
    hidden, head = (np.asarray(x).astype(np.float64) for x in (hidden, head))
    logits = hidden @ head.T
    logits = (logits if softcap is None else softcap * np.tanh(logits / softcap)) / temperature
    logp = logits - logits.max(axis=-1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(axis=-1, keepdims=True))
    at_target = np.asarray(targets)[..., None] == np.arange(len(head))
    out, entropy = (logp * at_target).sum(axis=-1), -(np.exp(logp) * logp).sum(axis=-1)
    if d_logprob is None:
        return out, entropy
    column = lambda x: np.broadcast_to(np.asarray(x, np.float64), out.shape)[..., None]
    p = np.exp(logp)
    d = column(d_logprob) * (at_target - p) - column(d_entropy) * p * (logp + entropy[..., None])
    d /= temperature
    if softcap is not None:
        d *= 1 - (logits * temperature / softcap) ** 2
    flat = lambda x: x.reshape(-1, x.shape[-1])
    return out, entropy, d @ head, flat(d).T @ flat(hidden)
