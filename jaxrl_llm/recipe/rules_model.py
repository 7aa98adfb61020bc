"""Rules that recipe and architectures answer: of the policy and of all models with separate files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields

from jaxrl_llm import algos
from jaxrl_llm.bridge import fp8
from jaxrl_llm.config import RoutingConfig, TrainConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.hf.config import CODE, to_hf_config
from jaxrl_llm.hf.export import export_config
from jaxrl_llm.hf.hybrids import attention_interval
from jaxrl_llm.hf.names import joined_weights
from jaxrl_llm.models.attention import original_length
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.lora import rank_of_experts, with_lora
from jaxrl_llm.models.lora_config import TARGETS, LoraConfig, linear_layers
from jaxrl_llm.models.stacks import stages_problem
from jaxrl_llm.recipe.rule import Rule
from jaxrl_llm.rollout.checks import dynamic_rope_hint, ring_problem, token_problems
from jaxrl_llm.sharding.attention import heads_problem
from jaxrl_llm.sharding.config import CRITIC, POLICY, REFERENCE, TEACHER, MeshConfig, teacher_role
from jaxrl_llm.sharding.rules import num_shards

WITHOUT_SERVED_ROUTES = ("mixtral", "olmoe")
"""Families whose routers SGLang 0.5 does not number: its recorder of chosen experts fails at the first."""
Models = Mapping[str, TransformerConfig]
"""Role -> architecture, of the policy, a pretrained critic, a reference, teachers and reward models."""


def _can_be_exported(config: TrainConfig, models: Models) -> Iterator[str]:
    try:
        to_hf_config(export_config(models[POLICY]))
    except UserError as error:
        key = f"path {config.model.path}" if config.model.path else "architecture"
        yield f"--model.{key}: {error}. Set another family, or values that its config.json can express."


def _writes_text(config: TrainConfig, models: Models) -> Iterator[str]:
    requires, policy = algos.requirements(config.algo), config.model.path
    keys = {REFERENCE: f"reference.path {config.reference.path}"}
    keys |= {teacher_role(i): f"algo.teachers {path}" for i, path in enumerate(requires.teachers)}
    if requires.logprobs:
        keys[POLICY] = f"model.path {policy}" if policy else "model.architecture.value_head True"
    for role, key in keys.items():
        if role in models and models[role].value_head:
            yield (
                f"--{key}: a model with a score head, such as a reward model, has no head of a language "
                "model. Set a language model."
            )


def _has_positions(config: TrainConfig, models: Models) -> Iterator[str]:
    model = models[POLICY]
    if model.max_position < config.max_tokens:
        room = model.max_position - config.max_prompt_tokens
        fix = f"--max_response_tokens {room} or less" if room > 0 else "both smaller"
        yield (
            f"--max_prompt_tokens {config.max_prompt_tokens} + --max_response_tokens "
            f"{config.max_response_tokens} is more than the model's {model.max_position} positions. Set {fix}"
            f"{_stretch(config, model)}{dynamic_rope_hint(model.rope.scaling)}"
        )


def _stretch(config: TrainConfig, model: TransformerConfig) -> str:
    """Return the YaRN that makes a model's positions suffice; "" if its RoPE has none."""
    if _unstretched(model):
        return ""
    return f", or --model.yarn_factor {max(math.ceil(config.max_tokens / original_length(model)), 2)}"


def _unstretched(model: TransformerConfig) -> str:
    """Return why YaRN cannot stretch the positions of a model; "" = it can."""
    if model.alibi or not any(model.rope_layers or (True,)):
        return "the model has no RoPE"
    if model.rope.scaling not in ("default", "dynamic", "yarn"):
        return f"the model's RoPE has rope_type {model.rope.scaling}, beside which YaRN is not defined"
    return ""


def _yarn_has_rope(config: TrainConfig, models: Models) -> Iterator[str]:
    if config.model.yarn_factor is not None and (problem := _unstretched(models[POLICY])):
        yield f"--model.yarn_factor {config.model.yarn_factor:g}: {problem}. Leave it out."


