"""Train a language model: `python -m jaxrl_llm.train --config grpo_tiny.py`.

Read top to bottom: the run is built, the newest checkpoint restored, then each step is
experience -> prepare -> update -> evaluate -> log -> checkpoint. A run that is killed continues bit for bit
when the same command is given again: everything random is a function of (seed, step, sample).
"""

from __future__ import annotations

import sys

from jaxrl_llm.__main__ import main as run_command
from jaxrl_llm.__main__ import start_process

if __name__ == "__main__":  # the recipe is read before jax is imported, which takes seconds
    from jaxrl_llm.host.signals import install_handlers

    start_process("train", sys.argv[1:])
    install_handlers()  # to the end of the interpreter
    sys.exit(run_command(["train", *sys.argv[1:]]))

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from jaxrl_llm.builders.describe import next_command, prompts_to_try, samples_of, start_lines
from jaxrl_llm.builders.pin import pin_models
from jaxrl_llm.builders.run import Run, build
from jaxrl_llm.checkpoint.state import Checkpointer
from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.experience.dataset import REFERENCE_FILE
from jaxrl_llm.experience.evaluate import evaluate_all
from jaxrl_llm.experience.flops import step_flops
from jaxrl_llm.experience.rollouts import CURSOR_FILE, PARTIAL_FILE
from jaxrl_llm.host.command import working
from jaxrl_llm.host.lock import run_dir_lock
from jaxrl_llm.host.processes import on_first
from jaxrl_llm.host.signals import deferred
from jaxrl_llm.host.start import start_host
from jaxrl_llm.host.stop import Stop
from jaxrl_llm.host.watch import watched_processes
from jaxrl_llm.learn.finite import stop_if_nonfinite
from jaxrl_llm.learn.optim_states import float32_params
from jaxrl_llm.learn.reference import Reference
from jaxrl_llm.learn.stage import Stage
from jaxrl_llm.models.lora import trained_state
from jaxrl_llm.recipe.dump import describe_run, dump
from jaxrl_llm.recipe.load import ResolvedRecipe
from jaxrl_llm.report.goodput import PhaseClock
from jaxrl_llm.report.log import RunLog
from jaxrl_llm.rollout.servers.server import Outage
from jaxrl_llm.structs import Metrics, Params, TrainState


class UnsavedError(RunError):
    """A run that reached its end without all of its results on the disk."""


