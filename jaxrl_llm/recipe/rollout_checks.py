"""What cannot work of rollouts: sampling, servers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxrl_llm import algos
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.ranges import problems
from jaxrl_llm.rollout.engine import SamplingConfig
from jaxrl_llm.rollout.sglang import auth, colocated
from jaxrl_llm.rollout.sglang.health import read_addresses


def rollout_problems(config: TrainConfig) -> Iterator[str]:
    """A line for each, naming the key and the fix."""
    yield from _sampling(config)
    yield from _rollout(config)


def _rollout(config: TrainConfig) -> Iterator[str]:
    rollout, sglang = config.rollout, config.sglang
    wrong = [
        *(f"--rollout.{field} {text}" for field, text in problems(rollout)),
        *(f"--sglang.{field} {text}" for field, text in problems(sglang)),
    ]
    yield from wrong
    yield from _addresses(rollout.servers)
    if rollout.launch and not shutil.which(sglang.python):
        yield f"--sglang.python is {sglang.python!r}: no such program."
    if sglang.devices and len(sglang.devices) != rollout.launch:
        yield f"--sglang.devices names {len(sglang.devices)}, --rollout.launch is {rollout.launch}."
    if sglang.transport == "ipc" and rollout.servers:
        yield (
            "--sglang.transport ipc shares the memory of GPUs with servers that are started here "
            "(--rollout.launch); for --rollout.servers set disk, http or group."
        )
    if sglang.colocated and rollout.max_staleness:
        yield (
            "--sglang.colocated and --rollout.max_staleness exclude each other: servers that give their GPUs "
            "to the trainer generate nothing meanwhile."
        )
    if sglang.colocated and not wrong:
        yield from colocated.colocated_problems(sglang, rollout.launch, os.environ)


def _addresses(servers: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with a file of addresses."""
    if len(servers) != 1 or not servers[0].startswith("@"):
        return
    try:
        urls = read_addresses(Path(servers[0][1:]))
    except (ValueError, OSError) as error:
        yield f"--rollout.servers is {servers[0]}: it must be a text file with one address a line ({error})."
        return
    for problem in filter(None, map(auth.problem, urls)):
        yield f"--rollout.servers is {servers[0]}: {problem}"


def _sampling(config: TrainConfig) -> Iterator[str]:
    samplings = {"rollout.sampling": config.rollout.sampling, "eval.sampling": config.eval.sampling}
    for key, sampling in samplings.items():
        yield from (f"--{key}.{field} {problem}" for field, problem in problems(sampling))
    if algos.of(config.algo).on_rollouts:
        yield from _greedy_group("rollout.sampling", config.rollout.sampling, config.responses_per_prompt)
    if config.eval.every:
        yield from _greedy_group("eval.sampling", config.eval.sampling, config.eval.samples)


def _greedy_group(key: str, sampling: SamplingConfig, responses: int) -> Iterator[str]:
    if sampling.temperature == 0 and responses > 1:
        yield (
            f"--{key}.temperature is 0: all {responses} responses to a prompt would be the same. "
            "Set it above 0 (1.0 is usual for training, 0.6 for evaluation) or ask for 1 response."
        )
