"""Learner: the jitted functions of one model under one algorithm on one mesh."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from jaxrl_llm import algos, models
from jaxrl_llm.algos.config import AlgoConfig
from jaxrl_llm.algos.reduce import average, combine
from jaxrl_llm.data.packing import PackItem, counts
from jaxrl_llm.learn.finite import initial_loss_scale
from jaxrl_llm.learn.moe_losses import balance_weights, routing_metrics
from jaxrl_llm.learn.optim_states import state_shardings, stored_weights
from jaxrl_llm.learn.reference import PlacedTeachers, Teachers, teachers_of
from jaxrl_llm.learn.replicas import Replicas
from jaxrl_llm.learn.scoring import Scorer, run_on_rows
from jaxrl_llm.learn.update import LossArrays, StepConfig, accumulate, apply, baseline, loss_and_metrics
from jaxrl_llm.models import TransformerConfig, lora
from jaxrl_llm.models.transformer import cast_weights
from jaxrl_llm.sharding.compile import Program, compiler_options
from jaxrl_llm.sharding.rules import TRAIN, with_shardings
from jaxrl_llm.structs import Batch, BatchTotals, Metrics, Params, TrainState


class Learner:
    """Update one model; `scorer` scores it. Stateless: weights and optimizer state are arguments, results."""

    def __init__(
        self,
        algo: AlgoConfig,
        model: TransformerConfig,
        optimizer: optax.GradientTransformation,
        config: StepConfig,
        *,
        mesh: Mesh,
    ):
        self.scorer = Scorer(config, mesh, algos.of(algo).group_size)
        self.config, self.mesh, self.replicas = config, mesh, Replicas(mesh, config)
        self.group_size, self.replicated = self.scorer.group_size, self.scorer.replicated
        self.algo, self.model, self.optimizer = algo, model, optimizer
        # Shapes and shardings of the state.
        self.param_shardings = models.shardings(model, mesh, TRAIN)
        self.state_shapes = jax.eval_shape(self._fresh, models.abstract(model))
        self.state_shardings = state_shardings(
            self.state_shapes, optimizer, self.param_shardings, offload=config.offload
        )
        self.grad_shardings = self.replicas.shardings(lora.split_params(self.param_shardings)[0])
        # The programs of an update: zeros, one micro-batch, measures, the optimizer.
        self._zeros = jax.jit(self.replicas.zeros, out_shardings=self.grad_shardings)
        self._add = jax.jit(self.replicas.add, donate_argnums=0, out_shardings=self.grad_shardings)
        self._accumulate = jax.jit(
            self.replicas.accumulate(functools.partial(accumulate, algo=algo, config=config)),
            donate_argnames=("grads",),
            out_shardings=(self.grad_shardings, self.replicas.shardings(self.replicated), self.replicated),
            compiler_options=compiler_options(mesh, gathers_weights=True),
        )
        self._measure = jax.jit(
            functools.partial(loss_and_metrics, algo=algo, config=config),
            compiler_options=compiler_options(mesh, gathers_weights=True),
        )
        self._baseline = jax.jit(functools.partial(baseline, algo=algo))
        update = functools.partial(
            apply,
            algo=algo,
            optimizer=optimizer,
            max_grad_norm=config.max_grad_norm,
            by_leaf=config.update_by_leaf,
        )
        self._apply = jax.jit(
            self.replicas.apply(update),
            donate_argnames=("state",),
            out_shardings=(lora.trained_state(self.state_shardings), self.replicated),
        )

    def abstract_state(self) -> TrainState:
        """Return shapes, types and shardings of the TrainState, to restore a checkpoint into."""
        return with_shardings(self.state_shapes, self.state_shardings)

    def update_programs(
        self, signals: Sequence[str], teachers: Teachers = (), microbatches: int = 2, *, kind: int = 0
    ) -> dict[str, Program]:
        """Return the programs of `update` for micro-batches of `Scorer.shapes` [kind], and after them."""
        # Arrays of a micro-batch, and of the totals of its mini-batch.
        shape = self.scorer.shapes(self.config.rows)[kind]
        state, batch = self.abstract_state(), self.scorer.abstract_batch(signals, shape)
        number = jax.ShapeDtypeStruct((), jnp.float32)
        totals = self._with_coefs(state, number, number)
        teachers = teachers.abstract_outputs(batch) if isinstance(teachers, PlacedTeachers) else teachers
        with jax.set_mesh(shape.mesh):
            if algos.of(self.algo).baseline:
                totals = replace(totals, baseline=jax.eval_shape(self._baseline, batch, totals))
            if self.config.balance_coef:
                weights = functools.partial(balance_weights, self.scorer.run)
                totals = replace(totals, balance_weights=jax.eval_shape(weights, state.params, [batch]))
            trained, frozen = lora.split_params(state.params)
            zeros = self._zeros.eval_shape(trained)
            zeros = with_shardings(zeros, self.grad_shardings) if microbatches > 1 else None
            args = (trained, zeros, LossArrays(batch, totals, tuple(teachers), frozen))
            grads, metrics, _ = jax.eval_shape(self._accumulate, *args)
        grads = with_shardings(grads, self.grad_shardings)
        metrics = with_shardings(metrics, dict.fromkeys(metrics, self.replicas.shardings(self.replicated)))
        programs = {"accumulate": Program(self._accumulate, args, {})}
        if self.replicas.count > 1:
            programs["add"] = Program(self._add, (grads,), {})
        args = (lora.trained_state(state), grads, metrics, number)
        return programs | {"apply": Program(self._apply, args, {})}

    def init_state(self, params: Params) -> TrainState:
        """Return a state with a fresh optimizer; these float32 weights are donated to it.

        Frozen weights take the types in which the forward pass reads them (`cast_weights`).
        """
        with jax.set_mesh(self.mesh):
            return jax.jit(self._fresh, out_shardings=self.state_shardings, donate_argnums=0)(params)

    def update(
        self, state: TrainState, minibatches: Sequence[Sequence[PackItem]], teachers: Teachers = ()
    ) -> tuple[TrainState, Metrics]:
        """Apply an update for each mini-batch, and write its log-probs; the state passed in is donated."""
        collected, logprobs = [], []
        for items in minibatches:
            batches, totals = self.scorer.batches(items, self.config.rows), counts(items, self.group_size)
            state, metrics, scores = self.update_minibatch(state, batches, *totals, teachers=teachers)
            collected.append(metrics)
            logprobs.append(scores)
        if algos.requirements(self.algo).logprobs:
            self.scorer.write_signal("logprobs", minibatches, logprobs)
        with jax.set_mesh(self.mesh):
            return state, average(collected) | self.scorer.shared_fraction(minibatches)

    def update_minibatch(
        self,
        state: TrainState,
        batches: Sequence[Batch],
        num_tokens: float,
        num_sequences: float,
        *,
        teachers: Teachers = (),
    ) -> tuple[TrainState, Metrics, list[jax.Array]]:
        """Return state, metrics and log-probs of one optimizer update from micro-batches on the devices."""
        with jax.set_mesh(self.mesh):
            totals = self._totals(batches, num_tokens, num_sequences, state)
            if self.config.balance_coef:
                weights = balance_weights(self.scorer.outputs, state.params, batches)
                totals = replace(totals, balance_weights=weights)
            trained, frozen = lora.split_params(state.params)
            grads = self._zeros(trained) if len(batches) > 1 else None
            parts, logprobs = [], []
            for batch in batches:
                arrays = LossArrays(batch, totals, teachers_of(batch, teachers), frozen)
                grads, part, values = run_on_rows(self._accumulate, batch, trained, grads, arrays)
                parts.append(part)
                logprobs.append(values)
            grads = self._add(grads) if self.replicas.count > 1 else grads
            new, metrics = self._apply(lora.trained_state(state), grads, combine(parts), totals.num_sequences)
            return lora.with_frozen(new, frozen), metrics, logprobs

    def measure(self, state: TrainState, items: Sequence[PackItem], teachers: Teachers = ()) -> Metrics:
        """Return loss and metrics of these items as one mini-batch, without an update."""
        batches = self.scorer.batches(items, self.config.rows)
        with jax.set_mesh(self.mesh):
            totals = self._totals(batches, *counts(items, self.group_size), state)
            read = functools.partial(teachers_of, teachers=teachers)
            outputs = [run_on_rows(self._measure, b, state.params, b, totals, read(b)) for b in batches]
            return routing_metrics(combine([metrics for _, (metrics, _) in outputs]))[0]

    def _totals(
        self, batches: Sequence[Batch], num_tokens: float, num_sequences: float, state: TrainState
    ) -> BatchTotals:
        totals = self._with_coefs(state, np.float32(num_tokens), np.float32(num_sequences))
        if not algos.of(self.algo).baseline:
            return totals
        return replace(totals, baseline=sum(run_on_rows(self._baseline, b, b, totals) for b in batches))

    def _with_coefs(self, state: TrainState, *numbers: ArrayLike | jax.ShapeDtypeStruct) -> BatchTotals:
        return BatchTotals(
            *numbers, state.kl_coef, loss_scale=state.loss_scale, entropy_coef=state.entropy_coef
        )

    def _fresh(self, params: Params) -> TrainState:
        trained, frozen = lora.split_params(params)
        frozen = cast_weights(frozen, jnp.dtype(self.config.dtype))
        zero = jnp.zeros((), jnp.int32)
        opt_state = self.optimizer.init(trained)
        stored = lora.join_params(stored_weights(trained, opt_state), frozen)
        kl_coef, entropy_coef = jnp.float32(self.algo.initial_kl_coef), self.algo.initial_entropy_coef
        entropy_coef = None if entropy_coef is None else jnp.asarray(entropy_coef, jnp.float32)
        scale = initial_loss_scale(self.config.dtype)
        return TrainState(stored, opt_state, zero, zero, kl_coef, loss_scale=scale, entropy_coef=entropy_coef)
