"""Score and update: forward -> token log-probs -> algo.loss -> gradients -> optax.

An update is as many `accumulate` calls as the mini-batch has micro-batches, then one `apply`. All
micro-batches have one shape, so each function compiles once whatever the lengths of the samples.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from jaxrl_llm.data.packing import PackItem, counts, pack
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.sharding.rules import TRAIN, fit
from jaxrl_llm.structs import Batch, Metrics, Params, Signals, TrainState

GradsAndMetrics = tuple[Params, Metrics]


@dataclass(frozen=True)
class StepConfig:
    """How the policy is run for scores and gradients, and the one shape of a micro-batch."""

    row_tokens: int
    rows: int
    dtype: str = "float32"
    remat: str = "none"
    temperature: float = 1.0  # that of the rollout: log-probs must speak of the same distribution
    chunk: int = 128  # tokens of a row whose logits exist at once
    max_grad_norm: float = 1.0  # 0 = no clipping


def token_logprobs(
    params: Params, batch: Batch, config: StepConfig
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(log-prob of each target, entropy of each prediction), nats, float32. The one scoring function."""
    dtype = jnp.dtype(config.dtype)
    hidden, _ = params(batch.tokens, batch.positions, batch.segments, dtype=dtype, remat=config.remat)
    return linear_logprob(
        hidden,
        params.head.astype(dtype),
        batch.targets,
        temperature=config.temperature,
        softcap=params.config.logit_softcap,
        chunk=config.chunk,
    )


class Learner:
    """The jitted functions of one algorithm on one mesh. Holds no state."""

    def __init__(
        self,
        algo: AlgoConfig,
        model: TransformerConfig,
        optimizer: optax.GradientTransformation,
        config: StepConfig,
        mesh: Mesh,
    ):
        self.algo, self.model, self.optimizer, self.config, self.mesh = algo, model, optimizer, config, mesh
        self.param_shardings = models.shardings(model, mesh, TRAIN)
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.state_shapes = jax.eval_shape(self._fresh, models.abstract(model))
        self.state_shardings = self._shardings(self.state_shapes)
        self.score = jax.jit(lambda params, batch: token_logprobs(params, batch, config)[0])
        self._zeros = jax.jit(
            lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
            out_shardings=self.param_shardings,
        )
        self._accumulate = jax.jit(
            functools.partial(_accumulate, algo=algo, config=config),
            donate_argnames=("grads",),
            out_shardings=(self.param_shardings, self.replicated),
        )
        self._apply = jax.jit(
            functools.partial(_apply, optimizer=optimizer, max_grad_norm=config.max_grad_norm),
            donate_argnames=("state",),
            out_shardings=(self.state_shardings, self.replicated),
        )

    def abstract_state(self) -> TrainState:
        """Shapes, types and shardings of the TrainState: what a checkpoint is restored into."""
        put = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        return jax.tree.map(put, self.state_shapes, self.state_shardings)

    def init_state(self, params: Params) -> TrainState:
        """Optimizer state for these (sharded, float32) weights; the weights are taken over, not copied."""
        return jax.jit(self._fresh, out_shardings=self.state_shardings, donate_argnums=0)(params)

    def put(self, batch: Batch) -> Batch:
        """Host rows to the devices, rows divided among them. Every process holds the same host batch."""

        def place(x: np.ndarray) -> jax.Array:
            sharding = fit(self.mesh, ("batch", "sequence"), x.shape, TRAIN)
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(place, batch)

    def update(
        self, state: TrainState, minibatches: Sequence[Sequence[PackItem]], reference: Params | None = None
    ) -> tuple[TrainState, Metrics]:
        """One optimizer update for each mini-batch, in order. The state passed in is donated.

        With several mini-batches the old log-probs are those of the policy before the first update.
        """
        packed = [
            [self.put(b) for b in pack(items, self.config.row_tokens, self.config.rows)]
            for items in minibatches
        ]
        if len(packed) > 1 and algos.module_of(self.algo).INPUT == "rollouts":
            packed = [[replace(b, old=self.score(state.params, b)) for b in batches] for batches in packed]
        if self.algo.needs_reference:
            packed = [[replace(b, reference=self.score(reference, b)) for b in batches] for batches in packed]
        collected = []
        for items, batches in zip(minibatches, packed, strict=True):
            state, metrics = self.update_minibatch(state, batches, *counts(items))
            collected.append(metrics)
        return state, {
            name: value if is_max(name) else value / len(collected)
            for name, value in combine(collected).items()
        }

    def update_minibatch(
        self, state: TrainState, batches: Sequence[Batch], num_tokens: float, num_sequences: float
    ) -> tuple[TrainState, Metrics]:
        """One optimizer update from micro-batches on the devices and their global denominators."""
        grads = self._zeros(state.params)
        parts = []
        for batch in batches:
            grads, part = self._accumulate(state.params, grads, batch, num_tokens, num_sequences)
            parts.append(part)
        return self._apply(state, grads, combine(parts))

    def _fresh(self, params: Params) -> TrainState:
        zero = jnp.zeros((), jnp.int32)
        kl_coef = jnp.float32(self.algo.initial_kl_coef)
        return TrainState(params, self.optimizer.init(params), zero, zero, kl_coef)

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
        return TrainState(self.param_shardings, opt, *[self.replicated] * 3)


def is_max(name: str) -> bool:
    """Metrics of this name are combined by max, all others by sum."""
    return name.endswith(("/max", "/max_abs"))


def combine(parts: Sequence[Metrics]) -> Metrics:
    """Micro-batch metrics to those of the mini-batch."""
    take = lambda name: jnp.maximum if is_max(name) else jnp.add
    return {name: functools.reduce(take(name), [part[name] for part in parts]) for name in parts[0]}


def _accumulate(
    params: Params,
    grads: Params,
    batch: Batch,
    num_tokens: Float[Array, ""],
    num_sequences: Float[Array, ""],
    *,
    algo: AlgoConfig,
    config: StepConfig,
) -> GradsAndMetrics:
    """Add one micro-batch's gradient."""

    def loss_fn(params):
        policy, entropy = token_logprobs(params, batch, config)
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
        kl_coef=state.kl_coef,
    )
    return new_state, {**metrics, "grad_norm": norm, "nonfinite": 1.0 - finite}
