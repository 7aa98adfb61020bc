"""How far two models' next-token distributions are apart, without ever holding [B, T, V]."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_kernels.chunks import map_chunks

FAR_BELOW = -1e30  # a logit of no mass; finite, so that no gradient becomes NaN


@functools.partial(
    jax.jit, static_argnames=("beta", "temperature", "top_k", "student_softcap", "teacher_softcap", "chunk")
)
def linear_divergence(
    student_hidden: Float[Array, "B T D"],
    student_head: Float[Array, "V D"],
    teacher_hidden: Float[Array, "B T D2"],
    teacher_head: Float[Array, "V2 D2"],
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    top_k: int = 0,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    chunk: int = 128,
) -> Float[Array, "B T"]:
    """Generalised Jensen-Shannon divergence of teacher P and student Q, nats, float32, a number a position.

        beta 0    KL(P || Q)      forward KL
        beta 1    KL(Q || P)      reverse KL
        between   beta KL(P || M) + (1 - beta) KL(Q || M),  M = beta P + (1 - beta) Q

    as in arXiv 2306.13649 (eq. 1). P and Q are softmax(logits / temperature). With `top_k` the teacher's k
    likeliest tokens are told apart (all that tie with the k-th too) and all others count as one. Where the
    heads have different numbers of rows (one tokenizer, padded differently) those that both have are read.
    Peak memory is one chunk of logits of each model, [B, chunk, V] float32, forward and backward. The
    gradient reaches the student alone. ValueError: beta outside [0, 1], or a temperature not above 0.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta must be in [0, 1], got {beta}")
    if temperature <= 0:
        raise ValueError(f"temperature must be more than 0, got {temperature}")
    teacher_hidden, teacher_head = jax.lax.stop_gradient((teacher_hidden, teacher_head))
    vocab = min(student_head.shape[0], teacher_head.shape[0])
    student_head, teacher_head = student_head[:vocab], teacher_head[:vocab]
    shape = student_hidden.shape[:2]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:  # one token dim, as in linear_logprob
        student_hidden, teacher_hidden = [
            x.reshape(1, -1, x.shape[-1]) for x in (student_hidden, teacher_hidden)
        ]
        chunk *= shape[0]

    @jax.checkpoint
    def one(student, teacher):
        log_q = _log_probs(student, student_head, temperature, student_softcap)
        log_p = _log_probs(teacher, teacher_head, temperature, teacher_softcap)
        if 0 < top_k < log_p.shape[-1]:
            return _of_top(log_p, log_q, top_k, beta)
        return jnp.sum(_terms(log_p, log_q, beta), axis=-1)

    return map_chunks(one, chunk, student_hidden, teacher_hidden).reshape(shape)


def _log_probs(hidden, head, temperature: float, softcap: float | None) -> Float[Array, "B C V"]:
    logits = jnp.einsum("btd,vd->btv", hidden, head, preferred_element_type=jnp.float32)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    return jax.nn.log_softmax(logits / temperature)


def _terms(log_p: Float[Array, "..."], log_q: Float[Array, "..."], beta: float) -> Float[Array, "..."]:
    """What each outcome adds to the divergence, from its log-probs under teacher and student."""
    if beta == 0.0:
        return jnp.exp(log_p) * (log_p - log_q)
    if beta == 1.0:
        return jnp.exp(log_q) * (log_q - log_p)
    log_m = jnp.logaddexp(log_p + jnp.log(beta), log_q + jnp.log1p(-beta))
    return beta * jnp.exp(log_p) * (log_p - log_m) + (1 - beta) * jnp.exp(log_q) * (log_q - log_m)


def _of_top(
    log_p: Float[Array, "B C V"], log_q: Float[Array, "B C V"], k: int, beta: float
) -> Float[Array, "B C"]:
    """Over k + 1 outcomes: the teacher's k likeliest tokens, and all the others together."""
    in_top = log_p >= jax.lax.top_k(log_p, k)[0][..., -1:]
    rest = lambda log: jax.nn.logsumexp(jnp.where(in_top, FAR_BELOW, log), axis=-1)
    told_apart = jnp.sum(jnp.where(in_top, _terms(log_p, log_q, beta), 0.0), axis=-1)
    return told_apart + _terms(rest(log_p), rest(log_q), beta)
