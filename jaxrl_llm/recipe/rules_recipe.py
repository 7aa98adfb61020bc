"""Rules that the recipe alone answers: each message names the key and the fix.

Types and ranges, and the rules within one Config, are declared there; the other rules are across Configs.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from jaxrl_llm import algos
from jaxrl_llm.config import GENERATIVE, TrainConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.hub import SUFFIX, hub_spelling, parse_hub_name
from jaxrl_llm.hf.resolve import other_folder
from jaxrl_llm.recipe.fields import field_problems
from jaxrl_llm.recipe.keys import short_repr, shorten
from jaxrl_llm.recipe.rule import Rule
from jaxrl_llm.rollout.config import same_responses
from jaxrl_llm.rollout.servers import auth, launch
from jaxrl_llm.rollout.servers.health import read_addresses
from jaxrl_llm.sharding.config import POLICY, ROLLOUT_ENGINE
from jaxrl_llm.sharding.rules import num_shards
from jaxrl_llm.user_file import expand_home

GROUP_ADVANTAGES = {
    "grpo", "rloo", "opo", "gpg", "gpg_rewards", "passk", "gdpo", "reinforce_pp_baseline", "otb",
    "optimal_value", "mt_grpo", "gigpo",
}  # fmt: skip


# -- length and size of a step


def _steps_are_finite(config: TrainConfig) -> Iterator[str]:
    if not config.steps and not config.epochs and not config.warm_start.steps:
        yield "--steps is 0, and so is --warm_start.steps: nothing to train. Set one of them."
    generated = [own.path for own in config.data.sources("train") if own.is_generated]
    if config.epochs and generated:
        yield (
            f"--epochs is {config.epochs:g}: {generated[0]} is generated, without an end. Set --steps N "
            "--epochs 0."
        )


def _groups_compare(config: TrainConfig) -> Iterator[str]:
    # Responses to a prompt.
    name = getattr(config.algo, "advantage", "")
    if name not in GROUP_ADVANTAGES and getattr(config.algo, "keep_prompts", 1.0) < 1:
        name = "keep_prompts"
    if name in (*GROUP_ADVANTAGES, "keep_prompts") and config.responses_per_prompt == 1:
        yield (
            f"--responses_per_prompt is 1: {name} compares the responses to one prompt, so it would have "
            "nothing to compare. Set it to 2 or more; 8 is usual."
        )
    elif algos.requirements(config.algo).draws > 1 and config.responses_per_prompt == 1:
        yield (
            "--responses_per_prompt is 1: dynamic sampling keeps prompts whose responses have different "
            "rewards, so it would keep none. Set it to 2 or more, or --algo.dynamic_sampling False."
        )
    if algos.of(config.algo).on_rollouts:
        for field, problem in same_responses(config.rollout.sampling, config.responses_per_prompt):
            yield f"--rollout.sampling.{field} {problem}"
    # Turns of a response.
    if algos.requirements(config.algo).turns and (not config.env.active or config.env.max_turns == 1):
        yield (
            f"--algo.advantage {name} compares turns, and responses have one. Set --env.name, --env.tools or "
            "--env.gateway.command, with --env.max_turns 2 or more; or --algo.advantage grpo."
        )


def _rows_fit(config: TrainConfig) -> Iterator[str]:
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


def _rows_divide(config: TrainConfig) -> Iterator[str]:
    # A size of -1 is not known yet. Ring attention needs two chunks a device; the rollout has no rows.
    for role, own in config.placements.items():
        if own.mesh is None or role == ROLLOUT_ENGINE:
            continue
        ring = own.mesh.sequence_parallel == "ring"
        shards = num_shards("sequence", own.mesh.sizes)
        chunks = shards * (2 if ring else 1)
        if shards > 1 and config.min_row_tokens % chunks:
            sequences = config.min_row_tokens // config.max_tokens
            more = -config.max_tokens % (chunks // math.gcd(sequences, chunks))
            yield (
                f"--{role}mesh.sequence {shards} does not divide a row of {config.min_row_tokens} tokens "
                f"(max_prompt_tokens + max_response_tokens){' into two chunks a device' if ring else ''}. "
                f"Set --max_response_tokens {config.max_response_tokens + more}."
            )


def _strict_rounds_alike(config: TrainConfig) -> Iterator[str]:
    # Strict mode needs one order of sums and one rounding. A size of -1 is not known yet.
    if not config.strict:
        return
    rollout, dtype = config.rollout, config.model.dtype
    meshes = (config.mesh_of(role).sizes for role in (POLICY, ROLLOUT_ENGINE))
    sizes = max(meshes, key=lambda sizes: math.prod(sizes.values()))
    if (num_devices := math.prod(sizes.values())) > 1:
        axes = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        yield (
            f"--strict works on one device, and the mesh has {num_devices} ({axes}): sharded sums have "
            "another order. Set --devices 0:1 and leave --mesh and --rollout.mesh as they are; the rollout "
            "may have another device, --rollout.devices 1:2."
        )
    if rollout.engine != "native":
        yield (
            f"--strict and --rollout.engine {rollout.engine} exclude each other: servers sum in another "
            "order. Set --rollout.engine native."
        )
    # Types, then settings that make the rollout's weights others.
    for name in ("dtype", "cache_dtype"):
        value = getattr(rollout, name) or rollout.dtype
        if value != dtype:
            yield (
                f"--strict: --rollout.{name} is {value}, --model.dtype is {dtype}, so the two would round "
                f"differently. Set --rollout.{name} {dtype}."
            )
    if rollout.max_staleness:
        yield (
            "--strict and --rollout.max_staleness exclude each other: stale tokens are of other weights. Set "
            "--rollout.max_staleness 0."
        )
    if rollout.weight_noise:
        yield (
            "--strict and --rollout.weight_noise exclude each other: noise is there to make a mismatch. Set "
            "--rollout.weight_noise 0."
        )


# -- rewards


def _something_rewards(config: TrainConfig) -> Iterator[str]:
    reward, learns = config.reward, algos.learns_from_rewards(config.algo)
    models = any(model.weight for model in reward.models)
    used = reward.weight or models or config.env.rewards or any(weight for _, weight in reward.shaping)
    if learns and not used:
        yield (
            "--reward.weight is 0 and nothing else rewards, so every reward would be 0. Set a reward model "
            "(--reward.models.0.path FOLDER), an environment (--env.name) or --reward.weight 1."
        )


def _weights_match_rewards(config: TrainConfig) -> Iterator[str]:
    weights, models = getattr(config.algo, "component_weights", ()), config.reward.models
    number = 1 + len(config.reward.shaping) + sum(bool(model.weight) for model in models)
    if algos.requirements(config.algo).components and weights and len(weights) != number:
        yield (
            f"--algo.component_weights has {len(weights)} values for {number} rewards: give one each for "
            "reward.name, reward.shaping and reward.models, in this order."
        )


def _judge_compares(config: TrainConfig) -> Iterator[str]:
    if config.eval.judge and not algos.requirements(config.algo).logprobs:
        name = config.algo.algorithm
        yield f"--eval.judge compares responses, and {name} generates none. Set --eval.judge ''."
    if config.eval.judge == GENERATIVE and not any(m.kind == GENERATIVE for m in config.reward.models):
        yield (
            "--eval.judge generative needs a language model that compares: --reward.models.0.path FOLDER "
            "--reward.models.0.kind generative, with --reward.models.0.weight 0 for evaluation alone."
        )


# -- models


def _teachers_exist(config: TrainConfig) -> Iterator[str]:
    teachers = algos.requirements(config.algo).teachers
    for i, source in enumerate(config.data.train):
        if teachers and source.teacher >= len(teachers):
            yield f"--data.train.{i}.teacher is {source.teacher}: algo.teachers has {len(teachers)}, from 0."


def _models_are_readable(config: TrainConfig) -> Iterator[str]:
    # A model of the hub is read when it has been downloaded.
    requires = algos.requirements(config.algo)
    used = {
        "critic.path": config.critic.path if requires.critic else "",
        "reference.path": config.reference.path if requires.ref_logprobs else "",
        "model.path": config.model.path,
    }
    for key, path in used.items():
        try:
            yield from _model_folder(key, path) if path else ()
        except UserError as error:
            yield f"--{key} {path}: {error}"


def _model_folder(key: str, path: str) -> Iterator[str]:
    """Yield the problem with a Hugging Face folder, GGUF file or hub name."""
    folder = expand_home(path)
    if folder.suffix == SUFFIX and os.path.isfile(folder):
        return
    if os.path.isdir(folder):
        if other := other_folder(folder):
            yield f"--{key} {path}: {other}"
        elif not os.path.isfile(folder / "config.json"):
            yield f"--{key} {path}: no config.json in it, so it is not a Hugging Face model folder."
        else:
            read_config(folder)
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


def _optimizers_fit(config: TrainConfig) -> Iterator[str]:
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


def _adapter_has_rank(config: TrainConfig) -> Iterator[str]:
    if config.model.adapter and not config.lora.rank:
        yield f"--model.adapter {config.model.adapter} needs --lora.rank R, the rank of that adapter."


def _replay_has_rollout(config: TrainConfig) -> Iterator[str]:
    algo = algos.of(config.algo)
    if config.routing.replay != "none" and not algo.on_rollouts:
        yield f"--routing.replay is for runs with a rollout: {algo.name} has none. Set it to none."


# -- rollout


def _drafts_have_slots(config: TrainConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.draft_tokens and config.env.active and rollout.slots > rollout.draft_slots:
        yield (
            f"--rollout.draft_tokens {rollout.draft_tokens}: conversations keep all {rollout.slots} slots "
            f"to the end, and drafts are for {rollout.draft_slots} at most. Set --rollout.slots "
            f"{rollout.draft_slots}, --rollout.draft_slots {rollout.slots} or --rollout.draft_tokens 0."
        )


def _servers_hold_the_base(config: TrainConfig) -> Iterator[str]:
    served = config.rollout.engine != "native"
    if config.lora.quantize != "none" and served:
        yield (
            f"--lora.quantize {config.lora.quantize}: servers hold the base without quantization, "
            "whose log-probs are not the trainer's. Set --rollout.engine native, or --lora.quantize none."
        )
    if config.lora.rank and served and config.rollout.weight_noise:
        yield (
            "--rollout.weight_noise changes all weights, and with --lora.rank servers get adapters "
            "alone. Set --rollout.engine native, or --rollout.weight_noise 0."
        )
    if config.lora.rank and served and config.servers.push == "delta":
        yield "--servers.push delta: with --lora.rank each push sends the adapters alone. Set it to full."


def _fp8_is_served(config: TrainConfig) -> Iterator[str]:
    key = "--servers.quantization fp8"
    if config.servers.quantization != "fp8":
        return
    if config.rollout.engine == "native":
        yield f"{key} is for SGLang servers: add --rollout.engine sglang, or set --servers.quantization none."
    if config.rollout.dtype != "bfloat16":
        yield f"{key}: SGLang multiplies bfloat16 alone by such weights. Set --rollout.dtype bfloat16."
    if config.lora.rank:
        yield (
            f"{key}: adapters are trained on a base that is not rounded. Set --servers.quantization none, or "
            "--lora.rank 0."
        )
    if config.servers.transport == "ipc":
        yield f"{key} has no --servers.transport ipc: set disk, http or group."
    if algos.of(config.algo).on_rollouts and not algos.requirements(config.algo).corrected:
        yield (
            f"{key}: responses are of rounded weights, and without a correction the policy learns as if they "
            "were its own. Set --algo.correction.weight token (truncated importance sampling), with an "
            "algorithm that has it (docs/algorithms.md)."
        )


def _addresses_are_right(config: TrainConfig) -> Iterator[str]:
    # Addresses on the command line are checked by `RolloutConfig`.
    servers = config.rollout.servers
    if len(servers) != 1 or not servers[0].startswith("@"):
        return
    try:
        urls = read_addresses(Path(servers[0][1:]))
    except (ValueError, OSError) as error:
        yield f"--rollout.servers is {servers[0]}: it must be a text file with one address a line ({error})."
        return
    problem_of = partial(auth.address_problem, engine=config.rollout.engine)
    for problem in filter(None, map(problem_of, urls)):
        yield f"--rollout.servers is {servers[0]}: {problem}"


def _vllm_has_it(config: TrainConfig) -> Iterator[str]:
    servers, sampling = config.servers, config.rollout.sampling
    if config.rollout.engine != "vllm":
        if (servers.push, servers.transport) == ("delta", "group"):
            yield "--servers.push delta with --servers.transport group is for vLLM: set http, or push full."
        return
    only = "--rollout.engine sglang"
    if servers.transport == "ipc":
        yield f"--servers.transport ipc is not for vLLM: set disk, http or group, or {only}."
    if servers.quantization != "none":
        yield f"--servers.quantization {servers.quantization} is not for vLLM: set none, or {only}."
    if servers.pause == "in_place":
        yield f"--servers.pause in_place: vLLM computes all keys again. Set retract or abort, or {only}."
    if servers.colocated:
        yield f"--servers.colocated is not for vLLM: set it to False, or {only}."
    if config.routing.replay == "rollout":
        yield f"--routing.replay rollout is not for vLLM: set none or old, or {only}."
    if (sampling.top_p, sampling.top_k or 0, sampling.min_p) != (1.0, 0, 0.0):
        yield (
            "--rollout.sampling.top_p, top_k and min_p: vLLM reports log-probs after these filters, and "
            f"the trainer has none. Set 1.0, 0 and 0.0, or {only}."
        )


def _gpus_are_shared(config: TrainConfig) -> Iterator[str]:
    if not config.servers.colocated:
        return
    if config.rollout.max_staleness:
        yield (
            "--servers.colocated and --rollout.max_staleness exclude each other: servers that give their "
            "GPUs to the trainer generate nothing meanwhile. Set --rollout.max_staleness 0."
        )
    yield from launch.colocated_problems(config.servers, config.rollout.launch, os.environ)


def _servers_start(config: TrainConfig) -> Iterator[str]:
    rollout, servers = config.rollout, config.servers
    if servers.devices and len(servers.devices) != rollout.launch:
        yield f"--servers.devices names {len(servers.devices)}, --rollout.launch is {rollout.launch}."
    if rollout.launch and not shutil.which(servers.python):
        yield f"--servers.python is {short_repr(servers.python)}: no such program."
    if servers.transport == "ipc" and rollout.servers:
        yield (
            "--servers.transport ipc shares the memory of GPUs with servers that are started here "
            "(--rollout.launch); for --rollout.servers set disk, http or group."
        )


RECIPE = (
    Rule("recipe", "", field_problems, ends=True),
    Rule("recipe", "steps epochs warm_start.steps data.train", _steps_are_finite),
    Rule("recipe", "responses_per_prompt algo.advantage rollout.sampling env", _groups_compare),
    Rule("recipe", "tokens_per_device score.tokens_per_device max_response_tokens", _rows_fit),
    Rule("recipe", "reward.weight reward.shaping reward.models env.name", _something_rewards),
    Rule("recipe", "algo.component_weights reward.shaping reward.models", _weights_match_rewards),
    Rule("recipe", "eval.judge reward.models", _judge_compares),
    Rule("recipe", "data.train algo.teachers", _teachers_exist),
    Rule("recipe", "strict devices rollout.dtype rollout.cache_dtype", _strict_rounds_alike, sized=True),
    Rule("recipe", "mesh.sequence max_response_tokens", _rows_divide, sized=True),
    Rule("recipe", "model.path critic.path reference.path", _models_are_readable),
    Rule("recipe", "optim critic.optim checkpoint.optimizer model.dtype warm_start.steps", _optimizers_fit),
    Rule("recipe", "model.adapter lora.rank", _adapter_has_rank),
    Rule("recipe", "routing.replay", _replay_has_rollout),
    Rule("recipe", "lora.quantize rollout.engine rollout.weight_noise servers.push", _servers_hold_the_base),
    Rule("recipe", "servers.quantization rollout.engine rollout.dtype algo.correction", _fp8_is_served),
    Rule("recipe", "rollout.draft_tokens rollout.slots rollout.draft_slots", _drafts_have_slots),
    Rule("recipe", "rollout.servers", _addresses_are_right),
    Rule("recipe", "rollout.engine servers routing.replay rollout.sampling", _vllm_has_it),
    Rule("recipe", "servers.colocated rollout.max_staleness rollout.launch", _gpus_are_shared),
    Rule("recipe", "servers.devices servers.python servers.transport rollout.launch", _servers_start),
)
