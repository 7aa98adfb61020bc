"""Divergence of two models' next-token distributions, in chunks: [B, T, V] is never in memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_kernels.chunks import map_chunks
from jaxrl_kernels.linear_divergence.reference import divergence, top_tokens, vocabulary_logprobs


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
    """Compute the generalised Jensen-Shannon divergence of teacher P and student Q, float32 nats a position.

        beta 0    KL(P || Q)      forward KL
        beta 1    KL(Q || P)      reverse KL
        between   beta KL(P || M) + (1 - beta) KL(Q || M),  M = beta P + (1 - beta) Q

    as in arXiv 2306.13649 (eq. 1). P and Q are softmax(logits / temperature). If the heads have different
    numbers of rows (the same tokenizer, padded differently), only the shared rows are used. Peak memory is
    one chunk of logits of each model, [B, chunk, V] float32, forward and backward. Only the student gets a
    gradient.

    Args:
        top_k: keep the teacher's k likeliest tokens (and all that tie with the k-th), pool the rest into one
            outcome; 0 = keep all.
        chunk: tokens of a row whose logits are in memory at once.

    Raises:
        ValueError: beta outside [0, 1], or a temperature not above 0.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta must be in [0, 1], got {beta}")
    if temperature <= 0:
        raise ValueError(f"temperature must be more than 0, got {temperature}")
    teacher_hidden, teacher_head = jax.lax.stop_gradient((teacher_hidden, teacher_head))
    # Use the rows that both heads have; the teacher gets no gradient.
    vocab = min(student_head.shape[0], teacher_head.shape[0])
    student_head, teacher_head = student_head[:vocab], teacher_head[:vocab]
    shape = student_hidden.shape[:2]
    # On one device all tokens form one dim, so that chunks are full.
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:  # one token dim, as in linear_logprob
        student_hidden, teacher_hidden = [
            x.reshape(1, -1, x.shape[-1]) for x in (student_hidden, teacher_hidden)
        ]
        chunk *= shape[0]
    wide = student_head.astype(jnp.float32)  # the gradients of chunks are added in the type that is read here

    @jax.checkpoint
    def one(student, teacher):
        product = functools.partial(jnp.einsum, "btd,vd->btv", preferred_element_type=jnp.float32)
        of_student = product(student, wide.astype(student_head.dtype))
        of_teacher = product(teacher, teacher_head)
        log_q = vocabulary_logprobs(of_student, temperature, student_softcap)
        log_p = vocabulary_logprobs(of_teacher, temperature, teacher_softcap)
        return divergence(log_p, log_q, beta, top_tokens(of_teacher, top_k))

    return map_chunks(one, chunk, student_hidden, teacher_hidden).reshape(shape)
