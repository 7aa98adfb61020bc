"""Checks of a whole config, before any model is loaded: each message names the key and the fix.

Types and ranges, and the rules within one Config, are declared there; here are the rules across Configs.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm import algos
from jaxrl_llm.config import GENERATIVE, TrainConfig, TransformerConfig, same_responses
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.hf.hub_name import SUFFIX, hub_spelling, parse_hub_name
from jaxrl_llm.hf.resolve import other_folder
from jaxrl_llm.recipe.fields import check_fields, refuse
from jaxrl_llm.recipe.keys import short_repr, shorten
from jaxrl_llm.rollout.checks import dynamic_rope_hint, strict_problems
from jaxrl_llm.rollout.sglang import auth, colocated
from jaxrl_llm.rollout.sglang.health import read_addresses
from jaxrl_llm.sharding.attention import heads_problem
from jaxrl_llm.sharding.config import POLICY, ROLLOUT_ENGINE
from jaxrl_llm.sharding.rules import num_shards
from jaxrl_llm.user_file import expand_home

GROUP_ADVANTAGES = {
    "grpo", "rloo", "opo", "gpg", "gpg_rewards", "passk", "gdpo", "reinforce_pp_baseline", "otb",
    "optimal_value",
}  # fmt: skip


def check_config(config: TrainConfig, writes: bool = True) -> None:
    """Refuse a config that cannot work. Reads config.json of a local model; starts no jax backend.

    Args:
        writes: whether a run directory is going to be needed; then it is made.

    Raises:
        ConfigError: one line for each thing that is wrong.
    """
    check_fields(config)
    rules = (_step, _rewards, _teachers, _devices, _model, _rollout)
    refuse([line for rule in rules for line in rule(config)])
    if writes:
        refuse(list(_run_dir(config.run_dir)))


def check_model(
    config: TrainConfig, sizes: Mapping[str, Mapping[str, int]], model: TransformerConfig
) -> None:
    """Refuse rows that the model has no positions for, and rows and heads that a mesh does not divide.

    `check_config` does it where config.json is at hand and the sizes have no -1.

    Args:
        sizes: of the mesh of each role (`TrainConfig.placements`), mesh axis -> size.
        model: the policy's.

    Raises:
        ConfigError: one line for each thing that is wrong.
    """
    shape = _shape(config, sizes[""], model.max_position, model.num_heads, model.rope.scaling)
    refuse([*_strict(config, sizes), *_divided(config, sizes), *shape])


def check_held_out(config: TrainConfig, rows: int) -> None:
    """Refuse an evaluation without held-out data. Fewer rows than --eval.prompts are all evaluated.

    Raises:
        ConfigError: there are none; names the ways to have some.
    """
    if not rows:
        raise ConfigError(
            f"--eval.every is {config.eval.every}: there is no held-out data to evaluate on. Hold out a part "
            "of the training rows (--data.holdout 0.1), give some (--data.eval_path FILE), or set "
            "--eval.every 0, for no evaluation."
        )


def _step(config: TrainConfig) -> Iterator[str]:
    if not config.steps and not config.epochs and not config.warm_start.steps:
        yield "--steps is 0, and so is --warm_start.steps: there is nothing to train. Set one of them."
    generated = [own.path for own in config.data.sources("train") if own.is_generated]
    if config.epochs and generated:
        yield (
            f"--epochs is {config.epochs:g}: {generated[0]} is generated, without an end. Set --steps N "
            "--epochs 0."
        )
    name = getattr(config.algo, "advantage", "")
    if name in GROUP_ADVANTAGES and config.responses_per_prompt == 1:
        yield (
            f"--responses_per_prompt is 1: {name} compares the responses to one prompt, so it would have "
            "nothing to compare. Set it to 2 or more; 8 is usual."
        )
    elif algos.requirements(config.algo).draws > 1 and config.responses_per_prompt == 1:
        yield (
            "--responses_per_prompt is 1: dynamic sampling keeps prompts whose responses have different "
            "rewards, so it would keep none. Set it to 2 or more, or --algo.dynamic_sampling False."
        )
    row, sequence = config.min_row_tokens, max(config.mesh.sequence, 1)
    budgets = {
        "tokens_per_device": config.tokens_per_device,
        "score.tokens_per_device": config.score.tokens_per_device,
    }
    for key, tokens in budgets.items():
        if tokens is not None and tokens * sequence < row:
            yield (
                f"--{key} is {tokens}: less than one row of {row} tokens (max_prompt_tokens + "
                f"max_response_tokens). Set --{key} {-(-row // sequence)} or more."
            )


def _rewards(config: TrainConfig) -> Iterator[str]:
    """Yield why all rewards of a run that learns from them would be 0, and judges that cannot judge."""
    reward, learns = config.reward, algos.learns_from_rewards(config.algo)
    models = any(model.weight for model in reward.models)
    used = reward.weight or models or config.env.name or any(weight for _, weight in reward.shaping)
    if learns and not used:
        yield (
            "--reward.weight is 0 and nothing else rewards, so every reward would be 0. Set a reward model "
            "(--reward.models.0.path FOLDER), an environment (--env.name) or --reward.weight 1."
        )
    if config.eval.judge and not algos.requirements(config.algo).logprobs:
        name = config.algo.algorithm
        yield f"--eval.judge compares responses, and {name} generates none. Set --eval.judge ''."
    if config.eval.judge == GENERATIVE and not any(model.kind == GENERATIVE for model in reward.models):
        yield (
            "--eval.judge generative needs a language model that compares: --reward.models.0.path FOLDER "
            "--reward.models.0.kind generative, with --reward.models.0.weight 0 for evaluation alone."
        )


def _teachers(config: TrainConfig) -> Iterator[str]:
    """Yield sources of data that name a teacher that there is not."""
    teachers = algos.requirements(config.algo).teachers
    for i, source in enumerate(config.data.train):
        if teachers and source.teacher >= len(teachers):
            yield f"--data.train.{i}.teacher is {source.teacher}: algo.teachers has {len(teachers)}, from 0."


def _devices(config: TrainConfig) -> Iterator[str]:
    sizes = {role: config.mesh_of(role).sizes for role in config.placements}
    yield from _strict(config, sizes)
    yield from _divided(config, sizes)


def _strict(config: TrainConfig, sizes: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield what --strict does not go with; a size of -1 is not known yet."""
    if config.strict:
        num_devices = [math.prod(sizes[role].values()) for role in (POLICY, ROLLOUT_ENGINE)]
        yield from strict_problems(config.rollout, config.model.dtype, max(num_devices))


