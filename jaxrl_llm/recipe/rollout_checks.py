"""What cannot work of rollouts: sampling, servers."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxrl_llm import algos
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.rollout.engine import SamplingConfig
from jaxrl_llm.rollout.sglang import auth, colocated
from jaxrl_llm.rollout.sglang.health import read_list


def rollout_problems(config: TrainConfig) -> Iterator[str]:
    """A line for each, naming the key and the fix."""
    yield from _sampling(config)
    yield from _rollout(config)


def _rollout(config: TrainConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.launch < 0:
        yield f"--rollout.launch is {rollout.launch}: it must be at least 0."
    if rollout.engine == "native" and (rollout.servers or rollout.launch):
        yield "--rollout.servers and --rollout.launch are for SGLang: add --rollout.engine sglang."
    if rollout.engine == "native" and rollout.max_staleness:
        yield (
            f"--rollout.max_staleness is {rollout.max_staleness}: the native engine writes on the trainer's "
            "own devices, so nothing is written meanwhile. Set it to 0, or add --rollout.engine sglang."
        )
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


def _sampling(config: TrainConfig) -> Iterator[str]:
    if algos.of(config.algo).on_rollouts:
        yield from _draws("rollout", config.rollout.sampling, config.responses_per_prompt)
    if config.eval.every:
        yield from _draws("eval.sampling", config.eval.sampling, config.eval.samples)


def _draws(key: str, sampling: SamplingConfig, responses: int) -> Iterator[str]:
    if not 0 <= sampling.temperature < math.inf:
        yield f"--{key}.temperature is {sampling.temperature}: it must be 0 (greedy) or more."
    if sampling.temperature == 0 and responses > 1:
        yield (
            f"--{key}.temperature is 0: all {responses} responses to a prompt would be the same. "
            "Set it above 0 (1.0 is usual for training, 0.6 for evaluation) or ask for 1 response."
        )
    if not 0 < sampling.top_p <= 1:
        yield f"--{key}.top_p is {sampling.top_p}: it must be above 0 and at most 1."
    if not 0 <= sampling.min_p < 1:
        yield f"--{key}.min_p is {sampling.min_p}: it must be at least 0 and below 1."
    if sampling.top_k < 0:
        yield f"--{key}.top_k is {sampling.top_k}: it must be 0 (all tokens) or more."
