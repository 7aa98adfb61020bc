"""What cannot work is said before any model is loaded: each message names the key and the fix."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.config import ModelConfig, TrainConfig
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.ranges import problems
from jaxrl_llm.recipe.overrides import conforms, leaves, spell
from jaxrl_llm.recipe.rollout_checks import rollout_problems
from jaxrl_llm.rollout.checks import strict_problems
from jaxrl_llm.sharding.attention import heads_problem

AT_LEAST = {
    "steps": 0,
    "prompts_per_step": 1,
    "responses_per_prompt": 1,
    "minibatches_per_step": 1,
    "tokens_per_device": 1,
    "max_prompt_tokens": 1,
    "max_response_tokens": 1,
    "max_runtime": 0,
    "model.logprob_chunk": 1,
    "optim.warmup_steps": 0,
    "optim.max_nonfinite": 1,
    "checkpoint.every": 0,
    "eval.every": 0,
    "eval.prompts": 1,
    "eval.samples": 1,
    "warm_start.steps": 0,
    "warm_start.examples_per_step": 1,
    "log.samples": 0,
}
COMPARES = {"grpo", "rloo", "opo", "gpg", "gpg_rewards", "passk", "gdpo", "reinforce_pp_baseline", "otb"}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def check(config: TrainConfig, writes: bool = True) -> None:
    """Refuse what cannot work. Reads config.json of a local model; starts no jax backend.

    Args:
        writes: whether a run directory is going to be needed; then it is made.

    Raises:
        ConfigError: one line for each thing that is wrong.
    """
    _refuse(list(_wrong_types(config)))  # the other checks compute with the values
    _refuse(
        [
            *_ranges(config),
            *own_problems(config.env, "env."),
            *own_problems(config.reward, "reward."),
            *_step(config),
            *_model(config),
            *_data(config),
            *rollout_problems(config),
        ]
    )
    if writes:
        _refuse(list(_run_dir(config.run_dir)))


def check_model(config: TrainConfig, sizes: Mapping[str, int], max_position: int, heads: int) -> None:
    """Refuse rows that the model has no positions for, and rows and heads that the mesh does not divide.

    `check` does it where config.json is at hand and `sizes`, those of the mesh, have no -1.

    Raises:
        ConfigError: one line for each thing that is wrong.
    """
    _refuse([*_strict(config, sizes), *_divided(config, sizes), *_shape(config, sizes, max_position, heads)])


def _refuse(problems: list[str]) -> None:
    if len(problems) > 1:
        raise ConfigError(
            "\n".join(["the config has several problems:", *(f"  - {line}" for line in problems)])
        )
    if problems:
        raise ConfigError(problems[0])


def _wrong_types(config: TrainConfig) -> Iterator[str]:
    for key, (hint, value) in leaves(config):
        if not conforms(value, hint):
            yield f"--{key} is {value!r} ({type(value).__name__}): expected {spell(hint)}."


def _ranges(config: TrainConfig) -> Iterator[str]:
    for key, (_, value) in leaves(config):
        if key in AT_LEAST and value < AT_LEAST[key]:
            yield f"--{key} is {value}: it must be at least {AT_LEAST[key]}."
        if key.endswith("learning_rate") and not 0 < value < math.inf:
            yield f"--{key} is {value}: it must be positive; 1e-6 is usual for RL, 1e-5 for sft."


def own_problems(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield what each part's Config says of its own fields, with their keys."""
    for name, problem in problems(config):
        yield f"--{prefix}{name} {problem}"
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        parts = enumerate(value) if isinstance(value, tuple) else [("", value)]
        for index, part in parts:
            if dataclasses.is_dataclass(part):
                yield from own_problems(part, f"{prefix}{field.name}.{index}{'.' * (index != '')}")


def _step(config: TrainConfig) -> Iterator[str]:
    trajectories, updates = config.trajectories_per_step, config.minibatches_per_step
    if trajectories > 0 < updates and trajectories % updates:
        divisors = [n for n in range(1, trajectories + 1) if trajectories % n == 0]
        close = sorted(divisors, key=lambda n: abs(n - updates))[:2]
        yield (
            f"--minibatches_per_step {updates} does not divide the {trajectories} trajectories of a step "
            f"(prompts_per_step x responses_per_prompt). Set it to {' or '.join(map(str, sorted(close)))}."
        )
    name = getattr(config.algo, "advantage", "")
    if name in COMPARES and config.responses_per_prompt == 1:
        yield (
            f"--responses_per_prompt is 1: {name} compares the responses to one prompt, so it would have "
            "nothing to compare. Set it to 2 or more; 8 is usual."
        )
    row, sequence = config.row_tokens, config.mesh.sequence
    if config.tokens_per_device * max(sequence, 1) < row:
        yield (
            f"--tokens_per_device is {config.tokens_per_device}: less than one row of {row} tokens "
            "(max_prompt_tokens + max_response_tokens). "
            f"Set --tokens_per_device {-(-row // max(sequence, 1))} or more."
        )
    yield from _strict(config, config.mesh.sizes)
    yield from _divided(config, config.mesh.sizes)


