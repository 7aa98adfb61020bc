"""Score and update: forward -> token log-probs -> algo.loss -> gradients -> optax.

An update is as many `accumulate` calls as the mini-batch has micro-batches, then one `apply`. All
micro-batches have one shape, so each function compiles once whatever the lengths of the samples.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxrl_kernels.linear_logprob.chunked import linear_logprob
from jaxrl_llm import algos, models
from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.algos.reduce import token_mean
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.sharding.rules import TRAIN, fit
from jaxrl_llm.structs import Batch, Metrics, Params, Signals, TrainState

GradsAndMetrics = tuple[Params, Metrics]


@dataclass(frozen=True)
class ForwardConfig:
    """How the policy is run for scores and gradients."""

    dtype: str = "float32"
    remat: str = "none"
    temperature: float = 1.0  # that of the rollout: log-probs must speak of the same distribution
    chunk: int = 128  # tokens of a row whose logits exist at once


def token_logprobs(
    params: Params, batch: Batch, forward: ForwardConfig
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(log-prob of each target, entropy of each prediction), nats, float32. The one scoring function."""
    dtype = jnp.dtype(forward.dtype)
    hidden, _ = params(batch.tokens, batch.positions, batch.segments, dtype=dtype, remat=forward.remat)
    return linear_logprob(
        hidden,
        params.head.astype(dtype),
        batch.targets,
        temperature=forward.temperature,
        softcap=params.config.logit_softcap,
        chunk=forward.chunk,
    )


class Learner:
    """The jitted functions of one algorithm on one mesh. Holds no state."""

    def __init__(
        self,
        algo: AlgoConfig,
        model: TransformerConfig,
        optimizer: optax.GradientTransformation,
        max_grad_norm: float,
        forward: ForwardConfig,
        mesh: Mesh,
    ):
        self.algo, self.model, self.mesh, self.forward = algo, model, mesh, forward
        self.optimizer = optimizer
        self.param_shardings = models.shardings(model, mesh, TRAIN)
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.score = jax.jit(lambda params, batch: token_logprobs(params, batch, forward)[0])
        self._zeros = jax.jit(
            lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
            out_shardings=self.param_shardings,
        )
        self._accumulate = jax.jit(
            functools.partial(_accumulate, algo=algo, forward=forward),
            donate_argnames=("grads",),
            out_shardings=(self.param_shardings, self.replicated),
        )
        self._apply = jax.jit(
            functools.partial(_apply, optimizer=optimizer, max_grad_norm=max_grad_norm),
            donate_argnames=("state",),
        )

    def abstract_state(self) -> TrainState:
        """Shapes, types and shardings of the TrainState: what a checkpoint is restored into."""
        shapes = jax.eval_shape(self._fresh, models.abstract(self.model))
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self._shardings(shapes)
        )

    def init_state(self, params: Params) -> TrainState:
        """Optimizer state for these (sharded, float32) weights; the weights are taken over, not copied."""
        shardings = self._shardings(jax.eval_shape(self._fresh, params))
        return jax.jit(self._fresh, out_shardings=shardings, donate_argnums=0)(params)

    def put(self, batch: Batch) -> Batch:
        """Host rows to the devices, rows divided among them. Every process holds the same host batch."""

        def place(x: np.ndarray) -> jax.Array:
            sharding = fit(self.mesh, ("batch", "sequence"), x.shape, TRAIN)
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(place, batch)

    def update(
        self, state: TrainState, batches: Sequence[Batch], num_tokens: float, num_sequences: float
    ) -> tuple[TrainState, Metrics]:
        """One optimizer update from the micro-batches of a mini-batch. The state passed in is donated.

        Args:
            batches: on the devices (`put`).
            num_tokens, num_sequences: the global denominators (packing.counts).
        """
        grads = self._zeros(state.params)
        collected = []
        for batch in batches:
            grads, part = self._accumulate(state.params, grads, batch, num_tokens, num_sequences)
            collected.append(part)
        metrics = combine(collected)
        return self._apply(state, grads, metrics)

    def _fresh(self, params: Params) -> TrainState:
        zero = jnp.zeros((), jnp.int32)
        return TrainState(params, self.optimizer.init(params), version=zero, nonfinite=zero)

    def _shardings(self, state: TrainState) -> TrainState:
        """Optimizer moments lie where their weights lie; counters are everywhere."""
        lie = lambda moment, p, s: s if moment.shape == p.shape else self.replicated
        opt = optax.tree.map_params(
            self.optimizer,
            lie,
            state.opt_state,
            state.params,
            self.param_shardings,
            transform_non_params=lambda _: self.replicated,
        )
        return TrainState(self.param_shardings, opt, self.replicated, self.replicated)


