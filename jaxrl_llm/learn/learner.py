"""Learner: the jitted functions of one model under one algorithm on one mesh."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm import algos, models
from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.data.packing import PackItem, counts, empty_batch, pack, unpack
from jaxrl_llm.learn.update import (
    StepConfig,
    accumulate,
    apply,
    average,
    baseline,
    combine,
    loss_and_metrics,
    outputs,
)
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.sharding.rules import TRAIN, laid_out, put_rows, row_sharding
from jaxrl_llm.structs import Batch, BatchTotals, Metrics, Params, Program, TrainState


class Learner:
    """Scores and updates. Holds no state: weights and optimizer go in and come out."""

    def __init__(
        self,
        algo: AlgoConfig,
        model: TransformerConfig,
        optimizer: optax.GradientTransformation,
        config: StepConfig,
        mesh: Mesh,
    ):
        self.algo, self.model, self.optimizer, self.config, self.mesh = algo, model, optimizer, config, mesh
        self.group_size = algos.of(algo).group_size
        self.param_shardings = models.shardings(model, mesh, TRAIN)
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.state_shapes = jax.eval_shape(self._fresh, models.abstract(model))
        self.state_shardings = self._shardings(self.state_shapes)
        self._score = jax.jit(
            functools.partial(outputs, config=config),
            static_argnames=("wants",),
            out_shardings=self.replicated,  # every process reads the whole
        )
        self._zeros = jax.jit(
            lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
            out_shardings=self.param_shardings,
        )
        self._accumulate = jax.jit(
            functools.partial(accumulate, algo=algo, config=config),
            donate_argnames=("grads",),
            out_shardings=(self.param_shardings, self.replicated),
        )
        self._measure = jax.jit(functools.partial(loss_and_metrics, algo=algo, config=config))
        self._baseline = jax.jit(functools.partial(baseline, algo=algo))
        self._apply = jax.jit(
            functools.partial(apply, algo=algo, optimizer=optimizer, max_grad_norm=config.max_grad_norm),
            donate_argnames=("state",),
            out_shardings=(self.state_shardings, self.replicated),
        )

    def abstract_state(self) -> TrainState:
        """Shapes, types and shardings of the TrainState: what a checkpoint is restored into."""
        return laid_out(self.state_shapes, self.state_shardings)

    def abstract_batch(self, signals: Sequence[str] = ()) -> Batch:
        """Shapes, types and shardings of a micro-batch with these optional arrays."""
        empty = empty_batch(self.config.rows, self.config.row_tokens, signals)
        return laid_out(empty, jax.tree.map(lambda x: row_sharding(self.mesh, x.shape), empty))

    def score_call(self, params: Params, wants: tuple[str, ...]) -> Call:
        """What `score` calls for each micro-batch."""
        return Program(self._score, (params, self.abstract_batch()), {"wants": wants})

    def update_calls(self, signals: Sequence[str], teachers: Sequence[Params] = ()) -> dict[str, Program]:
        """What `update` calls for each micro-batch ("accumulate") and at its end ("apply")."""
        state, batch = self.abstract_state(), self.abstract_batch(signals)
        number = jax.ShapeDtypeStruct((), jnp.float32)
        whole = BatchTotals(number, number, state.kl_coef)
        with jax.set_mesh(self.mesh):
            if algos.of(self.algo).baseline:
                whole = replace(whole, baseline=jax.eval_shape(self._baseline, batch, whole))
            args = (state.params, state.params, batch, whole, tuple(teachers))  # gradients are like weights
            _, metrics = jax.eval_shape(self._accumulate, *args)
        metrics = laid_out(metrics, jax.tree.map(lambda _: self.replicated, metrics))
        return {
            "accumulate": Program(self._accumulate, args, {}),
            "apply": Program(self._apply, (state, state.params, metrics, number), {}),
        }

    def init_state(self, params: Params) -> TrainState:
        """Optimizer state for these (sharded, float32) weights; the weights are taken over, not copied."""
        with jax.set_mesh(self.mesh):
            return jax.jit(self._fresh, out_shardings=self.state_shardings, donate_argnums=0)(params)

    def put(self, batch: Batch) -> Batch:
        """Host rows to the devices, rows divided among them. Every process holds the same host batch."""
        return put_rows(self.mesh, batch)

    def score(
        self, params: Params, items: Sequence[PackItem], wants: tuple[str, ...] = ("policy",)
    ) -> list[dict[str, np.ndarray]]:
        """`step.outputs` for each item, [t] aligned with its tokens (the first reads 0), without gradient."""
        bare = [PackItem(item.tokens, item.mask) for item in items]
        with jax.set_mesh(self.mesh):
            found = [self._score(params, batch, wants=wants) for batch in self._batches(bare)]
        by_name = {
            name: unpack([np.asarray(f[name]) for f in found], bare, self.config.row_tokens, self.group_size)
            for name in wants
        }
        return [dict(zip(wants, arrays, strict=True)) for arrays in zip(*by_name.values(), strict=True)]

    def update(
        self, state: TrainState, minibatches: Sequence[Sequence[PackItem]], teachers: Sequence[Params] = ()
    ) -> tuple[TrainState, Metrics]:
        """One optimizer update for each mini-batch, in order. The state passed in is donated."""
        collected = []
        for items in minibatches:
            batches = self._batches(items)
            state, metrics = self.update_minibatch(state, batches, *counts(items, self.group_size), teachers)
            collected.append(metrics)
        with jax.set_mesh(self.mesh):
            return state, average(collected)

    def update_minibatch(
        self,
        state: TrainState,
        batches: Sequence[Batch],
        num_tokens: float,
        num_sequences: float,
        teachers: Sequence[Params] = (),
    ) -> tuple[TrainState, Metrics]:
        """One optimizer update from micro-batches on the devices and their global denominators."""
        with jax.set_mesh(self.mesh):
            whole = self._whole(batches, num_tokens, num_sequences, state.kl_coef)
            grads = self._zeros(state.params)
            parts = []
            for batch in batches:
                grads, part = self._accumulate(state.params, grads, batch, whole, tuple(teachers))
                parts.append(part)
            return self._apply(state, grads, combine(parts), whole.num_sequences)

    def measure(
        self, state: TrainState, items: Sequence[PackItem], teachers: Sequence[Params] = ()
    ) -> Metrics:
        """Loss and metrics of these items as one mini-batch, without learning from them."""
        batches = self._batches(items)
        with jax.set_mesh(self.mesh):
            whole = self._whole(batches, *counts(items, self.group_size), state.kl_coef)
            return combine([self._measure(state.params, b, whole, tuple(teachers))[1] for b in batches])

    def _batches(self, items: Sequence[PackItem]) -> list[Batch]:
        return [self.put(b) for b in pack(items, self.config.row_tokens, self.config.rows, self.group_size)]

    def _whole(
        self, batches: Sequence[Batch], num_tokens: float, num_sequences: float, kl_coef
    ) -> BatchTotals:
        whole = BatchTotals(np.float32(num_tokens), np.float32(num_sequences), kl_coef)
        if not algos.of(self.algo).baseline:
            return whole
        return replace(whole, baseline=sum(self._baseline(batch, whole) for batch in batches))

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