class Ended(NamedTuple):
    """State of a run when its steps ended."""

    state: TrainState
    step: int  # steps done
    reason: str  # of an early stop; "" = complete


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code; `host.stop` lists them."""
    return run_command(["train", *(sys.argv[1:] if argv is None else argv)])


def execute(
    resolved: ResolvedRecipe,
    argv: Sequence[str] = (),
    reward: Callable | None = None,
    began: float | None = None,
) -> Ended:
    """Take a run from its newest checkpoint to its export.

    Args:
        argv: the command line, for config.json.
        reward: Python function that takes the place of `reward.name`.
        began: time.perf_counter() at the start of the command; None = now.

    Raises:
        UserError: input that cannot work. RunError: a run that cannot continue.
    """
    with contextlib.closing(PhaseClock("import", began)) as clock:
        start_host()
        with contextlib.ExitStack() as closing, watched_processes():  # left before anything is closed
            return run_on_all_processes(resolved, argv, reward, closing=closing, clock=clock)


def run_on_all_processes(
    resolved: ResolvedRecipe,
    argv: Sequence[str],
    reward: Callable | None,
    *,
    closing: contextlib.ExitStack,
    clock: PhaseClock,
) -> Ended:
    """Run in every process; `closing` collects the resources to close at the end, with all processes."""
    clock.begin("build")
    config, run_dir = resolved.config, Path(resolved.config.run_dir)
    closing.enter_context(run_dir_lock(run_dir))
    # Build everything; nothing large is computed yet.
    config, pins = pin_models(config)
    with working("building the run: model, tokenizer, data, rewards", quiet=jax.process_index() > 0):
        run = build(config, closing, reward)
    closing.enter_context(jax.set_mesh(run.mesh))
    clock.begin("restore")
    # The state of the newest checkpoint, and the log of the steps before it.
    checkpoints = closing.enter_context(contextlib.closing(Checkpointer(config.checkpoint, run_dir)))
    state, start = restore(run, checkpoints)
    clock.begin("loggers")
    log = RunLog(
        run_dir, config.log, run.total, start or -1, devices=run.devices, profile=config.profiled, clock=clock
    )
    closing.enter_context(contextlib.closing(log))
    log.attach("prometheus", run.exporter)
    log.config(describe_run(run.config, resolved.recipe, list(argv), pins))
    for line in start_lines(run, start):
        log.message(line)
    clock.begin("weights")
    with Stop(config.max_runtime) as stop:
        ended = train(run, checkpoints, log, state, start=start, stop=stop)
        with deferred("exporting the model, then done"):
            finish(run, checkpoints, log, ended)
    return ended


def train(
    run: Run, checkpoints: Checkpointer, log: RunLog, state: TrainState | None, *, start: int, stop: Stop
) -> Ended:
    """Take the steps from `start` to the last, or until a stop is requested."""
    config, reference = run.config, run.reference()
    limits = config.optim.max_nonfinite, config.critic.optim.max_nonfinite
    state = run.initial_state() if state is None else state
    meta = run.checkpoint_meta(state)
    evaluate_start(run, state, reference, start, log=log)
    # Continue at the position of the checkpoint.
    done, metrics, reason, outage = start, {}, "", Outage()
    source = run.stages[-1].source
    if start > run.stages[-1].start:
        files = {name: checkpoints.file(start, name) for name in (CURSOR_FILE, PARTIAL_FILE, REFERENCE_FILE)}
        source.resume(files, start - run.stages[-1].start, state.params, int(state.version))
    # The step loop.
    for step in log.steps(start, run.total, warm_up=run.stages[-1].start):
        if reason := outage.reason or stop.requested(step, checkpoints.longest_save):
            break
        stage = run.stage(step)
        if step == stage.start and stage is not run.stages[0]:
            state = stage.init_state(float32_params(state), state.critic)
        with outage:
            experience = stage.source.next(step - stage.start, state.params, int(state.version), log.phase)
        if outage.reason:
            break
        with log.phase("score"):
            frozen = reference_params(stage, reference, step, state)
            minibatches = stage.prepare(state, experience, frozen, seed=step)
        with log.phase("update"):
            state, metrics = stage.update(state, minibatches, step - stage.start)
            metrics = {"kl": None, **experience.metrics, **jax.device_get(metrics)}
        done = step + 1
        stop_if_nonfinite(state, experience, config.run_dir, limits, done=done, end=stage.end)

        # Evaluation, log and checkpoint.
        if eval_due(run, done):
            with outage:
                metrics |= evaluate(run, state, reference, done, log=log)
        log.samples(done, samples_of(run, step, experience))
        flops = step_flops(stage, experience, minibatches, step - stage.start, reference=frozen)
        log.step(done, metrics, experience.tokens, kind=stage.name, model_flops=flops)  # before the save
        with log.phase("checkpoint"):
            run.export(state, done)
            if done == run.total or done % (config.checkpoint.every or run.total) == 0:
                files = source.snapshot()
                checkpoints.save(done, trained_state(state), meta, metrics, files=files)

    # Save at the end, whatever ended the loop.
    if outage.error and done == start:
        raise outage.error  # before the first step: a wrong setting rather than an outage
    if reason := outage.reason or reason or stop.signalled():
        checkpoints.save(done, trained_state(state), meta, metrics, files=source.snapshot())
    checkpoints.wait()
    return Ended(state, done, reason)


def finish(run: Run, checkpoints: Checkpointer, log: RunLog, ended: Ended) -> None:
    """Export the trained model, report the results, and check that they are on the disk.

    Raises:
        UnsavedError: an output is missing; the message names it, and the fix.
    """
    run_dir, missing = Path(run.config.run_dir), []
    log.progress.phase("export")
    if not checkpoints.has(ended.step):
        newest = checkpoints.latest()
        there = "there is no checkpoint" if newest is None else f"the newest checkpoint there is {newest}"
        missing.append(
            f"step {ended.step}, the last, is not saved: the disk of {checkpoints.folder} was full, and "
            f"{there}. Free some space, or lower --checkpoint.keep, "
            f"{f'move {run_dir} away ' if newest is None else ''}and run the same command again: it "
            f"{'begins anew' if newest is None else 'continues from there'}."
        )
    if not ended.reason:
        try:
            run.export(ended.state)
        except (OSError, UserError, RunError) as error:  # reported together with a missing checkpoint
            missing.append(f"The model is not exported or uploaded: {error}")
    stopped = ended.reason or ("a failed save" if missing else "")
    command = ""
    if not stopped:
        log.prompts(prompts := prompts_to_try(run))
        command = next_command(run_dir, run.config, has_prompts=bool(prompts))
    log.finish(stopped=stopped, next_command=command)
    if missing:
        raise UnsavedError("\n".join(missing))


def restore(run: Run, checkpoints: Checkpointer) -> tuple[TrainState | None, int]:
    """Return (state, steps done) of the newest good checkpoint, or (None, 0) in a fresh run directory."""
    target = lambda step: trained_state(run.stage(min(max(step, 1), run.total) - 1).abstract_state())
    restored = checkpoints.restore(target, compatible=dump(run.config))
    return (run.complete(*restored[1:]), restored[0]) if restored else (None, 0)


def eval_due(run: Run, done: int) -> bool:
    """Return whether to evaluate: after the SFT warm-up, every n steps of the run, and at the end."""
    since = done - run.stages[-1].start
    return bool(run.evaluators) and (
        done == run.total or since == 0 or (since > 0 and since % run.config.eval.every == 0)
    )


def evaluate_start(run: Run, state: TrainState, reference: Reference, start: int, *, log: RunLog) -> None:
    """Evaluate before the first step, and after the restored one if an outage ended its evaluation."""
    if not eval_due(run, start):
        return
    if start == 0:
        log.step(0, evaluate(run, state, reference, 0, log=log), tokens=0, kind="start")
    elif on_first(lambda: log.restored and not any(name.startswith("eval/") for name in log.restored)):
        log.add(evaluate(run, state, reference, start, log=log))


def evaluate(run: Run, state: TrainState, reference: Reference, done: int, *, log: RunLog) -> Metrics:
    """Return the metrics of all evaluators; their samples are logged."""
    frozen = lambda: reference_params(run.stages[-1], reference, done, state)
    with log.phase("evaluate"):
        metrics, samples = evaluate_all(run.evaluators, state, frozen, done)
    log.samples(done, samples, limit=len(samples))
    return metrics


def reference_params(stage: Stage, reference: Reference, step: int, state: TrainState) -> Params | None:
    """Return the reference weights of a stage, or None if its algorithm needs none."""
    return reference.params(stage.start, step, state.params) if stage.needs_reference else None
