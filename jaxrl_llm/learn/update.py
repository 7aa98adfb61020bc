"""What a device computes: forward -> LossInputs -> algorithm.loss -> gradients -> optax. Pure functions.

An update is as many `accumulate` calls as the mini-batch has micro-batches, then one `apply`. All
micro-batches have one shape, so each function compiles once whatever the lengths of the samples.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxrl_kernels import batch_invariant
from jaxrl_kernels.linear_divergence.chunked import linear_divergence
from jaxrl_kernels.linear_logprob import api
from jaxrl_kernels.linear_logprob.square import linear_square
from jaxrl_llm import algos
from jaxrl_llm.algos.contract import AlgoConfig, Divergence
from jaxrl_llm.algos.reduce import token_mean
from jaxrl_llm.sharding.rules import prediction_layout
from jaxrl_llm.structs import Batch, BatchTotals, LossInputs, Metrics, Params, TrainState

Outputs = dict[str, Float[Array, "B T"]]


@dataclass(frozen=True)
class StepConfig:
    """How a model is run for scores and gradients, and the one shape of a micro-batch."""

    row_tokens: int
    rows: int
    dtype: str = "float32"
    remat: str = "none"
    sequence_parallel: str = "ring"  # where the mesh divides the tokens of a row
    strict: bool = False  # every bit of a log-prob depends on its trajectory alone
    temperature: float = 1.0  # that of the rollout: log-probs must speak of the same distribution
    chunk: int = 128  # tokens of a row whose logits exist at once
    max_grad_norm: float = 1.0  # 0 = no clipping


def outputs(
    params: Params,
    batch: Batch,
    config: StepConfig,
    wants: Sequence[str],
    teachers: Sequence[Params] = (),
    divergence: Divergence | None = None,
) -> Outputs:
    """What a model says at each token, [B, T] float32. The one scoring function.

    Args:
        wants: of "policy" (log-prob of the target, nats), "entropy" (of the prediction, nats),
            "sum_pi_squared" (sum over the vocabulary of p^2), "values" (of the value head) and
            "divergence" (from the teacher's prediction).
        teachers: models, for "divergence"; `batch.labels` says which of several speaks of a token.
        divergence: settings of `linear_divergence`.
    """
    dtype = jnp.dtype(config.dtype)
    how = {"dtype": dtype, **{n: getattr(config, n) for n in ("remat", "sequence_parallel", "strict")}}
    read = lambda model: model(batch.tokens, batch.positions, batch.segments, **how)
    hidden, head, found = read(params), batch_invariant.rounded(params.head, dtype), {}
    settings = dict(temperature=config.temperature, softcap=params.config.logit_softcap, chunk=config.chunk)
    if "policy" in wants:
        layout = {} if config.strict else {"layout": prediction_layout(hidden, head)}
        found["policy"], found["entropy"] = (batch_invariant if config.strict else api).linear_logprob(
            hidden, head, batch.targets, batch.mask, with_entropy="entropy" in wants, **layout, **settings
        )
    if "sum_pi_squared" in wants:
        found["sum_pi_squared"] = linear_square(hidden, head, **settings)
    if "values" in wants:
        found["values"] = params.values(hidden)
    if "divergence" in wants:
        from_each = [
            linear_divergence(
                hidden,
                head,
                jax.lax.stop_gradient(read(teacher)),
                teacher.head.astype(dtype),
                student_softcap=params.config.logit_softcap,
                teacher_softcap=teacher.config.logit_softcap,
                chunk=config.chunk,
                **divergence._asdict(),
            )
            for teacher in teachers
        ]
        speaks = lambda index: jnp.round(batch.labels) == index
        found["divergence"] = sum(jnp.where(speaks(i), each, 0.0) for i, each in enumerate(from_each))
    return {name: found[name] for name in wants}


def wanted(algo: AlgoConfig) -> tuple[str, ...]:
    """The outputs that the algorithm's loss looks at."""
    requires = algos.requirements(algo)
    return (
        ("policy", "entropy") * requires.policy
        + ("values",) * requires.values
        + ("divergence",) * (requires.divergence is not None)
    )


def loss_and_metrics(
    params: Params,
    batch: Batch,
    whole: BatchTotals,
    teachers: Sequence[Params],
    *,
    algo: AlgoConfig,
    config: StepConfig,
) -> tuple[Float[Array, ""], Metrics]:
    """One micro-batch's part of the loss of the mini-batch."""
    requires = algos.requirements(algo)
    found = outputs(params, batch, config, wanted(algo), teachers, requires.divergence)
    if "entropy" in found and not requires.entropy:
        found["entropy"] = jax.lax.stop_gradient(found["entropy"])
    inputs = loss_inputs(batch, found, whole)
    loss, metrics = algos.of(algo).loss(inputs, algo)
    return loss, jax.lax.stop_gradient({"loss": loss, **metrics, **monitor(inputs)})


def accumulate(
    params: Params,
    grads: Params,
    batch: Batch,
    whole: BatchTotals,
    teachers: Sequence[Params],
    *,
    algo: AlgoConfig,
    config: StepConfig,
) -> tuple[Params, Metrics]:
    """Add one micro-batch's gradient."""
    loss_fn = functools.partial(
        loss_and_metrics, batch=batch, whole=whole, teachers=teachers, algo=algo, config=config
    )
    (_, metrics), new = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return jax.tree.map(jnp.add, grads, new), metrics


def baseline(batch: Batch, whole: BatchTotals, *, algo: AlgoConfig) -> Float[Array, "*shape"]:
    """One micro-batch's part of the algorithm's baseline, from what was scored before the update."""
    return algos.of(algo).baseline(loss_inputs(batch, {}, whole), algo)


def loss_inputs(batch: Batch, found: Outputs, whole: BatchTotals) -> LossInputs:
    """What the loss sees. Masked places read 0, so that garbage there (NaN, Inf) reaches no gradient.

    A value speaks of what has been read, not of a token to come: it counts wherever there is no padding.
    """
    clean = lambda x: None if x is None else jnp.where(batch.mask > 0, x, 0.0)
    clean_value = lambda x: None if x is None else jnp.where(batch.segments > 0, x, 0.0)
    policy = clean(found.get("policy", jnp.zeros_like(batch.mask)))
    return LossInputs(
        policy=policy,
        mask=batch.mask,
        segments=batch.segments,
        lengths=batch.lengths,
        num_tokens=whole.num_tokens,
        num_sequences=whole.num_sequences,
        entropy=clean(found.get("entropy")),
        advantages=clean(batch.advantages),
        rollout=clean(batch.rollout),
        old=jax.lax.stop_gradient(policy) if batch.old is None else clean(batch.old),
        reference=clean(batch.reference),
        values=clean_value(found.get("values")),
        old_values=clean(batch.values),
        returns=clean(batch.returns),
        labels=clean(batch.labels),
        divergence=clean(found.get("divergence")),
        kl_coef=whole.kl_coef,
        baseline=whole.baseline,
    )


def monitor(inputs: LossInputs) -> Metrics:
    """What every run watches, whatever its loss."""
    if inputs.entropy is None:
        return {}
    metrics = {"entropy": token_mean(inputs.entropy, inputs)}
    if inputs.rollout is not None:  # how far the rollout engine's log-probs are from the trainer's
        gap = jnp.abs(inputs.old - inputs.rollout)
        metrics["mismatch/mean_abs"] = token_mean(gap, inputs)
        metrics["mismatch/max_abs"] = jnp.max(gap, where=inputs.mask > 0, initial=0.0)
    return metrics


def is_max(name: str) -> bool:
    """Metrics of this name are combined by max, all others by sum."""
    return name.endswith(("/max", "/max_abs"))


def combine(parts: Sequence[Metrics]) -> Metrics:
    """Micro-batch metrics to those of the mini-batch."""
    take = lambda name: jnp.maximum if is_max(name) else jnp.add
    return {name: functools.reduce(take(name), [part[name] for part in parts]) for name in parts[0]}


def average(parts: Sequence[Metrics]) -> Metrics:
    """Mini-batch metrics to those of the step."""
    return {name: value if is_max(name) else value / len(parts) for name, value in combine(parts).items()}


def apply(
    state: TrainState,
    grads: Params,
    metrics: Metrics,
    num_sequences: Float[Array, ""],
    *,
    algo: AlgoConfig,
    optimizer: optax.GradientTransformation,
    max_grad_norm: float,
) -> tuple[TrainState, Metrics]:
    """Clip the gradient, apply one optimizer update, and count it; skip it unless everything stays finite.

    Loss, gradient, update and new weights are checked: a NaN or Inf in any of them leaves weights, moments,
    version and KL coefficient as they were.
    """
    grad_norm = optax.tree.norm(grads)
    if max_grad_norm:
        scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(grad_norm, 1e-12))
        grads = jax.tree.map(lambda g: g * scale, grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    norms = {
        "grad_norm": grad_norm,
        "update_norm": optax.tree.norm(updates),
        "param_norm": optax.tree.norm(params),
    }
    finite = jnp.isfinite(metrics["loss"]) & jnp.all(jnp.isfinite(jnp.stack(list(norms.values()))))
    keep = lambda new, old: jnp.where(finite, new, old)
    new_state = TrainState(
        params=jax.tree.map(keep, params, state.params),
        opt_state=jax.tree.map(keep, opt_state, state.opt_state),
        version=state.version + finite.astype(jnp.int32),
        nonfinite=jnp.where(finite, 0, state.nonfinite + 1),
        kl_coef=keep(algo.next_kl_coef(state.kl_coef, metrics, num_sequences), state.kl_coef),
    )
    return new_state, {**metrics, **norms, "nonfinite": 1.0 - finite}
