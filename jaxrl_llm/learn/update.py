"""Pure functions of an update: forward -> LossInputs -> algorithm.loss -> gradients -> optax.

An update is one `accumulate` for each micro-batch of a mini-batch, then one `apply`. All micro-batches have
one shape, so each function compiles once for sequences of any length.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, UInt

from jaxrl_kernels import batch_invariant
from jaxrl_kernels.linear_divergence.chunked import linear_divergence
from jaxrl_kernels.linear_logprob import api
from jaxrl_kernels.linear_logprob.square import linear_square
from jaxrl_llm import algos
from jaxrl_llm.algos.config import AlgoConfig
from jaxrl_llm.algos.contract import Divergence, Requirements
from jaxrl_llm.algos.correction import monitor
from jaxrl_llm.algos.kl import next_entropy_coef, next_kl_coef
from jaxrl_llm.learn.finite import (
    UpdateStep,
    add_gradients,
    new_gradients,
    next_loss_scale,
    scale_loss,
    update_by_leaf,
    update_if_finite,
)
from jaxrl_llm.learn.kept_sets import kept_logprobs
from jaxrl_llm.learn.moe_losses import ROUTES, ROUTING, Replay, routing_metrics, with_bias_gradient
from jaxrl_llm.learn.optim_states import master_weights, stored_weights
from jaxrl_llm.models import lora
from jaxrl_llm.models.experts.router import RoutingSums
from jaxrl_llm.sharding.rules import logprob_specs
from jaxrl_llm.structs import Batch, BatchTotals, LossInputs, Metrics, Params, Sharing, TrainState

Outputs = dict[str, Float[Array, "B T"] | UInt[Array, "B T L K"] | RoutingSums]


@dataclass(frozen=True)
class StepConfig:
    """Settings of a model's forward pass, and the shape of a micro-batch."""

    row_tokens: int
    rows: int
    dtype: str = "float32"
    remat: str = "none"
    sequence_parallel: str = "ring"  # context parallelism, if the mesh divides the tokens of a row
    share_prefixes: Sharing = False  # a row stores shared prefixes of its trajectories once
    whole_sequences: bool = False  # the contexts of a trajectory are in one row, shared or not
    strict: bool = False  # batch-invariant: a log-prob depends, bit for bit, on its trajectory alone
    temperature: float = 1.0  # of the rollout: its log-probs are of the softmax at this temperature
    score_rows: int = 0  # rows of a micro-batch that is scored without gradient; 0 = rows
    chunk: int = 128  # tokens of a row whose logits are in memory at once
    max_grad_norm: float = 1.0  # 0 = no clipping
    grad_dtype: str = "float32"  # of gradients in memory
    update_by_leaf: bool = True  # for optimizers that treat every weight by itself, see `learn.finite`
    offload: bool = False  # optimizer moments in host memory between updates
    num_kept: int = 0  # ids of a kept set, over which log-probs are (`SamplingConfig.kept_sets`); 0 = none
    balance_coef: float = 0.0  # of the balance loss of experts
    replay: Replay | None = None  # of routes
    old_logprobs_source: Literal["policy", "recompute", "rollout"] = "policy"  # see `choose_old_logprobs`

    @property
    def rows_scored(self) -> int:
        """Rows of a micro-batch that is scored."""
        return self.score_rows or self.rows