def _heads_divide(config: TrainConfig, models: Models) -> Iterator[str]:
    heads, parts = models[POLICY].num_heads, _parts_of_heads(config.mesh)
    if config.mesh.sequence_parallel == "ulysses" and heads % parts:
        yield heads_problem(heads, parts)
    for role, model in models.items():
        heads, parts = _state_heads(model), _parts_of_heads(config.mesh_of(role))
        if model.recurrent_kind and heads % parts:
            mesh = _mesh_key(config, role)
            yield (
                f"{mesh}.sequence divides the {heads} heads of recurrent layers among tensor x sequence = "
                f"{parts} devices, and {heads} is not a multiple of {parts}. Set a smaller {mesh}.sequence "
                f"or {mesh}.tensor."
            )


def _stages_are_equal(config: TrainConfig, models: Models) -> Iterator[str]:
    for role, model in models.items():
        if problem := stages_problem(model, config.mesh_of(role).stage, _mesh_key(config, role)):
            yield problem if role == POLICY else f"{problem} The layers are of {role.rstrip('.')}."


def _stages_keep_inputs(config: TrainConfig, models: Models) -> Iterator[str]:
    for role in (role for role in (POLICY, CRITIC) if role in models):
        key, stages = _mesh_key(config, role), num_shards("layers", config.mesh_of(role).sizes)
        if config.model.remat == "offload" and stages > 1:
            yield (
                f"--model.remat offload and {key}.stage {stages} exclude each other: XLA keeps the layer "
                "inputs of all chunks of a pipeline on the devices. Set --model.remat full."
            )


def _indexers_fit(config: TrainConfig, models: Models) -> Iterator[str]:
    for role, model in models.items():
        mesh, key = config.mesh_of(role), _mesh_key(config, role)
        if model.index and num_shards("sequence", mesh.sizes) > 1:
            yield f"{key}.sequence is {mesh.sequence}: an indexer reads whole rows. Set {key}.sequence 1."
        if model.index_layers and num_shards("layers", mesh.sizes) > 1:
            yield (
                f"{key}.stage is {mesh.stage}: some layers reuse the choice of an earlier layer's indexer, "
                f"which no stage sends. Set {key}.stage 1."
            )


def _mesh_key(config: TrainConfig, role: str) -> str:
    """Return the prefix of the keys of a model's mesh."""
    role = TEACHER if role.startswith(TEACHER) else role
    return f"--{role if config.placements[role].mesh else ''}mesh"


def _parts_of_heads(mesh: MeshConfig) -> int:
    """Return the devices that divide the heads with context parallelism; 1 without, or if a size is not known
    yet."""
    tensor, sequence = num_shards("heads", mesh.sizes), num_shards("sequence", mesh.sizes)
    return tensor * sequence if tensor >= 1 and sequence >= 2 else 1


def _state_heads(model: TransformerConfig) -> int:
    """Return the heads of a recurrent layer, or its channels if it has no heads."""
    if model.delta:
        return model.delta.value_heads
    return model.mamba.heads if model.mamba else model.hidden_size


def _recurrent_layers_fit(config: TrainConfig, models: Models) -> Iterator[str]:
    if problem := ring_problem(config.rollout, models[POLICY]):
        yield f"--{problem}"


def _stop_tokens_exist(config: TrainConfig, models: Models) -> Iterator[str]:
    samplings = {"--rollout.sampling": config.rollout.sampling, "--eval.sampling": config.eval.sampling}
    for key, sampling in samplings.items():
        yield from (f"{key}.{problem}" for problem in token_problems(sampling, models[POLICY]))


def _experts_are_routed(config: TrainConfig, models: Models) -> Iterator[str]:
    routing, moe = config.routing, models[POLICY].moe
    changed = [f.name for f in fields(RoutingConfig) if getattr(routing, f.name) != f.default]
    if changed and not moe:
        yield f"--routing.{changed[0]}: the model has no experts. Leave it out."
    elif routing.bias_rate and (config.lora.rank or not moe.selection_bias):
        why = "with --lora.rank it is frozen" if config.lora.rank else "the model's routers have none"
        yield f"--routing.bias_rate moves a selection bias: {why}. Set it to 0."


