"""What a run prints at its start, and the command to try after its end."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxrl_llm import algos
from jaxrl_llm.algos.contract import ignores_staleness
from jaxrl_llm.build.run import Run
from jaxrl_llm.config import TrainConfig, derived
from jaxrl_llm.models.kernels import describe_kernels


def start_lines(run: Run, start: int) -> Iterator[str]:
    """Yield lines on model, devices, kernels, sizes, stale tokens and data of a run.

    Args:
        start: steps that a checkpoint has; 0 = a new run.
    """
    policy, config = run.stages[0].policy, run.config
    weights = sum(math.prod(w.shape) for w in jax.tree.leaves(policy.abstract_state().params))
    mesh = " x ".join(f"{name} {size}" for name, size in run.mesh.shape.items())
    yield f"{weights / 1e6:,.1f}M weights on {run.mesh.size} {jax.devices()[0].device_kind} device(s): {mesh}"
    yield describe_kernels(policy.model, config.model.dtype, run.mesh, config.strict)
    yield ", ".join(f"{k} {v:,}" for k, v in derived(config, run.mesh.size).items())
    if line := staleness_line(config):
        yield line
    for name, loader in run.loaders.items():
        counts = ", ".join(f"{what} {count:,}" for what, count in loader.stats().items())
        yield f"data for {name}: {counts}"
    if 0 < start < run.total:
        yield f"continuing {config.run_dir} after step {start}"


def staleness_line(config: TrainConfig) -> str:
    """Return what a run does about tokens of weights other than the policy's; "" where there are none."""
    algorithm, requires = algos.of(config.algo), algos.requirements(config.algo)
    if config.is_on_policy or not algorithm.on_rollouts:
        return ""
    tokens = f"responses are up to {config.rollout.max_staleness} steps old"
    if config.rollout.weight_noise:
        tokens = "responses are of noised weights"
    if ignores_staleness(algorithm, requires):
        return (
            f"warning: {tokens}, and --algo.old {config.algo.old} without --algo.correction treats them as "
            "on-policy: ratio 1, no clip"
        )
    return f"{tokens}: " + (
        "--algo.correction weighs their tokens"
        if requires.corrected
        else "old log-probs are those of the rollout (--algo.old)"
    )


def next_command(run_dir: Path, config: TrainConfig) -> str:
    """Return the command to try next: generate from the trained model, or RL against a reward model."""
    model, prompts, out = (shlex.quote(str(run_dir / name)) for name in ("hf", "samples.jsonl", "out.jsonl"))
    if not algos.requirements(config.algo).policy:
        kind = " --reward.models.0.kind process" * (config.algo.algorithm == "prm")
        return f"python -m jaxrl_llm.train --config ppo_reward_tiny.py --reward.models.0.path {model}{kind}"
    return f"python -m jaxrl_llm generate --model {model} --prompts {prompts} --out {out}"
