"""Train a language model: `python -m jaxrl_llm.train --config grpo_tiny.py`.

Read top to bottom: the parts are built, the newest checkpoint is found, then for each step
experience -> update -> evaluation -> log -> checkpoint. Killed anywhere and started again by the same
command, the run continues bit for bit: everything random is a function of (seed, step, sample).
"""

from __future__ import annotations

if __name__ == "__main__":  # before jax, whose import takes seconds
    from jaxrl_llm.host.signals import install_handlers

    install_handlers()

import contextlib
import dataclasses
import functools
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm import algos
from jaxrl_llm.build.run import Parts, Stage, build, data_report
from jaxrl_llm.checkpoint.state import Checkpointer
from jaxrl_llm.config import TrainConfig, derived, describe_run, dump
from jaxrl_llm.data.chat import prompt_record
from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.experience.source import Experience
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.host.command import run_command
from jaxrl_llm.host.lock import run_dir_lock
from jaxrl_llm.host.signals import deferred
from jaxrl_llm.host.start import start_host
from jaxrl_llm.host.stop import EXIT_STOPPED, Stop
from jaxrl_llm.host.watch import watched_processes
from jaxrl_llm.learn.reference import Reference
from jaxrl_llm.models.kernels import describe
from jaxrl_llm.recipe.load import Launch, from_command_line
from jaxrl_llm.report.log import RunLog, sample_rows
from jaxrl_llm.rollout.sglang.server import Outage
from jaxrl_llm.structs import Metrics, Params, TrainState

BEGUN = "rollouts.npz"  # in a checkpoint: responses to later steps' prompts, done or not


class NonFiniteError(RunError):
    """Several updates in a row had NaN or Inf in loss or gradient."""


class UnsavedError(RunError):
    """The run came to its end, but not all of what it made is on the disk."""