def _routes_are_reported(config: TrainConfig, models: Models) -> Iterator[str]:
    family, served = models[POLICY].family, config.rollout.engine != "native"
    if config.routing.replay == "rollout" and served and family in WITHOUT_SERVED_ROUTES:
        yield (
            f"--routing.replay rollout: SGLang servers of {family} end with an error when they should "
            "report the chosen experts. Set it to none or old, or --rollout.engine native."
        )


def _unserved_layers(config: TrainConfig, model: TransformerConfig) -> str:
    """Return which models with layers of several kinds are not sent to servers; "" = this model is sent."""
    if not model.layer_kinds:
        return ""
    if config.rollout.engine != "sglang" or model.family != "qwen3_5_text":
        return "models with recurrent layers, dense Qwen3.5 on SGLang excepted,"
    if config.lora.rank or config.servers.quantization == "fp8":
        return "adapters and fp8 weights of models with recurrent layers"
    if model.qkv_bias or attention_interval(model.layer_kinds) is None:
        return "Qwen3.5 models with attention biases or irregular layer_types, which SGLang ignores,"
    return ""


def _is_served(config: TrainConfig, models: Models) -> Iterator[str]:
    if config.rollout.engine == "native":
        return
    model, unsent, fix = models[POLICY], "", "Set it to native."
    # Architectures that are not sent, then adapters.
    if model.mla:
        unsent = "models with latent attention (DeepSeek-V3)"
    elif problem := _unserved_layers(config, model):
        unsent = problem
    elif model.global_heads:
        unsent = "models whose layers have heads of two sizes (Gemma 4)"
    elif model.shared_kv_layers or model.per_layer_inputs:
        unsent = "models with shared keys and values or per-layer inputs (Gemma 4)"
    elif (family := export_config(model).family) in CODE:
        unsent = "models that other programs run with the code of their folder (Qwen 1, Baichuan 2)"
    elif model.attention_sinks:
        unsent = "models with attention sinks (gpt-oss)"
    elif model.moe and model.tie_embeddings:  # SGLang computes with a separate LM head
        unsent = "mixtures of experts with tied embeddings"
        fix = "Set --model.architecture.tie_embeddings false for random weights, or --rollout.engine native."
    elif config.lora.rank and joined_weights(family):
        unsent = "adapters of layers that are stored as one (Phi-3)"
    elif rank_of_experts(with_lora(model, config.lora)):
        unsent = "adapters of experts"
        fix = "Set --lora.targets q_proj k_proj v_proj o_proj, or --rollout.engine native."
    if unsent:
        yield f"--rollout.engine is {config.rollout.engine}: {unsent} are not sent to servers. {fix}"


def _fp8_has_blocks(config: TrainConfig, models: Models) -> Iterator[str]:
    if config.servers.quantization == "fp8" and (problem := fp8.architecture_problem(models[POLICY])):
        yield f"--servers.quantization fp8: {problem}. Set --servers.quantization none."


def _adapters_fit(config: TrainConfig, models: Models) -> Iterator[str]:
    trained = dict.fromkeys(models[role] for role in (POLICY, CRITIC) if role in models)
    for model in trained if config.lora.rank else ():
        yield from _adapter_problems(config, model)


