"""veRL: `python3 -m verl.trainer.main_ppo a.b=c` and its SFT trainers, as keys here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from jaxrl_import.fields import OTHER_MUON, Conversion
from jaxrl_import.tables import load_system
from jaxrl_import.values import source_path
from jaxrl_import.verl_losses import distillation, set_algorithm, set_correction, set_kl, set_loss, sum_note
from jaxrl_import.verl_names import ACTOR, CRITIC_DEFAULTS, MANAGER, MODEL, OPTIMIZERS, READERS, REF, ROLLOUT

UNEVEN = re.compile(
    r"pipeline_model_parallel_layout|num_layers_in_(first|last)_pipeline_stage|"
    r"decoder_(first|last)_pipeline_num_layers|account_for_\w+_in_pipeline_split"
)
"""Keys of Megatron that give the stages of a pipeline different numbers of layers."""
PARALLEL = re.compile(r"\b((tensor|pipeline)(_model)?|context)_parallel_size$|\bengine\.[tcp]p(_size)?$")


def _rules_of_ppo(conv: Conversion) -> None:
    set_algorithm(conv)
    set_loss(conv)
    set_kl(conv)
    set_correction(conv)
    distillation(conv)
    # Sizes, the mesh and optimizers.
    conv.devices = conv.devices or conv.get("trainer.n_gpus_per_node") * conv.get("trainer.nnodes")
    _mesh(conv, ACTOR)
    _other_meshes(conv)
    for ours, name in (("max_prompt_tokens", "prompt_length"), ("max_response_tokens", "response_length")):
        conv.copy_set(ours, f"{ROLLOUT}.{name}")
    conv.put_steps("trainer.total_epochs", "trainer.total_training_steps")
    updates = _minibatches(conv, _prompts(conv))
    _micro_batches(conv)
    _optimizer_rules(conv, f"{ACTOR}.optim", "optim", updates)
    if conv.algo in ("ppo", "pf_ppo"):
        _critic(conv, updates)
    else:
        conv.drop_critic(f"{conv.algo} has no critic")
    # Rewards, data and outputs; types and the rollout engine.
    _rewards(conv)
    _evaluation(conv)
    _lora(conv, MODEL)
    _rope(conv)
    _data(conv)
    _outputs(conv)
    for backend in ("fsdp_config", "megatron", "veomni"):
        if conv.get(f"{REF}.{backend}.param_offload"):
            conv.put("reference.offload", True, f"{REF}.{backend}.param_offload")
    for backend in ("fsdp_config", "megatron", "torchtitan"):
        conv.copy_set("model.dtype", f"{ACTOR}.{backend}.dtype")
    if conv.get(f"{ROLLOUT}.enable_rollout_routing_replay"):
        conv.put("routing.replay", "rollout", f"{ROLLOUT}.enable_rollout_routing_replay")
    conv.put_engine(
        f"{ROLLOUT}.name",
        str(conv.get(f"{ROLLOUT}.name")),
        conv.get(f"{ROLLOUT}.tensor_model_parallel_size"),
        conv.get(f"{ROLLOUT}.gpu_memory_utilization"),
        stages=conv.get(f"{ROLLOUT}.pipeline_model_parallel_size") or 1,
    )


def _prompts(conv: Conversion) -> int:
    """Return the prompts of a step. In asynchronous training the trainer counts mini-batches, and the rollout
    counts prompts."""
    prompts = conv.get("data.train_batch_size")
    if prompts:
        return prompts
    mini, batches = f"{ACTOR}.ppo_mini_batch_size", "async_training.require_batches"
    prompts = conv.get(mini) * (conv.get(batches) or 1)
    conv.put("prompts_per_step", prompts, mini, batches, note="data.train_batch_size is 0")
    total, stale = "rollout.total_rollout_steps", "async_training.staleness_threshold"
    if conv.is_set(total):
        conv.put("steps", -(-conv.get(total) // prompts), total, note=f"/ {prompts} prompts", stated=True)
        conv.results.pop("epochs", None)
    if conv.get(stale):
        conv.lose(stale, "the rollout is at most --rollout.max_staleness steps behind: docs/asynchronous.md")
    return prompts


def _mesh(conv: Conversion, group: str) -> None:
    """Set the mesh's axes from the sizes of whichever backend the file sets."""
    backends = (
        "",
        "megatron.",
        "fsdp_config.",
        "fsdp_config.turbo_config.distributed.",
        "veomni.",
        "torchtitan.",
        "engine.",
    )
    sizes = lambda *names: [
        (key, conv.get(key))
        for backend in backends
        for name in names
        if conv.is_set(key := f"{group}.{backend}{name}" if group else name) and conv.get(key) > 1
    ]
    # The first size above 1 of each kind.
    tensor = sizes("tensor_model_parallel_size", "tensor_parallel_size", "tp_size", "tp")
    ulysses = sizes("ulysses_sequence_parallel_size", "ulysses_parallel_size")
    context = sizes("context_parallel_size", "cp_size", "cp")
    nothing = [("", 1)]
    stages = sizes("pipeline_model_parallel_size", "pipeline_parallel_size", "pp_size", "pp")
    uneven = next((key for key in conv.settings if UNEVEN.search(key) and conv.get(key)), "")
    if uneven and stages:
        conv.lose(stages[0][0], f"stages are equal here, and there {uneven} divides layers: set --mesh.stage")
        stages = []
    conv.put_mesh(
        (tensor or nothing)[0],
        (context or ulysses or nothing)[0],
        ulysses=not context,
        stage=(stages or nothing)[0],
    )
    names = ("expert_model_parallel_size", "expert_parallel_size", "ep_size", "ep")
    for key, size in sizes(*names)[:1]:
        conv.put("mesh.expert", size, key)
    for key, size in sizes("fsdp_size", "data_parallel_shard_size")[:1]:
        conv.put("mesh.fsdp", size, key)
        conv.put("mesh.data", -1, key, note="replicas on the other devices")