def combine(parts: Sequence[Metrics]) -> Metrics:
    """Micro-batch metrics to mini-batch metrics: sums, but maxima for "/max" and "/max_abs"."""
    take = lambda name: jnp.maximum if name.endswith(("/max", "/max_abs")) else jnp.add
    return {name: functools.reduce(take(name), [part[name] for part in parts]) for name in parts[0]}


def _accumulate(
    params: Params,
    grads: Params,
    batch: Batch,
    num_tokens: Float[Array, ""],
    num_sequences: Float[Array, ""],
    *,
    algo: AlgoConfig,
    forward: ForwardConfig,
) -> GradsAndMetrics:
    """Add one micro-batch's gradient."""

    def loss_fn(params):
        policy, entropy = token_logprobs(params, batch, forward)
        if not algo.needs_entropy:
            entropy = jax.lax.stop_gradient(entropy)
        signals = make_signals(batch, policy, entropy, num_tokens, num_sequences)
        loss, metrics = algos.module_of(algo).loss(signals, algo)
        return loss, {"loss": loss, **metrics, **monitor(signals)}

    (_, metrics), new = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return jax.tree.map(jnp.add, grads, new), jax.lax.stop_gradient(metrics)


def make_signals(batch: Batch, policy, entropy, num_tokens, num_sequences) -> Signals:
    """What the loss sees. Masked places read 0, so that garbage there (NaN, Inf) reaches no gradient."""
    clean = lambda x: None if x is None else jnp.where(batch.mask > 0, x, 0.0)
    policy = clean(policy)
    old = jax.lax.stop_gradient(policy) if batch.old is None else clean(batch.old)
    return Signals(
        policy=policy,
        mask=batch.mask,
        segments=batch.segments,
        lengths=batch.lengths,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        entropy=clean(entropy),
        advantages=clean(batch.advantages),
        rollout=clean(batch.rollout),
        old=old,
        reference=clean(batch.reference),
    )


def monitor(signals: Signals) -> Metrics:
    """What every run watches, whatever its loss."""
    metrics = {"entropy": token_mean(signals.entropy, signals)}
    if signals.rollout is not None:  # how far the rollout engine's log-probs are from the trainer's
        gap = jnp.abs(signals.old - signals.rollout)
        metrics["mismatch/mean_abs"] = token_mean(gap, signals)
        metrics["mismatch/max_abs"] = jnp.max(gap, where=signals.mask > 0, initial=0.0)
    return metrics


def _apply(
    state: TrainState,
    grads: Params,
    metrics: Metrics,
    *,
    optimizer: optax.GradientTransformation,
    max_grad_norm: float,
) -> tuple[TrainState, Metrics]:
    """Clip, step, and keep everything as it was if loss or gradient is not finite."""
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"])
    if max_grad_norm:
        scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-12))
        grads = jax.tree.map(lambda g: g * scale, grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    keep = lambda new, old: jnp.where(finite, new, old)
    new_state = TrainState(
        params=jax.tree.map(lambda p, u: keep(p + u, p), state.params, updates),
        opt_state=jax.tree.map(keep, opt_state, state.opt_state),
        version=state.version + finite.astype(jnp.int32),
        nonfinite=jnp.where(finite, 0, state.nonfinite + 1),
    )
    return new_state, {**metrics, "grad_norm": norm, "nonfinite": 1.0 - finite}