def _strict(config: TrainConfig, sizes: Mapping[str, int]) -> Iterator[str]:
    """-1 is not known yet."""
    if config.strict:
        yield from strict_problems(config.rollout, config.model.dtype, math.prod(sizes.values()))


def _divided(config: TrainConfig, sizes: Mapping[str, int]) -> Iterator[str]:
    """A ring's devices hold two chunks of a row each; -1 is not known yet."""
    ring = config.mesh.sequence_parallel == "ring"
    chunks = sizes["sequence"] * (2 if ring else 1)
    if sizes["sequence"] > 1 and config.row_tokens % chunks:
        unit = config.row_tokens // config.max_tokens
        more = next(n for n in range(chunks) if unit * (config.max_tokens + n) % chunks == 0)
        yield (
            f"--mesh.sequence {sizes['sequence']} does not divide a row of {config.row_tokens} tokens "
            f"(max_prompt_tokens + max_response_tokens){' into two chunks a device' if ring else ''}. "
            f"Set --max_response_tokens {config.max_response_tokens + more}."
        )


def _model(config: TrainConfig) -> Iterator[str]:
    model = config.model
    if not model.path:
        if model.architecture is None:
            yield "--model.path is empty: set a folder or hub name, or model.architecture in the recipe."
            return
        if not model.tokenizer:
            yield '--model.tokenizer is empty: random weights bring none. Set a folder, a hub name or "tiny".'
        shape = model.architecture
        yield from _shape(config, config.mesh.sizes, shape.max_position, shape.num_heads)
        return
    folder = Path(model.path).expanduser()
    if not folder.is_dir():
        yield from _missing(model)
        return
    file = folder / "config.json"
    if not file.is_file():
        yield f"--model.path {model.path}: no config.json in it, so it is no Hugging Face model folder."
        return
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        yield f"--model.path {model.path}: {file} is not JSON ({error}). Download the model again."
        return
    known = [found.get(name, 0) for name in ("max_position_embeddings", "num_attention_heads")]
    if all(isinstance(number, int) for number in known):
        yield from _shape(config, config.mesh.sizes, *known)


def _missing(model: ModelConfig) -> Iterator[str]:
    """A path that is no folder may still be a hub name, unless it is spelt like a path."""
    parent = Path(model.path).expanduser().parent
    if not HUB_NAME.fullmatch(model.path) or (parent != Path(".") and parent.is_dir()):
        yield (
            f"--model.path {model.path}: no such folder. Set a Hugging Face folder (config.json and "
            "*.safetensors) or a hub name such as Qwen/Qwen3-0.6B."
        )


def _shape(config: TrainConfig, sizes: Mapping[str, int], max_position: int, heads: int) -> Iterator[str]:
    """Of the model; 0 = not known."""
    if 0 < max_position < config.row_tokens:
        room = max_position - config.max_prompt_tokens
        fix = f"--max_response_tokens {room} or less" if room > 0 else "both smaller"
        yield (
            f"--max_prompt_tokens {config.max_prompt_tokens} + --max_response_tokens "
            f"{config.max_response_tokens} is more than the model's {max_position} positions. Set {fix}."
        )
    parts = sizes["tensor"] * sizes["sequence"]
    if config.mesh.sequence_parallel == "ulysses" and parts > sizes["tensor"] > 0 and heads % parts:
        yield heads_problem(heads, parts)


def _data(config: TrainConfig) -> Iterator[str]:
    if not config.data.path and not all(source.path for source in config.data.train):
        yield (
            "--data.path is empty: set a file or folder, hub:OWNER/NAME, task:NAME (generated) or gym:NAME, "
            "or data.train in the recipe."
        )


def _run_dir(run_dir: str) -> Iterator[str]:
    """Makes the folder and a probe file in it: permissions alone do not tell (root, read-only disks)."""
    fix = "Set --run_dir to a folder that can be written."
    if not run_dir:
        yield f"--run_dir is empty. {fix}"
        return
    probe = Path(run_dir).expanduser() / f".probe-{os.getpid()}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        yield f"--run_dir {run_dir}: cannot be written ({error.strerror}). {fix}"