class Ended(NamedTuple):
    """How the steps ended."""

    state: TrainState
    step: int  # steps done
    reason: str  # why they stopped early; "" = they are complete


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: see `host.stop`."""
    return run_command(train, list(sys.argv[1:] if argv is None else argv))


def train(argv: list[str]) -> int:
    """Run what the command line says, from the newest checkpoint to the export."""
    with contextlib.ExitStack() as closing:
        launch = from_command_line(argv)
        start_host()
        with watched_processes():  # left before anything is closed, which may need the others
            return train_together(launch, argv, closing)


def train_together(launch: Launch, argv: list[str], closing: contextlib.ExitStack) -> int:
    """Run in all processes; `closing` gets what must be closed at the end."""
    closing.enter_context(run_dir_lock(Path(launch.config.run_dir)))
    parts = build(launch.config, closing)
    closing.enter_context(jax.set_mesh(parts.mesh))
    checkpoints = Checkpointer(launch.config.checkpoint, Path(launch.config.run_dir))
    closing.enter_context(contextlib.closing(checkpoints))
    state, start = restore(parts, checkpoints)
    log = RunLog(launch.config.run_dir, launch.config.log, parts.total, resume_step=start or -1)
    closing.enter_context(contextlib.closing(log))
    introduce(log, parts, describe_run(launch.config, launch.recipe, argv), start)
    with Stop(launch.config.max_runtime) as stop:
        ended = run(parts, checkpoints, log, state, start, stop)
        with deferred("exporting the model, then done"):
            return finish(parts, checkpoints, log, ended)


def run(
    parts: Parts, checkpoints: Checkpointer, log: RunLog, state: TrainState | None, start: int, stop: Stop
) -> Ended:
    """Steps from the newest checkpoint to the last, or until asked to stop."""
    config = parts.config
    meta = {"config": dump(config), "model": dataclasses.asdict(parts.model)}
    state = parts.initial_state() if state is None else state
    reference = parts.reference()
    if start == 0 and parts.evaluators and not config.warm_start.steps:
        log.step(0, evaluate(parts, state, reference, 0, log), tokens=0, kind="start")
    done, reason, metrics, outage = start, None, {}, Outage()
    source = parts.stages[-1].source
    if begun := checkpoints.file(start, BEGUN):
        source.resume(begun, state.params, int(state.version))
    for step in range(start, parts.total):
        if reason := outage.reason or stop.requested(step, checkpoints.longest_save):
            break
        stage = parts.stage(step)
        if step == stage.start and stage is not parts.stages[0]:
            state = stage.trainer.init_state(state.params)

        with outage:
            experience = stage.source.next(step - stage.start, state.params, int(state.version), log.phase)
        if outage.reason:
            break
        with log.phase("score"):
            frozen = reference_of(stage, reference, step, state)
            stage.trainer.score(state, experience.items, stage.minibatches, frozen)
            minibatches = stage.assign(experience, float(state.kl_coef), seed=step)
        with log.phase("update"):
            state, metrics = stage.trainer.update(state, minibatches, step - stage.start)
            metrics = {"kl": None, **experience.metrics, **jax.device_get(metrics)}
        stop_if_nonfinite(state, experience, config, step + 1)

        done = step + 1
        if eval_due(parts, done):
            with outage:
                metrics |= evaluate(parts, state, reference, done, log)
        log.samples(done, samples_of(experience, config))
        log.step(done, metrics, experience.tokens, stage.kind)  # before the checkpoint that vouches for it
        if checkpoint_due(config, done, parts.total):
            with log.phase("checkpoint"):
                checkpoints.save(done, state, meta, finite(metrics), {BEGUN: source.snapshot()})

    if outage.error and done == start:
        raise outage.error  # nothing was reached: rather a mistake than an outage
    if reason := outage.reason or reason or stop.signalled():
        checkpoints.save(done, state, meta, finite(metrics), {BEGUN: source.snapshot()})
    checkpoints.wait()
    return Ended(state, done, reason or "")


def finish(parts: Parts, checkpoints: Checkpointer, log: RunLog, ended: Ended) -> int:
    """Export the trained model, say what was reached, and check that it is on the disk.

    Raises:
        UnsavedError: says what is not there, and the fix.
    """
    run_dir, lost = Path(parts.config.run_dir), []
    if not checkpoints.has(ended.step):
        lost.append(
            f"step {ended.step}, the last, is not saved: the disk of {checkpoints.folder} was full, and the "
            f"newest checkpoint there is {checkpoints.latest()}. Free some space, or lower "
            "--checkpoint.keep, and run the same command again: it goes on from there."
        )
    if not ended.reason:
        try:
            params, dtype = parts.exported(ended.state.params), parts.config.model.dtype
            save_model(params, params.config, run_dir / "hf", parts.tokenizer, dtype=dtype)
        except (OSError, UserError, RunError) as error:  # the checkpoint, or its message, matters more
            lost.append(f"The model is not exported: {error}")
    stopped = ended.reason or ("a failed save" if lost else "")
    log.finish(stopped=stopped, next_command="" if stopped else next_command(run_dir, parts.config))
    if lost:
        raise UnsavedError("\n".join(lost))
    return EXIT_STOPPED if ended.reason else 0


def restore(parts: Parts, checkpoints: Checkpointer) -> tuple[TrainState | None, int]:
    """(state, steps done) of the newest good checkpoint, or (None, 0) in a fresh run directory."""
    target = parts.stages[0].trainer.abstract_state()
    found = checkpoints.restore(target, compatible=dump(parts.config))
    return (found[1], found[0]) if found else (None, 0)


def introduce(log: RunLog, parts: Parts, description: dict, start: int) -> None:
    """Write config.json, and say what is about to happen."""
    log.config(description)
    trainer, config = parts.stages[0].trainer, parts.config
    weights = sum(math.prod(w.shape) for w in jax.tree.leaves(trainer.abstract_state().params))
    mesh = " x ".join(f"{name} {size}" for name, size in parts.mesh.shape.items())
    device = jax.devices()[0].device_kind
    log.message(f"{weights / 1e6:,.1f}M weights on {parts.mesh.size} {device} device(s): {mesh}")
    log.message(describe(trainer.policy.model, config.model.dtype, parts.mesh, config.strict))
    log.message(", ".join(f"{k} {v:,}" for k, v in derived(config, parts.mesh.size).items()))
    for line in data_report(parts.loaders):
        log.message(f"data for {line}")
    if start == parts.total:
        log.nothing_to_do()
    elif start:
        log.message(f"continuing {config.run_dir} after step {start}")


def samples_of(experience: Experience, config: TrainConfig) -> list[dict[str, Any]]:
    """Return the rows of samples.jsonl."""
    shown = experience.trajectories[: config.log.samples]
    examples = [experience.prompts[t.prompt_index].example for t in shown]
    return sample_rows(shown, [prompt_record(example, config.data.chat) for example in examples])


def eval_due(parts: Parts, done: int) -> bool:
    """After the supervised start, every n steps of the run, and at the end."""
    since = done - parts.stages[-1].start
    return bool(parts.evaluators) and (
        done == parts.total or since == 0 or (since > 0 and since % parts.config.eval.every == 0)
    )


def evaluate(parts: Parts, state: TrainState, reference: Reference, done: int, log: RunLog) -> Metrics:
    """What is found on held-out data now."""
    metrics: Metrics = {}
    frozen = functools.partial(reference_of, parts.stages[-1], reference, done, state)
    with log.phase("evaluation"):
        for evaluator in parts.evaluators:
            metrics |= evaluator(state, frozen)
    return metrics


def reference_of(stage: Stage, reference: Reference, step: int, state: TrainState) -> Params | None:
    """Return the reference weights of a stage, or None where its algorithm needs none."""
    if not stage.trainer.policy.algo.needs_reference:
        return None
    return reference.params(stage.start, step, state.params)


def checkpoint_due(config: TrainConfig, done: int, total: int) -> bool:
    every = config.checkpoint.every
    return done == total or bool(every and done % every == 0)


def stop_if_nonfinite(state: TrainState, experience: Experience, config: TrainConfig, done: int) -> None:
    """Skipped updates are counted; too many in a row end the run with its checkpoints as they are.

    Raises:
        NonFiniteError: says where the offending batch was written.
    """
    if int(state.nonfinite) < config.optim.max_nonfinite:
        return
    path = Path(config.run_dir) / f"nonfinite_step_{done}.npz"
    arrays = {f"{i}.tokens": item.tokens for i, item in enumerate(experience.items)}
    arrays |= {
        f"{i}.{name}": x for i, item in enumerate(experience.items) for name, x in item.signals.items()
    }
    np.savez(path, **arrays)
    raise NonFiniteError(
        f"{int(state.nonfinite)} updates in a row had NaN or Inf in loss or gradient, at step {done}; none "
        f"of them changed the weights. The batch is in {path}. Lower --optim.learning_rate or look at its "
        "rewards; the same command continues from the last checkpoint."
    )


def finite(metrics: Metrics) -> Metrics:
    return {name: float(x) for name, x in metrics.items() if x is not None and np.isfinite(x)}


def next_command(run_dir: Path, config: TrainConfig) -> str:
    """Answers of the trained model to the prompts of the run's own samples; RL against a reward model."""
    model, prompts, out = (shlex.quote(str(run_dir / name)) for name in ("hf", "samples.jsonl", "out.jsonl"))
    if not config.algo.needs_policy:
        kind = " --reward.models.0.kind process" * (algos.module_of(config.algo) is algos.ALGOS["prm"])
        return f"python -m jaxrl_llm.train --config ppo_reward_tiny.py --reward.models.0.path {model}{kind}"
    return f"python -m jaxrl_llm generate --model {model} --prompts {prompts} --out {out}"


if __name__ == "__main__":
    sys.exit(main())
