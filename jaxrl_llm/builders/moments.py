"""Optimizer state that does not come from a run's own checkpoints: of another run, or new."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.checkpoint import folder as checkpoint_folder
from jaxrl_llm.checkpoint.manifest import flatten_state, read_manifest, read_meta
from jaxrl_llm.checkpoint.params import find_checkpoint
from jaxrl_llm.checkpoint.resume import check_arrays
from jaxrl_llm.checkpoint.state import is_moment_path, load_arrays
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.host.processes import on_first, print_on_first
from jaxrl_llm.learn.config import OptimConfig
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.optim_states import EmaState, MasterState
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.models import lora
from jaxrl_llm.sharding.config import CRITIC, POLICY
from jaxrl_llm.structs import TrainState
from jaxrl_llm.user_file import expand_home


def check_initial_moments(config: TrainConfig, stage: Stage) -> None:
    """Refuse a new run whose `optim.init_from` has no moments that fit; reads no array. A collective.

    Raises:
        UserError: names both sides, and the fix.
    """

    def check() -> None:
        if not checkpoint_folder.steps(Path(config.run_dir).absolute() / "checkpoints"):
            for key, optim, learner in _with_donor(config, stage):
                folder = _donor_checkpoint(optim.init_from, key, checksums=False)
                check_moments(folder, learner.abstract_state().opt_state, optim.name, key)

    on_first(check)


def adopt_moments(config: TrainConfig, stage: Stage, state: TrainState) -> TrainState:
    """Return a new state with the moments of the newest checkpoint that `optim.init_from` names.

    Weights, their averages and the learning-rate schedule are the new run's.

    Raises:
        UserError: as `check_initial_moments`.
    """
    for key, optim, learner in _with_donor(config, stage):
        folder, own = _donor_checkpoint(optim.init_from, key), state.critic if key else state
        target = learner.abstract_state().opt_state
        prefix = check_moments(folder, target, optim.name, key)
        with jax.set_mesh(learner.mesh):
            loaded = load_arrays(folder, _innermost(target), prefix)
            loaded = _at_update(loaded, jnp.zeros_like(own.version))
        own = replace(own, opt_state=_with_innermost(own.opt_state, loaded))
        state = replace(state, critic=own) if key else own
    return state


def _donor_checkpoint(run_dir: str, key: str, checksums: bool = True) -> Path:
    try:
        return find_checkpoint(expand_home(run_dir), checksums=checksums)
    except UserError as error:
        raise UserError(f"--{key}optim.init_from {run_dir}: {error}") from error


def check_moments(folder: Path, target: Any, name: str, key: str) -> str:
    """Return the prefix of the moments in a checkpoint, which fit; reads no array.

    Args:
        target: abstract optimizer state to fill.
        name: of the optimizer, `OptimConfig.name`.
        key: prefix of the model, POLICY or CRITIC.

    Raises:
        UserError: they do not fit.
    """
    saved, prefix = read_manifest(folder).arrays, f"{key}opt_state."
    fix = f"Set --{key}optim.init_from to a run of the same model, adapters and optimizer settings, or to ''."
    while any(path.startswith(f"{prefix}inner.") for path in saved):  # of EmaState and MasterState
        prefix += "inner."
    moments = {path: x for path, x in saved.items() if path.startswith(prefix) and is_moment_path(path)}
    if not moments:
        raise UserError(f"{folder} has no optimizer state{' of a critic' * bool(key)}. {fix}")
    config = read_meta(folder).get("config", {})
    optim = (config.get("critic", {}) if key else config).get("optim", {})
    if optim.get("name", name) != name:
        raise UserError(f"{folder}: its optimizer is {optim['name']}, this run's is {name}. {fix}")
    needed = {prefix + path: leaf for path, leaf in flatten_state(_innermost(target)).items()}
    check_arrays(folder, moments, needed, fix)
    return prefix


def restart_moments(stage: Stage, state: TrainState) -> TrainState:
    """Return the state with new moments if its checkpoint has none (its leaves are abstract).

    The learning-rate schedules continue: one step for each applied update.
    """
    critic = state.critic and _restart(stage.critic, state.critic)
    return replace(_restart(stage.policy, state), critic=critic)


def _restart(learner: Learner, state: TrainState) -> TrainState:
    if not any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state.opt_state)):
        return state
    print_on_first(
        "checkpoint: it has no optimizer state (--checkpoint.optimizer False), so the moments restart: "
        "results differ from an uninterrupted run"
    )
    init = jax.jit(learner.optimizer.init, out_shardings=learner.state_shardings.opt_state)
    with jax.set_mesh(learner.mesh):
        fresh = _at_update(init(lora.split_params(state.params)[0]), jnp.copy(state.version))
    choose = lambda saved, new: new if isinstance(saved, jax.ShapeDtypeStruct) else saved
    return replace(state, opt_state=jax.tree.map(choose, state.opt_state, fresh))


def _with_donor(config: TrainConfig, stage: Stage) -> Iterator[tuple[str, OptimConfig, Learner]]:
    """Yield (prefix of its keys, settings of its optimizer, learner) of the models that take moments."""
    models = [(POLICY, config.optim, stage.policy), (CRITIC, config.critic.optim, stage.critic)]
    yield from ((key, optim, learner) for key, optim, learner in models if learner and optim.init_from)


def _innermost(opt_state: Any) -> Any:
    """Return optax's own state: without remainders and averages, which belong to the weights."""
    while isinstance(opt_state, MasterState | EmaState):
        opt_state = opt_state.inner
    return opt_state


def _with_innermost(opt_state: Any, new: Any) -> Any:
    if isinstance(opt_state, MasterState | EmaState):
        return opt_state._replace(inner=_with_innermost(opt_state.inner, new))
    return new


def _at_update(opt_state: Any, update: jax.Array) -> Any:
    """Return the state with its learning-rate schedule at this update."""
    is_schedule = lambda x: isinstance(x, optax.ScaleByScheduleState)
    at = lambda x: optax.ScaleByScheduleState(update) if is_schedule(x) else x
    return jax.tree.map(at, opt_state, is_leaf=is_schedule)