def _other_meshes(conv: Conversion) -> None:
    """State sizes of the reference's and the critic's parallelism that are not the policy's."""
    roles = {"reference": REF} | ({"critic": "critic"} if conv.algo in ("ppo", "pf_ppo") else {})
    for ours, group in roles.items():
        for key in conv.settings:
            size = key.removeprefix(f"{group}.")
            if size == key or not PARALLEL.search(key) or not conv.is_set(key):
                continue
            policy = conv.settings.get(f"{ACTOR}.{size}")
            if str(conv.settings[key].value) != str(policy.value if policy else 1):
                conv.lose(key, f"the {ours} is on the policy's mesh: --{ours}.mesh sets another")


def _minibatches(conv: Conversion, prompts: int) -> int:
    key, n = f"{ACTOR}.ppo_mini_batch_size", conv.get(f"{ROLLOUT}.n")
    mini = min(conv.get(key), prompts)
    updates = conv.put_minibatches(prompts * n, mini * n, "data.train_batch_size", key, f"{ROLLOUT}.n")
    return updates * conv.get(f"{ACTOR}.ppo_epochs")


def _micro_batches(conv: Conversion) -> None:
    dynamic, limit = f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu"
    micro = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    if conv.get(dynamic):
        conv.put_tokens_per_device(conv.get(limit), limit)
        log_probs = f"{ROLLOUT}.log_prob_max_token_len_per_gpu"
        if conv.is_set(log_probs):
            shards = max(conv.value_of("mesh.sequence", 1), 1)
            conv.put(
                "score.tokens_per_device",
                max(conv.get(log_probs), -(-conv.row_tokens() // shards)),
                log_probs,
            )
    else:
        size = (
            conv.get(micro) or (conv.get(f"{ACTOR}.ppo_micro_batch_size") or 8) // max(conv.devices, 1) or 1
        )
        conv.put_rows_per_device(size, micro)


def _optimizer_rules(conv: Conversion, group: str, ours: str, updates: int) -> None:
    """Set schedule, warm-up and moments. veRL counts both in steps; here they are in updates."""
    scheduler = conv.first(
        f"{group}.warmup_style",
        f"{group}.lr_decay_style",
        f"{group}.decay_type",
        f"{group}.lr_scheduler",
        f"{group}.lr_scheduler_type",
    )[0]
    conv.put_schedule(scheduler, ours, without="cosine_with_min_lr")
    if conv.value_of(f"{ours}.schedule", "constant") != "constant":
        key, fraction = conv.first(f"{group}.min_lr_factor", f"{group}.min_lr_ratio")
        if conv.is_set(f"{group}.min_lr"):
            key, fraction = f"{group}.min_lr", conv.fraction(f"{group}.min_lr", f"{group}.lr")
        conv.put(f"{ours}.final_fraction", fraction or 0.0, key)
    _warmup(conv, group, ours, updates=updates)
    for name, beta in zip(("b1", "b2"), conv.get(f"{group}.betas") or (), strict=False):
        conv.put(f"{ours}.{name}", float(beta), f"{group}.betas")
    _optimizer_name(conv, group, ours)
    if conv.get(f"{group}.clip_grad") is not None:
        conv.copy(f"{ours}.max_grad_norm", f"{group}.clip_grad")


def _warmup(conv: Conversion, group: str, ours: str, *, updates: int) -> None:
    """Set the warm-up, in steps or as a ratio of them, which veRL rounds down; `updates` a step."""
    key, ratio = f"{group}.lr_warmup_steps", f"{group}.lr_warmup_steps_ratio"
    steps, total = conv.get(key) or -1, conv.value_of("steps", 0)
    share, decay = conv.get(ratio), f"{group}.lr_decay_steps"
    if conv.get(decay):
        conv.lose(decay, "the learning rate falls over the whole run")
    if steps <= 0 and share and not total:
        conv.put(f"{ours}.warmup_steps", share, ratio)
        return
    if steps <= 0 and share:
        key, steps = ratio, int(total * share)
    if steps > 0:
        conv.put(f"{ours}.warmup_steps", steps * updates, key, note=f"x {updates} updates a step")


def _optimizer_name(conv: Conversion, group: str, ours: str) -> None:
    key, _ = conv.first(f"{group}.name", f"{group}.optimizer")
    if not conv.is_set(key):
        return
    name = str(conv.get(key)).lower().lstrip("_")
    eight = name.removesuffix("8bit") != name
    kind = OPTIMIZERS.get(name.removesuffix("8bit").removesuffix("fp8"))
    if kind is None:
        conv.refuse(key, "there is no such optimizer", instead="AdamW")
        return
    conv.put(f"{ours}.name", kind, key)
    if eight:
        conv.put(f"{ours}.moments", "int8", key)
    if kind == "sgd":
        conv.put(f"{ours}.b1", 0.0, key, note="torch's SGD without momentum")
    if kind == "muon":
        conv.copy(f"{ours}.b1", f"{group}.muon_momentum", note="Muon's; also of its AdamW here")
        if not conv.get(f"{group}.muon_match_adamw_update_rms"):
            conv.lose(key, OTHER_MUON)


def _critic(conv: Conversion, updates: int) -> None:
    conv.defaults = {**conv.defaults, **CRITIC_DEFAULTS}
    for name in ("ppo_epochs", "ppo_mini_batch_size"):
        key = f"critic.{name}"
        if conv.is_set(key) and int(conv.get(key)) != conv.get(f"{ACTOR}.{name}"):
            conv.lose(key, "the critic's updates are the policy's")
    conv.copy("critic.optim.learning_rate", "critic.optim.lr")
    conv.copy("critic.optim.weight_decay", "critic.optim.weight_decay")
    conv.copy("critic.loss.value_clip", "critic.cliprange_value")
    aggregation = "critic.loss_agg_mode"
    if conv.get(aggregation) == "constant":  # of the value loss the padded length, whatever the actor's is
        longest = float(conv.value_of("max_response_tokens", 512))
        conv.put("critic.loss.aggregation", "sequence_sum", aggregation)
        conv.put("critic.loss.factor", 0.5 / longest, aggregation)
        conv.notes.append(sum_note(conv, aggregation, "critic.optim"))
    _optimizer_rules(conv, "critic.optim", "critic.optim", updates)
    if conv.get("critic.model.lora_rank") != conv.value_of("lora.rank", 0):
        conv.lose("critic.model.lora_rank", "the critic has adapters of --lora.rank, as the policy")
    path = conv.get("critic.model.path")
    if path and path != conv.get(f"{MODEL}.path"):
        conv.put("critic.path", path, "critic.model.path")


def _rewards(conv: Conversion) -> None:
    group, model = "reward.custom_reward_function", "reward.reward_model.model_path"
    own = conv.is_set(f"{group}.path")
    if own:
        function = f"{conv.get(f'{group}.path')}:{conv.get(f'{group}.name')}"
        conv.put("reward.name", function, f"{group}.path", f"{group}.name")
    if conv.get("reward.reward_model.enable") and conv.is_set(model):
        if own:
            conv.lose(model, "the function alone rewards; there it asks the model's server itself")
        else:
            conv.copy("reward.models.0.path", model)
            conv.put("reward.name", "none", "reward.reward_model.enable", note="the model alone rewards")
    manager = "reward.reward_manager.name"
    if conv.get(manager) not in ("naive", "dapo", "batch", "prime", "gdpo", "limited", "rate_limited"):
        conv.lose(manager, "--reward.name FILE.py:FUNCTION")
    if conv.get(f"{MANAGER}.enable") and conv.get(f"{MANAGER}.len"):
        _overlong(conv)


def _overlong(conv: Conversion) -> None:
    """Set the penalty of long responses, which veRL's reward manager dapo alone reads."""
    manager, given = "reward.reward_manager.name", "reward.reward_kwargs.max_resp_len"
    if conv.get(manager) != "dapo":
        conv.drop(f"{MANAGER}.enable", f"reward manager {conv.get(manager)} does not read it, dapo does")
        return
    longest = conv.get(given) or conv.value_of("max_response_tokens", 512)
    conv.put(
        "reward.shaping", (("overlong", conv.get(f"{MANAGER}.penalty_factor")),), f"{MANAGER}.penalty_factor"
    )
    conv.put("reward.overlong_to", longest, given, f"{MANAGER}.len")
    conv.put("reward.overlong_from", longest - conv.get(f"{MANAGER}.len"), f"{MANAGER}.len")


def _evaluation(conv: Conversion) -> None:
    group = f"{ROLLOUT}.val_kwargs"
    conv.copy("eval.every", "trainer.test_freq")
    temperature = conv.get(f"{group}.temperature") if conv.get(f"{group}.do_sample") else 0.0
    conv.put("eval.sampling.temperature", temperature, f"{group}.do_sample", f"{group}.temperature")
    if temperature:
        conv.copy("eval.samples", f"{group}.n")
    for name in ("top_p", "top_k"):
        conv.copy_set(f"eval.sampling.{name}", f"{group}.{name}")
    if conv.value_of("eval.every", 0):
        conv.notes.append("veRL evaluates on all rows of data.val_files; here on eval.prompts of them (64)")


def _lora(conv: Conversion, model: str) -> None:
    if conv.value_of("lora.rank", 0) and conv.is_set(f"{model}.lora_rank"):
        conv.copy("lora.alpha", f"{model}.lora_alpha")
        conv.copy("lora.targets", f"{model}.target_modules")


def _rope(conv: Conversion) -> None:
    """Set the YaRN that a file puts over the model's config.json."""
    key = f"{MODEL}.override_config.rope_scaling"
    if not conv.is_set(key):
        return
    scaling = dict(conv.get(key)) if isinstance(conv.get(key), Mapping) else {}
    kind = {scaling.pop(name, "yarn") for name in ("type", "rope_type")}
    factor, original = scaling.pop("factor", None), scaling.pop("original_max_position_embeddings", None)
    if kind != {"yarn"} or factor is None or scaling:
        conv.lose(key, "YaRN's factor and original length alone are keys: config.json has other scaling")
        return
    conv.put("model.yarn_factor", float(factor), key)
    if original is not None:
        conv.put("model.yarn_original", int(original), key)


def _data(conv: Conversion) -> None:
    for key, split in (("data.train_files", "train"), ("data.val_files", "eval")):
        if conv.is_set(key):
            conv.put_sources(map(source_path, conv.get(key)), key, split)
    truncation = str(conv.get("data.truncation"))
    if conv.get("data.filter_overlong_prompts"):
        conv.put("data.overlong", "filter", "data.filter_overlong_prompts")
    elif truncation == "error":
        conv.put("data.overlong", "fail", "data.truncation")
    else:
        conv.put("data.overlong", "cut", "data.truncation")
        conv.put("data.cut_side", "right" if truncation == "right" else "left", "data.truncation")
        if truncation == "middle":
            conv.lose("data.truncation", "prompts are cut on one side, here the left")
    key = "data.apply_chat_template_kwargs"
    if isinstance(conv.get(key), Mapping) and conv.get(key):
        conv.put("data.chat.template_options", json.dumps(conv.get(key)), key)
    draws = "algorithm.filter_groups.max_num_gen_batches"
    if conv.is_set(draws) and conv.get(draws) > 0:
        conv.copy("algo.max_draws", draws)
    elif conv.is_set(draws):
        conv.put("algo.max_draws", 10_000, draws, note="no limit there")


def _outputs(conv: Conversion) -> None:
    folder, name = "trainer.default_local_dir", "trainer.experiment_name"
    if conv.is_set(folder):
        conv.put("run_dir", conv.get(folder) or "runs/verl", folder)
    else:
        conv.put("run_dir", f"runs/{conv.get(name) or 'verl'}", name)
    loggers = conv.get("trainer.logger")
    for logger in ("wandb", "mlflow"):
        if logger in "".join(loggers):
            conv.put(
                f"log.{logger}", conv.get("trainer.project_name"), "trainer.logger", "trainer.project_name"
            )


def _rules_of_sft(conv: Conversion) -> None:
    conv.algo = "sft"
    conv.put_lengths(conv.get("data.max_length"), "data.max_length")
    _mesh(conv, "engine")
    if not conv.value_of("mesh.sequence", 0):
        _mesh(conv, "")
    # Tokens of a device.
    limit = conv.get("data.max_token_len_per_gpu")
    if conv.get("data.use_dynamic_bsz") and limit:
        conv.put_tokens_per_device(limit, "data.max_token_len_per_gpu")
    else:
        key, size = conv.first("data.micro_batch_size", "data.micro_batch_size_per_gpu")
        conv.put_rows_per_device(size, key)
    conv.put_steps("trainer.total_epochs", "trainer.total_training_steps")
    _optimizer_rules(conv, "optim", "optim", 1)
    for name in ("prompt", "response"):
        keys, inner = conv.get(f"data.{name}_key"), conv.get(f"data.{name}_dict_keys")
        if keys and inner:
            column = f"{keys}.{inner[0]}"
            conv.put(f"data.train.0.{name}_key", column, f"data.{name}_key", f"data.{name}_dict_keys")
    messages = conv.first("data.multiturn.messages_key", "data.messages_key")
    if messages[1] and not (conv.is_set("data.prompt_key") and not conv.is_set(messages[0])):
        conv.put("data.train.0.prompt_key", messages[1], messages[0])
    conv.copy("eval.every", "trainer.test_freq")
    _lora(conv, "model")
    _data(conv)
    _outputs(conv)


SYSTEM = load_system(
    "verl",
    "veRL",
    rules={"ppo": _rules_of_ppo, "sft": _rules_of_sft, "fsdp_sft": _rules_of_sft},
    readers=READERS,
)