def model_outputs(
    params: Params,
    batch: Batch,
    config: StepConfig,
    names: Sequence[str],
    *,
    teachers: Sequence[Params] = (),
    divergence: Divergence | None = None,
) -> Outputs:
    """Return outputs of a model, [B, T] float32 at each token: the one forward for scoring and training.

    Args:
        names: of "logprobs" (log-prob of the target, nats), "entropy" (of the prediction, nats),
            "sum_pi_squared" (sum over the vocabulary of p^2), "values" (of the value head),
            "divergence" (from the teacher's prediction), ROUTING (`RoutingSums`) and ROUTES [B, T, L, K].
        teachers: models, for "divergence"; `batch.labels` holds the index of a token's teacher.
        divergence: settings of `linear_divergence`.
    """
    dtype = jnp.dtype(config.dtype)
    settings = {"last": batch.last, "dtype": dtype, "remat": config.remat, "strict": config.strict}
    settings["sequence_parallel"] = config.sequence_parallel
    rows = batch.tokens, batch.positions, batch.segments
    # One forward pass, whatever is asked of it.
    hidden, sums, routes = params.forward(*rows, batch.routes, **settings)
    head = batch_invariant.rounded(params.head, dtype)
    softmax = dict(temperature=config.temperature, softcap=params.config.logit_softcap, chunk=config.chunk)
    outputs = {ROUTING: sums, ROUTES: routes}
    if "logprobs" in names or "entropy" in names:
        layout = {} if config.strict else {"partition_specs": logprob_specs(hidden, head)}
        outputs["logprobs"], outputs["entropy"] = (batch_invariant if config.strict else api).linear_logprob(
            hidden, head, batch.targets, batch.mask, with_entropy="entropy" in names, **layout, **softmax
        )
        if batch.kept is not None:
            outputs["logprobs"] = kept_logprobs(params, hidden, batch, config)
    if "sum_pi_squared" in names:
        outputs["sum_pi_squared"] = linear_square(hidden, head, **softmax)
    if "values" in names:
        outputs["values"] = params.values(hidden)
    # Each teacher's divergence at all tokens; a token keeps its teacher's.
    if "divergence" in names:
        by_teacher = [
            linear_divergence(
                hidden,
                head,
                jax.lax.stop_gradient(teacher(*rows, **settings)),
                teacher.head.astype(dtype),
                student_softcap=params.config.logit_softcap,
                teacher_softcap=teacher.config.logit_softcap,
                chunk=config.chunk,
                **divergence._asdict(),
            )
            for teacher in teachers
        ]
        index = jnp.round(batch.labels)
        outputs["divergence"] = sum(jnp.where(index == i, d, 0.0) for i, d in enumerate(by_teacher))
    return {name: outputs[name] for name in names}


def loss_outputs(requires: Requirements) -> tuple[str, ...]:
    """Return the outputs that a loss reads."""
    return (
        ("logprobs", "entropy") * requires.logprobs
        + ("sum_pi_squared",) * requires.square_in_loss
        + ("values",) * requires.values
        + ("divergence",) * (requires.divergence is not None)
    )


def loss_and_metrics(
    params: Params,
    batch: Batch,
    totals: BatchTotals,
    teachers: Sequence[Params],
    *,
    algo: AlgoConfig,
    config: StepConfig,
) -> tuple[Float[Array, ""], tuple[Metrics, Float[Array, "B T"]]]:
    """Return one micro-batch's part of loss and metrics of the mini-batch, and the policy's log-probs."""
    requires = algos.requirements(algo)
    names = loss_outputs(requires) + (ROUTING,) * (params.config.moe is not None)
    outputs = model_outputs(params, batch, config, names, teachers=teachers, divergence=requires.divergence)
    if "entropy" in outputs and not requires.entropy:
        outputs["entropy"] = jax.lax.stop_gradient(outputs["entropy"])
    inputs = loss_inputs(batch, outputs, totals)
    loss, metrics = algos.of(algo).loss(inputs, algo)
    if jnp.ndim(loss):  # `jax.vjp` takes any
        raise TypeError(f"the loss is a scalar, here it has shape {jnp.shape(loss)}")
    if totals.balance_weights is not None:
        loss += config.balance_coef * jnp.sum(totals.balance_weights * outputs[ROUTING].scores)
    metrics = {"loss": loss, **metrics, **monitor(inputs, config.old_logprobs_source)}
    if ROUTING in outputs:
        metrics[ROUTING] = outputs[ROUTING]
    return loss, jax.lax.stop_gradient((metrics, inputs.logprobs))


class LossArrays(NamedTuple):
    """Arrays that the loss of a micro-batch reads besides the trained weights."""

    batch: Batch
    totals: BatchTotals
    teachers: Sequence[Params]
    frozen: Params  # the other part of the model (`models.lora.split_params`)


def accumulate(
    trained: Params, grads: Params | None, arrays: LossArrays, *, algo: AlgoConfig, config: StepConfig
) -> tuple[Params, Metrics, Float[Array, "B T"]]:
    """Return the gradients of the trained weights plus one micro-batch's, its metrics and log-probs.

    Args:
        grads: like `trained`; None = this is the only micro-batch: its gradients need no buffer.
    """
    batch, totals, teachers, frozen = arrays

    def loss_fn(trained):
        params = lora.join_params(trained, frozen)
        loss, outputs = loss_and_metrics(params, batch, totals, teachers, algo=algo, config=config)
        return scale_loss(loss, totals.loss_scale), outputs

    loss, backward, (metrics, logprobs) = jax.vjp(loss_fn, trained, has_aux=True)
    scale = totals.loss_scale
    if grads is None:
        new = new_gradients(backward, loss, trained, loss_scale=scale, dtype=config.grad_dtype)
        return new, metrics, logprobs
    return add_gradients(backward, loss, trained, grads, loss_scale=scale), metrics, logprobs