def _divided(config: TrainConfig, sizes: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield what is wrong with rows that context parallelism shards; a size of -1 is not known yet.

    Ring attention needs two chunks a device. The rollout has no rows.
    """
    for role, own in config.placements.items():
        if own.mesh is None or role == ROLLOUT_ENGINE:
            continue
        ring = config.mesh_of(role).sequence_parallel == "ring"
        shards = num_shards("sequence", sizes[role])
        chunks = shards * (2 if ring else 1)
        if shards > 1 and config.min_row_tokens % chunks:
            sequences = config.min_row_tokens // config.max_tokens
            more = -config.max_tokens % (chunks // math.gcd(sequences, chunks))
            yield (
                f"--{role}mesh.sequence {shards} does not divide a row of {config.min_row_tokens} tokens "
                f"(max_prompt_tokens + max_response_tokens){' into two chunks a device' if ring else ''}. "
                f"Set --max_response_tokens {config.max_response_tokens + more}."
            )


def _model(config: TrainConfig) -> Iterator[str]:
    path, shape = config.model.path, config.model.architecture
    if config.critic.path and algos.requirements(config.algo).critic:
        yield from _model_folder("critic.path", config.critic.path)
    if config.reference.path and algos.requirements(config.algo).ref_logprobs:
        yield from _model_folder("reference.path", config.reference.path)
    if path:
        yield from _model_folder("model.path", path)
        yield from _stored_shape(config, expand_home(path) / "config.json")
    elif shape:
        yield from _shape(config, config.mesh.sizes, shape.max_position, shape.num_heads, shape.rope.scaling)
    optims = {"optim": config.optim}
    if algos.requirements(config.algo).critic:
        optims["critic.optim"] = config.critic.optim
    for key in (key for key, optim in optims.items() if optim.store_param_remainders):
        if config.model.dtype != "bfloat16":
            yield f"--{key}.store_param_remainders is True: it needs --model.dtype bfloat16."
        if not config.checkpoint.optimizer:
            yield (
                f"--{key}.store_param_remainders is True: the rest of each weight is optimizer state, which "
                "--checkpoint.optimizer False does not save. Set one of them the other way."
            )
        if config.lora.rank:
            yield f"--{key}.store_param_remainders is True: it is not for adapters. Set it to False."
    for key in (key for key, optim in optims.items() if optim.init_from and config.warm_start.steps):
        yield f"--{key}.init_from: the SFT warm-up would start with these moments. Set --warm_start.steps 0."
    if config.critic.optim.ema:
        yield f"--critic.optim.ema is {config.critic.optim.ema}: no critic is exported. Set it to 0."
    if config.model.adapter and not config.lora.rank:
        yield f"--model.adapter {config.model.adapter} needs --lora.rank R, the rank of that adapter."


def _model_folder(key: str, path: str) -> Iterator[str]:
    """Yield what is wrong with a Hugging Face folder, GGUF file or hub name."""
    folder = expand_home(path)
    if folder.suffix == SUFFIX and os.path.isfile(folder):
        return
    if os.path.isdir(folder):
        if not os.path.isfile(folder / "config.json"):
            unknown = "no config.json in it, so it is no Hugging Face model folder."
            yield f"--{key} {path}: {other_folder(folder) or unknown}"
        return
    hub = parse_hub_name(path)
    if hub is None and (spelling := hub_spelling(path)):
        yield f"--{key} {shorten(path)}: no such folder. A model of the hub is written {spelling}."
    elif hub is None or (folder.parent != Path(".") and os.path.isdir(folder.parent)):
        kind = "file" if folder.suffix == SUFFIX else "folder"
        yield (
            f"--{key} {shorten(path)}: no such {kind}. Set a Hugging Face folder (config.json and "
            "*.safetensors), a GGUF file, or a hub name such as Qwen/Qwen3-0.6B."
        )


def _stored_shape(config: TrainConfig, file: Path) -> Iterator[str]:
    """Yield what does not fit the positions and heads that a model's config.json states, if it is at hand."""
    if not os.path.isfile(file):
        return
    try:
        stored = json.loads(file.read_text())
    except (ValueError, RecursionError, OSError) as error:
        yield f"--model.path {config.model.path}: {file} is not JSON ({error}). Download the model again."
        return
    names = ("max_position_embeddings", "num_attention_heads")
    known = [stored.get(name, 0) if isinstance(stored, dict) else 0 for name in names]
    if all(type(number) is int for number in known):  # others are named with the rest of the file
        yield from _shape(config, config.mesh.sizes, *known, _stored_scaling(stored))


def _stored_scaling(stored: dict[str, Any]) -> str:
    """Return the type of RoPE that a config.json states; "" = none."""
    rope = stored.get("rope_scaling") or stored.get("rope_parameters") or {}
    return str(rope.get("rope_type", rope.get("type", ""))) if isinstance(rope, dict) else ""


def _shape(
    config: TrainConfig, sizes: Mapping[str, int], max_position: int, heads: int, scaling: str
) -> Iterator[str]:
    """Yield what does not fit the model's positions and heads; 0 = not known."""
    if 0 < max_position < config.max_tokens:
        room = max_position - config.max_prompt_tokens
        fix = f"--max_response_tokens {room} or less" if room > 0 else "both smaller"
        yield (
            f"--max_prompt_tokens {config.max_prompt_tokens} + --max_response_tokens "
            f"{config.max_response_tokens} is more than the model's {max_position} positions. Set {fix}"
            f"{dynamic_rope_hint(scaling)}"
        )
    tensor, sequence = num_shards("heads", sizes), num_shards("sequence", sizes)
    if (
        config.mesh.sequence_parallel == "ulysses"
        and tensor > 0
        and sequence > 1
        and heads % (tensor * sequence)
    ):
        yield heads_problem(heads, tensor * sequence)


def _rollout(config: TrainConfig) -> Iterator[str]:
    rollout, sglang = config.rollout, config.sglang
    if config.lora.quantize != "none" and rollout.engine == "sglang":
        yield (
            f"--lora.quantize {config.lora.quantize}: SGLang servers hold the base without quantization, "
            "whose log-probs are not the trainer's. Set --rollout.engine native, or --lora.quantize none."
        )
    if sglang.quantization == "fp8":
        yield from _fp8(config)
    if config.lora.rank and rollout.engine == "sglang" and rollout.weight_noise:
        yield (
            "--rollout.weight_noise changes all weights, and with --lora.rank SGLang servers get adapters "
            "alone. Set --rollout.engine native, or --rollout.weight_noise 0."
        )
    on_rollouts, responses = algos.of(config.algo).on_rollouts, config.responses_per_prompt
    if on_rollouts and responses > 1 and rollout.sampling.temperature == 0:
        yield f"--rollout.sampling.temperature {same_responses(responses)}"
    if rollout.draft_tokens and config.env.active and rollout.slots > rollout.draft_slots:
        yield (
            f"--rollout.draft_tokens {rollout.draft_tokens}: conversations keep all {rollout.slots} slots "
            f"to the end, and drafts are for {rollout.draft_slots} at most. Set --rollout.slots "
            f"{rollout.draft_slots}, --rollout.draft_slots {rollout.slots} or --rollout.draft_tokens 0."
        )
    yield from _addresses(rollout.servers)
    if sglang.colocated and rollout.max_staleness:
        yield (
            "--sglang.colocated and --rollout.max_staleness exclude each other: servers that give their GPUs "
            "to the trainer generate nothing meanwhile."
        )
    if sglang.colocated:
        yield from colocated.colocated_problems(sglang, rollout.launch, os.environ)
    if sglang.devices and len(sglang.devices) != rollout.launch:
        yield f"--sglang.devices names {len(sglang.devices)}, --rollout.launch is {rollout.launch}."
    if rollout.launch and not shutil.which(sglang.python):
        yield f"--sglang.python is {short_repr(sglang.python)}: no such program."
    if sglang.transport == "ipc" and rollout.servers:
        yield (
            "--sglang.transport ipc shares the memory of GPUs with servers that are started here "
            "(--rollout.launch); for --rollout.servers set disk, http or group."
        )


def _fp8(config: TrainConfig) -> Iterator[str]:
    """Yield what weights in 8 bits on servers do not go with, or lack."""
    key = "--sglang.quantization fp8"
    if config.rollout.engine != "sglang":
        yield f"{key} is for SGLang servers: add --rollout.engine sglang, or set --sglang.quantization none."
    if config.rollout.dtype != "bfloat16":
        yield f"{key}: SGLang multiplies bfloat16 alone by such weights. Set --rollout.dtype bfloat16."
    if config.lora.rank:
        yield (
            f"{key}: adapters are trained on a base that is not rounded. Set --sglang.quantization none, or "
            "--lora.rank 0."
        )
    if config.sglang.transport == "ipc":
        yield f"{key} has no --sglang.transport ipc: set disk, http or group."
    if algos.of(config.algo).on_rollouts and not algos.requirements(config.algo).corrected:
        yield (
            f"{key}: responses are of rounded weights, and without a correction the policy learns as if they "
            "were its own. Set --algo.correction.weight token (truncated importance sampling), with an "
            "algorithm that has it (docs/algorithms.md)."
        )


def _addresses(servers: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with a file of addresses."""
    if len(servers) != 1 or not servers[0].startswith("@"):
        return
    try:
        urls = read_addresses(Path(servers[0][1:]))
    except (ValueError, OSError) as error:
        yield f"--rollout.servers is {servers[0]}: it must be a text file with one address a line ({error})."
        return
    for problem in filter(None, map(auth.address_problem, urls)):
        yield f"--rollout.servers is {servers[0]}: {problem}"


def _run_dir(run_dir: str) -> Iterator[str]:
    """Make the folder and a probe file in it: permissions alone do not suffice (root, read-only disks)."""
    fix = "Set --run_dir to a folder that can be written."
    if not run_dir:
        yield f"--run_dir is empty. {fix}"
        return
    try:
        probe = expand_home(run_dir) / f".probe-{os.getpid()}"
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except (OSError, ValueError) as error:  # the last one: a NUL character
        reason = getattr(error, "strerror", None) or error
        yield f"--run_dir {shorten(run_dir)}: cannot be written ({reason}). {fix}"
