"""Learner: the jitted functions of one model under one algorithm on one mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm import algos, models
from jaxrl_llm.algos.contract import AlgoConfig
from jaxrl_llm.data.packing import PackItem, counts, empty_batch, pack, unpack
from jaxrl_llm.learn.loss_scale import initial_loss_scale
from jaxrl_llm.learn.optim_states import is_moment, moment_shardings, stored_weights
from jaxrl_llm.learn.update import (
    StepConfig,
    accumulate,
    apply,
    average,
    baseline,
    combine,
    loss_and_metrics,
    model_outputs,
)
from jaxrl_llm.models import TransformerConfig, lora
from jaxrl_llm.models.transformer import cast_weights
from jaxrl_llm.sharding.rules import TRAIN, on_device, on_host, put_rows, row_sharding, with_shardings
from jaxrl_llm.structs import Batch, BatchTotals, Metrics, Params, Program, TrainState


class Learner:
    """Score and update one model. Stateless: weights and optimizer state are arguments and results."""

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
        self.grad_shardings = lora.split_params(self.param_shardings)[0]
        self._score = jax.jit(
            functools.partial(model_outputs, config=config),
            static_argnames=("names",),
            out_shardings=self.replicated,  # every process reads all of it
        )
        self._zeros = jax.jit(
            lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape, config.grad_dtype), params),
            out_shardings=self.grad_shardings,
        )
        self._accumulate = jax.jit(
            functools.partial(accumulate, algo=algo, config=config),
            donate_argnames=("grads",),
            out_shardings=(self.grad_shardings, self.replicated),
        )
        self._measure = jax.jit(functools.partial(loss_and_metrics, algo=algo, config=config))
        self._baseline = jax.jit(functools.partial(baseline, algo=algo))
        self._apply = jax.jit(
            self._on_devices(
                functools.partial(
                    apply,
                    algo=algo,
                    optimizer=optimizer,
                    max_grad_norm=config.max_grad_norm,
                    by_leaf=config.update_by_leaf,
                )
            ),
            donate_argnames=("state",),
            out_shardings=(lora.trained_state(self.state_shardings), self.replicated),
        )

    def abstract_state(self) -> TrainState:
        """Return shapes, types and shardings of the TrainState, to restore a checkpoint into."""
        return with_shardings(self.state_shapes, self.state_shardings)

    def abstract_batch(self, signals: Sequence[str], rows: int) -> Batch:
        """Return shapes, types and shardings of a micro-batch with these signals."""
        empty = empty_batch(rows, self.config.row_tokens, signals)
        return with_shardings(empty, jax.tree.map(lambda x: row_sharding(self.mesh, x.shape), empty))

    def score_program(self, params: Params, names: tuple[str, ...]) -> Program:
        """Return the program that `score` runs for each micro-batch."""
        batch = self.abstract_batch((), self.config.rows_scored)
        return Program(self._score, (params, batch), {"names": names})

    def update_programs(
        self, signals: Sequence[str], teachers: Sequence[Params] = (), microbatches: int = 2
    ) -> dict[str, Program]:
        """Return the programs that `update` runs for each micro-batch ("accumulate") and after ("apply")."""
        state, batch = self.abstract_state(), self.abstract_batch(signals, self.config.rows)
        number = jax.ShapeDtypeStruct((), jnp.float32)
        totals = BatchTotals(number, number, state.kl_coef, loss_scale=state.loss_scale)
        with jax.set_mesh(self.mesh):
            if algos.of(self.algo).baseline:
                totals = replace(totals, baseline=jax.eval_shape(self._baseline, batch, totals))
            trained, frozen = lora.split_params(state.params)
            zeros = jax.eval_shape(self._zeros, trained) if microbatches > 1 else None
            zeros = zeros and with_shardings(zeros, self.grad_shardings)
            args = (trained, zeros, batch, totals, tuple(teachers), frozen)
            grads, metrics = jax.eval_shape(self._accumulate, *args)
        grads = with_shardings(grads, self.grad_shardings)
        metrics = with_shardings(metrics, jax.tree.map(lambda _: self.replicated, metrics))
        return {
            "accumulate": Program(self._accumulate, args, {}),
            "apply": Program(self._apply, (lora.trained_state(state), grads, metrics, number), {}),
        }

    def init_state(self, params: Params) -> TrainState:
        """Return a state with a fresh optimizer; these float32 weights are donated to it.

        Frozen weights take the compute type, except norms.
        """
        with jax.set_mesh(self.mesh):
            return jax.jit(self._fresh, out_shardings=self.state_shardings, donate_argnums=0)(params)

    def put(self, batch: Batch) -> Batch:
        """Move host rows to the devices, divided among them. Every process holds the same host batch."""
        return put_rows(self.mesh, batch)

    def score(
        self, params: Params, items: Sequence[PackItem], names: tuple[str, ...] = ("policy",)
    ) -> list[dict[str, np.ndarray]]:
        """Return `model_outputs` of each item, [t] aligned with its tokens (the first is 0). No gradient."""
        bare = [PackItem(item.tokens, item.mask) for item in items]
        with jax.set_mesh(self.mesh):
            batches = self._batches(bare, self.config.rows_scored)
            results = [self._score(params, batch, names=names) for batch in batches]
        by_name = {
            name: unpack(
                [np.asarray(r[name]) for r in results], bare, self.config.row_tokens, self.group_size
            )
            for name in names
        }
        return [dict(zip(names, arrays, strict=True)) for arrays in zip(*by_name.values(), strict=True)]

    def update(
        self, state: TrainState, minibatches: Sequence[Sequence[PackItem]], teachers: Sequence[Params] = ()
    ) -> tuple[TrainState, Metrics]:
        """Apply one optimizer update for each mini-batch, in order. The state passed in is donated."""
        collected = []
        for items in minibatches:
            batches = self._batches(items, self.config.rows)
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
        """Apply one optimizer update from micro-batches on the devices and their global denominators."""
        with jax.set_mesh(self.mesh):
            totals = self._totals(batches, num_tokens, num_sequences, state)
            trained, frozen = lora.split_params(state.params)
            grads = self._zeros(trained) if len(batches) > 1 else None
            parts = []
            for batch in batches:
                grads, part = self._accumulate(trained, grads, batch, totals, tuple(teachers), frozen)
                parts.append(part)
            new, metrics = self._apply(lora.trained_state(state), grads, combine(parts), totals.num_sequences)
            return lora.with_frozen(new, frozen), metrics

    def measure(
        self, state: TrainState, items: Sequence[PackItem], teachers: Sequence[Params] = ()
    ) -> Metrics:
        """Return loss and metrics of these items as one mini-batch, without an update."""
        batches = self._batches(items, self.config.rows)
        with jax.set_mesh(self.mesh):
            totals = self._totals(batches, *counts(items, self.group_size), state)
            return combine([self._measure(state.params, b, totals, tuple(teachers))[1] for b in batches])

    def _batches(self, items: Sequence[PackItem], rows: int) -> list[Batch]:
        return [self.put(b) for b in pack(items, self.config.row_tokens, rows, self.group_size)]

    def _totals(
        self, batches: Sequence[Batch], num_tokens: float, num_sequences: float, state: TrainState
    ) -> BatchTotals:
        numbers = np.float32(num_tokens), np.float32(num_sequences)
        totals = BatchTotals(*numbers, state.kl_coef, loss_scale=state.loss_scale)
        if not algos.of(self.algo).baseline:
            return totals
        return replace(totals, baseline=sum(self._baseline(batch, totals) for batch in batches))

    def _fresh(self, params: Params) -> TrainState:
        trained, frozen = lora.split_params(params)
        frozen = cast_weights(frozen, jnp.dtype(self.config.dtype))
        zero = jnp.zeros((), jnp.int32)
        kl_coef = jnp.float32(self.algo.initial_kl_coef)
        opt_state = self.optimizer.init(trained)
        stored = lora.join_params(stored_weights(trained, opt_state), frozen)
        loss_scale = initial_loss_scale(self.config.dtype)
        return TrainState(stored, opt_state, zero, zero, kl_coef, loss_scale=loss_scale)

    def _on_devices(self, update: Callable) -> Callable:
        """Return `update`, a function of a TrainState, with its moments moved to the devices first."""
        if not self.config.offload:
            return update
        shardings = jax.tree.map(on_device, self.state_shardings.opt_state)

        def moved(state: TrainState, *args):
            return update(replace(state, opt_state=jax.device_put(state.opt_state, shardings)), *args)

        return moved

    def _shardings(self, state: TrainState) -> TrainState:
        """Return shardings of the state: moments have those of their weights, counters are replicated."""
        place = on_host if self.config.offload else lambda sharding: sharding

        def like_weight(moment, p, s):
            if isinstance(moment, optax.MaskedNode):  # of optax.partition: updated by its other part
                return moment
            return moment_shardings(moment, p.shape, place(s), self.replicated)

        opt = optax.tree.map_params(
            self.optimizer,
            like_weight,
            state.opt_state,
            *(lora.split_params(tree)[0] for tree in (state.params, self.param_shardings)),
            transform_non_params=lambda _: self.replicated,
            is_leaf=is_moment,
        )
        loss_scale = None if state.loss_scale is None else self.replicated
        return TrainState(self.param_shardings, opt, *[self.replicated] * 3, loss_scale=loss_scale)