def _adapter_problems(config: TrainConfig, model: TransformerConfig) -> Iterator[str]:
    lora, present = config.lora, dict.fromkeys(linear_layers(model).values())
    absent = [name for name in lora.targets if name not in ("all", *present)]
    if absent:
        yield (
            f"--lora.targets has {absent[0]}: the model has no such layers. Set it to all, or to some of "
            f"{' '.join(present)}."
        )
    # A rank above a layer's size adds nothing.
    name, smallest = min(_sizes_of_layers(model).items(), key=lambda item: item[1])
    if lora.rank > smallest:
        yield (
            f"--lora.rank is {lora.rank}: the model's {name} is {smallest}. "
            f"Set --lora.rank {smallest} or less; 8 to 64 are usual."
        )
    if not model.moe:
        yield from _joined_problems(lora, export_config(model).family)
        return
    if model.mlp_gate and ("gate_proj" in lora.adapted) != ("up_proj" in lora.adapted):
        yield (
            "--lora.targets has one of gate_proj and up_proj: PEFT, SGLang and vLLM keep both of an expert "
            "in one matrix. Name both or neither."
        )
    rank = rank_of_experts(with_lora(model, lora))
    smallest = min(model.moe.expert_size, model.expert_width)
    if rank and rank > smallest:
        yield (
            f"--lora.expert_rank is {rank}: the model's experts have {smallest} inputs or outputs. "
            f"Set --lora.expert_rank {smallest} or less; 1 to 8 are usual."
        )


def _joined_problems(lora: LoraConfig, family: str) -> Iterator[str]:
    """Yield a problem for each matrix of the family's files of which only a part gets adapters."""
    for hf, parts in joined_weights(family).items():
        names = [name for name, ours in TARGETS.items() if f"layers.{ours}" in parts]
        some = [name for name in names if name in lora.adapted]
        if some and some != names:
            module = hf.split(".")[-2]
            yield (
                f"--lora.targets has {' '.join(some)}: files of {family} have one layer for "
                f"{' '.join(names)}, {module}, and one adapter. Name all of these, or none."
            )


def _reward_models_have_heads(config: TrainConfig, models: Models) -> Iterator[str]:
    for role, reward in config.reward_models.items():
        if role in models and (problem := reward.head_problem(models[role].value_head)):
            yield f"--{role}path {reward.path}: {problem}"


def _sizes_of_layers(model: TransformerConfig) -> dict[str, int]:
    """Return name -> inputs or outputs of the linear layers except experts."""
    heads, sizes = model.num_heads, {"hidden_size": model.hidden_size}
    if mla := model.mla:
        sizes |= {"mla.kv_rank": mla.kv_rank, "num_heads * mla.value_dim": heads * mla.value_dim}
        sizes |= {"mla.q_rank": mla.q_rank} if mla.q_rank else {}
    else:
        sizes["num_kv_heads * head_dim"] = model.num_kv_heads * model.head_dim
    if model.per_layer_inputs:
        sizes["per_layer_inputs"] = model.per_layer_inputs
    if heads := model.global_heads:
        sizes["global_heads.num_kv_heads * global_heads.head_dim"] = heads.num_kv_heads * heads.head_dim
    return sizes if model.moe else sizes | {"mlp_size": model.mlp_size}


MODEL = (
    Rule("model", "model.path model.architecture", _can_be_exported),
    Rule("model", "model.path model.architecture reference.path algo.teachers", _writes_text),
    Rule("model", "max_prompt_tokens max_response_tokens", _has_positions),
    Rule("model", "model.yarn_factor", _yarn_has_rope),
    Rule("model", "mesh.sequence_parallel mesh.sequence mesh.tensor", _heads_divide),
    Rule("model", "mesh.stage", _stages_are_equal),
    Rule("model", "mesh.stage model.remat", _stages_keep_inputs),
    Rule("model", "mesh.sequence mesh.stage", _indexers_fit),
    Rule("model", "rollout.cache rollout.cache_dtype rollout.draft_tokens", _recurrent_layers_fit),
    Rule("model", "rollout.sampling.stop_tokens eval.sampling.stop_tokens", _stop_tokens_exist),
    Rule("model", "routing.balance_coef routing.bias_rate routing.replay lora.rank", _experts_are_routed),
    Rule("model", "routing.replay rollout.engine", _routes_are_reported),
    Rule("model", "rollout.engine lora.targets", _is_served),
    Rule("model", "servers.quantization", _fp8_has_blocks),
    Rule("model", "lora.rank lora.targets lora.expert_rank", _adapters_fit),
    Rule("model", "reward.models", _reward_models_have_heads),
)
