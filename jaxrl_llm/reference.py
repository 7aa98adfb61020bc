"""The frozen policy that KL is measured against."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxrl_llm.checkpoint.state import CheckpointConfig, Checkpointer
from jaxrl_llm.parts import Parts, Stage
from jaxrl_llm.structs import Params


class Reference:
    """The weights with which the last stage starts.

    Without a supervised start they are the initial weights, which can be had again; after one they are
    kept once, in run_dir/reference.
    """

    def __init__(self, parts: Parts, run_dir: Path):
        self.parts, self.run_dir = parts, run_dir
        self.weights: Params | None = None

    def params(self, stage: Stage, step: int, current: Params) -> Params | None:
        """Weights for the algorithm of this stage, or None if it needs none."""
        if not stage.trainer.policy.algo.needs_reference:
            return None
        if self.weights is None:
            self.weights = self._kept(step == stage.start, current) if stage.start else self._initial()
        return self.weights

    def _initial(self) -> Params:
        return freeze(self.parts.initial_params(), self.parts.config.model.dtype)

    def _kept(self, is_start: bool, current: Params) -> Params:
        settings = CheckpointConfig(keep=1, async_save=False, on_full_disk="stop")
        with contextlib.closing(Checkpointer(settings, self.run_dir / "reference")) as keeper:
            if is_start:
                keeper.save(0, current, {}, {})
                return freeze(current, self.parts.config.model.dtype)
            target = self.parts.stages[0].trainer.policy.abstract_state().params
            found = keeper.restore(target)
            if found is None:
                raise FileNotFoundError(
                    f"{self.run_dir / 'reference'} is gone: the reference model of this run cannot be had "
                    "again; start a new run with another --run_dir."
                )
            return freeze(found[1], self.parts.config.model.dtype)


@functools.partial(jax.jit, static_argnums=1)
def freeze(params: Params, dtype: str) -> Params:
    """A copy in the compute type; the original will be donated to the next update."""
    return jax.tree.map(lambda w: jnp.copy(w).astype(dtype), params)