def baseline(batch: Batch, totals: BatchTotals, *, algo: AlgoConfig) -> Float[Array, "*shape"]:
    """Return one micro-batch's part of the algorithm's baseline, from scores before the update."""
    return algos.of(algo).baseline(loss_inputs(batch, {}, totals), algo)


def loss_inputs(batch: Batch, outputs: Outputs, totals: BatchTotals) -> LossInputs:
    """Return the inputs of the loss. Masked places read 0, so that NaN or Inf there reaches no gradient.
    Values are defined at every non-padding position, not only at trained tokens.
    """
    clean = lambda x: None if x is None else jnp.where(batch.mask > 0, x, 0.0)
    clean_value = lambda x: None if x is None else jnp.where(batch.segments > 0, x, 0.0)
    # Tokens outside the mask are not read; old log-probs default to the present ones.
    logprobs = clean(outputs.get("logprobs", jnp.zeros_like(batch.mask)))
    return LossInputs(
        logprobs=logprobs,
        mask=batch.mask,
        segments=batch.segments if batch.sequences is None else batch.sequences,
        lengths=batch.lengths,
        num_tokens=totals.num_tokens,
        num_sequences=totals.num_sequences,
        entropy=clean(outputs.get("entropy")),
        sum_pi_squared=jax.lax.stop_gradient(clean(outputs.get("sum_pi_squared"))),
        advantages=clean(batch.advantages),
        rollout_logprobs=clean(batch.rollout_logprobs),
        old_logprobs=jax.lax.stop_gradient(logprobs)
        if batch.old_logprobs is None
        else clean(batch.old_logprobs),
        ref_logprobs=clean(batch.ref_logprobs),
        values=clean_value(outputs.get("values")),
        old_values=clean(batch.values),
        returns=clean(batch.returns),
        labels=clean(batch.labels),
        divergence=clean(outputs.get("divergence")),
        kl_coef=totals.kl_coef,
        entropy_coef=None if totals.entropy_coef is None else totals.entropy_coef[1],
        baseline=totals.baseline,
    )


def apply(
    state: TrainState,
    grads: Params,
    metrics: Metrics,
    num_sequences: Float[Array, ""],
    *,
    algo: AlgoConfig,
    optimizer: optax.GradientTransformation,
    max_grad_norm: float,
    by_leaf: bool = True,
) -> tuple[TrainState, Metrics]:
    """Clip the gradient and apply one optimizer update; skip it unless all numbers are finite.

    The state holds the trained weights alone (`models.lora.split_params`).

    Loss, gradient, update and new weights are checked: a NaN or Inf in any of them leaves weights, moments,
    version and KL coefficient as they were.

    Args:
        by_leaf: see `learn.finite.update_by_leaf`.
    """
    # The gradient's norm is of all weights, before clipping.
    metrics, routing = routing_metrics(metrics)
    grad_norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))

    def step(params, opt_state, grads):
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        if max_grad_norm:
            scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(grad_norm, 1e-12))
            grads = jax.tree.map(lambda g: g * scale, grads)
        grads = with_bias_gradient(grads, routing)
        masters = master_weights(params, opt_state)
        updates, opt_state = optimizer.update(grads, opt_state, masters)
        masters = optax.apply_updates(masters, updates)
        return UpdateStep(updates, masters, stored_weights(masters, opt_state), opt_state)

    update = functools.partial(update_by_leaf, optimizer) if by_leaf else update_if_finite
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(grad_norm)
    new = update(step, (state.params, state.opt_state, grads), finite)
    # Controllers move only after an update that was applied.
    kl_coef = next_kl_coef(algo, state.kl_coef, metrics, num_sequences)
    entropy_coef = state.entropy_coef
    if entropy_coef is not None:
        metrics = {**metrics, "entropy_coef": entropy_coef[1]}
        entropy_coef = jnp.where(new.finite, next_entropy_coef(algo, entropy_coef, metrics), entropy_coef)
    version = state.version + new.finite.astype(jnp.int32)
    scaling = {} if state.loss_scale is None else {"loss_scale": state.loss_scale}
    new_state = TrainState(
        params=new.params,
        opt_state=new.opt_state,
        version=version,
        nonfinite=jnp.where(new.finite, 0, state.nonfinite + 1),
        kl_coef=jnp.where(new.finite, kl_coef, state.kl_coef),
        loss_scale=next_loss_scale(state.loss_scale, new.finite, version),
        entropy_coef=entropy_coef,
    )
    norms = {"grad_norm": grad_norm, **new.norms, **scaling}
    return new_state, {**metrics, **norms, "nonfinite": 1.0 - new.finite}
