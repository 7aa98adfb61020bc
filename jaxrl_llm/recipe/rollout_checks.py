"""What cannot work of rollouts: sampling, servers, environments."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxrl_llm import algos, ranges
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.rollout.engine import SamplingConfig
from jaxrl_llm.rollout.sglang import auth, colocated
from jaxrl_llm.rollout.sglang.health import read_list


def rollout_problems(config: TrainConfig) -> Iterator[str]:
    """A line for each, naming the key and the fix."""
    yield from _ranges(config)
    yield from _sampling(config)
    yield from _rollout(config)
    yield from _env(config)


def _ranges(config: TrainConfig) -> Iterator[str]:
    parts = {
        "rollout": config.rollout,
        "rollout.sampling": config.rollout.sampling,
        "eval.sampling": config.eval.sampling,
    }
    for key, part in parts.items():
        for field, problem in ranges.problems(part):
            yield f"--{key}.{field} {problem}"


def _rollout(config: TrainConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.engine == "sglang" and bool(rollout.servers) == bool(rollout.launch):
        yield (
            "--rollout.engine sglang needs either --rollout.servers http://host:port (running ones) or "
            "--rollout.launch N (N are started on this machine)."
        )
    yield from _addresses(config)
    if config.sglang.colocated and rollout.max_staleness:
        yield (
            "--sglang.colocated and --rollout.max_staleness exclude each other: servers that give their GPUs "
            "to the trainer write nothing meanwhile."
        )
    if config.sglang.colocated:
        yield from colocated.problems(config.sglang, rollout.launch, os.environ)
    if config.sglang.devices and len(config.sglang.devices) != rollout.launch:
        yield f"--sglang.devices names {len(config.sglang.devices)}, --rollout.launch is {rollout.launch}."
    if rollout.launch and not shutil.which(config.sglang.python):
        yield f"--sglang.python is {config.sglang.python!r}: no such program."
    if config.sglang.transport == "ipc" and rollout.servers:
        yield (
            "--sglang.transport ipc shares the memory of GPUs with servers that are started here "
            "(--rollout.launch); for --rollout.servers set disk, http or group."
        )
    if config.sglang.transport == "group" and not shutil.which(config.sglang.relay_python):
        yield f"--sglang.relay_python is {config.sglang.relay_python!r}: no such program."


def _addresses(config: TrainConfig) -> Iterator[str]:
    servers, router = config.rollout.servers, config.sglang.router
    if any(url.startswith("@") for url in servers):
        try:
            (name,) = servers
            servers = read_list(Path(name[1:]))
        except (ValueError, OSError) as error:
            yield f"--rollout.servers {' '.join(servers)}: one @file with one address a line ({error})."
            return
    for key, urls in (("rollout.servers", servers), ("sglang.router", [router] if router else [])):
        for url in urls:
            if problem := auth.problem(url):
                yield f"--{key}: {problem}"


def _env(config: TrainConfig) -> Iterator[str]:
    if not config.env.tool_timeout > 0:
        yield f"--env.tool_timeout is {config.env.tool_timeout}: it must be above 0 seconds; 30 is usual."
    for name, usual in (("max_turns", 8), ("max_calls", 16), ("max_observation_tokens", 1024)):
        if (value := getattr(config.env, name)) < 1:
            yield f"--env.{name} is {value}: it must be at least 1; {usual} is usual."
    if config.env.name and config.env.tools:
        yield "--env.name and --env.tools: tools are an environment of their own; give one of the two."


def _sampling(config: TrainConfig) -> Iterator[str]:
    if algos.module_of(config.algo).INPUT == "rollouts":
        yield from _greedy_group("rollout.sampling", config.rollout.sampling, config.responses_per_prompt)
    if config.eval.every:
        yield from _greedy_group("eval.sampling", config.eval.sampling, config.eval.samples)


def _greedy_group(key: str, sampling: SamplingConfig, responses: int) -> Iterator[str]:
    if sampling.temperature == 0 and responses > 1:
        yield (
            f"--{key}.temperature is 0: all {responses} responses to a prompt would be the same. "
            "Set it above 0 (1.0 is usual for training, 0.6 for evaluation) or ask for 1 response."
        )
