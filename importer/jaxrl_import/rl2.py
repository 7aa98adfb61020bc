"""RL2: `torchrun -m RL2.trainer.ppo a.b=c` and its SFT, reward-model and DPO trainers, as keys here."""

from __future__ import annotations

from typing import Any

from jaxrl_import.fields import RUN_NAME, Conversion, Field, System
from jaxrl_import.values import (
    count,
    count_or_never,
    dtype,
    items,
    name_text,
    number,
    remat,
    source_path,
    switch,
    text,
    whole_number,
)

SAMPLING = "sampling_params"
LEVELS = {"token": "token", "sequence": "sequence"}


def _model_fields(model: str, ours: str) -> dict[str, Field]:
    prefix = "critic.optim" if ours == "critic" else "optim"
    fields = {
        f"{model}.model_name": Field("critic.path" if ours == "critic" else "model.path", text),
        f"{model}.optimizer.lr": Field(f"{prefix}.learning_rate", number),
        f"{model}.optimizer.weight_decay": Field(f"{prefix}.weight_decay", number),
        f"{model}.max_grad_norm": Field(f"{prefix}.max_grad_norm", number),
        f"{model}.optimizer.clip_grad": Field(f"{prefix}.max_grad_norm", number),
        f"{model}.optimizer.min_lr": Field("", number, f"--{prefix}.final_fraction"),
        f"{model}.scheduler.name": Field("", text, f"--{prefix}.schedule"),
        f"{model}.scheduler.min_lr": Field("", number, f"--{prefix}.final_fraction"),
        f"{model}.scheduler.warmup_ratio": Field(f"{prefix}.warmup_ratio", number),
        f"{model}.avg_level": Field("", text, "--algo.aggregation"),
    }
    if ours == "critic":
        return fields
    return {
        **fields,
        f"{model}.dtype": Field("model.dtype", dtype),
        f"{model}.enable_gradient_checkpointing": Field("model.remat", remat),
        f"{model}.offload_optimizer": Field("optim.offload", switch),
        f"{model}.max_length_per_device": Field("", count, "--tokens_per_device"),
        f"{model}.max_inference_length_per_device": Field("", whole_number, "--score.tokens_per_device"),
        f"{model}.tp_size": Field("", whole_number, "--mesh.tensor"),
        f"{model}.cp_size": Field("", whole_number, "--mesh.sequence"),
        f"{model}.ddp_size": Field("mesh.data", whole_number),
        f"{model}.tf_config.tensor_model_parallel_size": Field("", whole_number, "--mesh.tensor"),
        f"{model}.tf_config.context_parallel_size": Field("", whole_number, "--mesh.sequence"),
    }


TRAINER = {
    "trainer.project": Field("", name_text, "--log.wandb PROJECT"),
    "trainer.experiment_name": Field("", name_text, RUN_NAME),
    "trainer.save_dir": Field("", name_text, "--run_dir"),
    "trainer.save_freq": Field("checkpoint.every", count_or_never),
    "trainer.use_wandb": Field("", switch, "--log.wandb PROJECT"),
}
PPO: dict[str, Field] = {
    **_model_fields("actor", "policy"),
    **_model_fields("critic", "critic"),
    **TRAINER,
    "rollout.train.path": Field("", text, "--data.path"),
    "rollout.test.path": Field("", text, "--data.eval_path"),
    "rollout.train.prompt_key": Field("data.train.0.prompt_key", text),
    "rollout.train.messages_key": Field("", text, "--data.train.0.prompt_key"),
    "rollout.train.apply_chat_template": Field("", switch, "--data.chat.render"),
    "rollout.train.prompts_per_rollout": Field("prompts_per_step", count),
    "rollout.train.responses_per_prompt": Field("responses_per_prompt", count),
    "rollout.train.max_turns": Field("env.max_turns", whole_number),
    "rollout.train.dynamic_filtering": Field("algo.dynamic_sampling", switch),
    f"rollout.train.{SAMPLING}.temperature": Field("rollout.sampling.temperature", number),
    f"rollout.train.{SAMPLING}.max_new_tokens": Field("max_response_tokens", count),
    f"rollout.train.{SAMPLING}.stop": Field("", items, "--rollout.sampling.stop"),
    f"rollout.train.{SAMPLING}.top_p": Field("rollout.sampling.top_p", number),
    f"rollout.test.{SAMPLING}.temperature": Field("eval.sampling.temperature", number),
    f"rollout.test.{SAMPLING}.max_new_tokens": Field("", whole_number, "--max_response_tokens"),
    f"rollout.test.{SAMPLING}.stop": Field("", items, "--eval.sampling.stop"),
    "rollout.test.prompts_per_rollout": Field("eval.prompts", whole_number),
    "rollout.test.responses_per_prompt": Field("eval.samples", whole_number),
    "rollout.env_path": Field("", text, "--env.name my_env.py, or --reward.name"),
    "rollout.server_args.model_path": Field("", text, "--model.path"),
    "rollout.server_args.tp_size": Field("", count, "--sglang.flags, of servers"),
    "rollout.server_args.mem_fraction_static": Field("", number, "--sglang.flags, of servers"),
    "rollout.server_args.dtype": Field("rollout.dtype", dtype),
    "actor.update_per_rollout": Field("minibatches_per_step", count),
    "actor.clip": Field("", number, "--algo.clip_low and --algo.clip_high"),
    "actor.tis_coef": Field("", number, "--algo.correction.weight token and --algo.correction.cap"),
    "actor.freeze_steps": Field("critic.warmup_steps", whole_number),
    "actor.kl.coef": Field("algo.kl_coef", number),
    "actor.kl.type": Field("", text, "--algo.kl_in"),
    "actor.kl.reward_estimator": Field("", text, "--algo.kl"),
    "actor.kl.loss_estimator": Field("", text, "--algo.kl"),
    "actor.entropy.coef": Field("algo.entropy_coef", number),
    "critic.clip": Field("critic.loss.value_clip", number),
    "adv.estimator": Field("", text, "--algo ppo or --algo grpo"),
    "adv.gamma": Field("algo.gamma", number),
    "adv.lamda": Field("algo.lam", number),
    "adv.global_norm": Field("", switch, "--algo.advantage reinforce"),
    "adv.norm_var": Field("", switch, "--algo.scale"),
    "trainer.total_steps": Field("", whole_number, "--steps"),
    "trainer.test_freq": Field("eval.every", count_or_never),
}
EXAMPLES: dict[str, Field] = {
    **TRAINER,
    "data.train.path": Field("", text, "--data.path"),
    "data.test.path": Field("", text, "--data.eval_path"),
    "data.train.max_length": Field("", count, "--max_prompt_tokens and --max_response_tokens"),
    "data.train.batch_size": Field("prompts_per_step", count),
    "data.train.prompt_key": Field("data.train.0.prompt_key", text),
    "data.train.apply_chat_template": Field("", switch, "--data.chat.render"),
    "trainer.n_epochs": Field("", number, "--epochs"),
}
CHOSEN = {
    "data.train.chosen_key": Field("data.train.0.response_key", text),
    "data.train.rejected_key": Field("data.train.0.rejected_key", text),
}
SFT = {
    **EXAMPLES,
    **_model_fields("actor", "policy"),
    "data.train.response_key": Field("data.train.0.response_key", text),
    "data.train.messages_key": Field("", text, "--data.train.0.prompt_key"),
}
DPO = {**EXAMPLES, **_model_fields("actor", "policy"), **CHOSEN, "actor.beta": Field("algo.beta", number)}
RM = {**EXAMPLES, **_model_fields("critic", "policy"), **CHOSEN}


def _model_defaults(model: str, rate: float) -> dict[str, Any]:
    return {
        f"{model}.optimizer.lr": rate,
        f"{model}.optimizer.weight_decay": 1e-2,
        f"{model}.max_grad_norm": 1.0,
        f"{model}.scheduler.name": "cosine_with_min_lr",
        f"{model}.scheduler.min_lr": rate / 10,
        f"{model}.scheduler.warmup_ratio": 0.03,
        f"{model}.dtype": "bfloat16",
        f"{model}.enable_gradient_checkpointing": True,
        f"{model}.avg_level": "token",
    }


TRAINER_DEFAULTS: dict[str, Any] = {"trainer.save_freq": -1, "trainer.use_wandb": True}
PPO_DEFAULTS: dict[str, Any] = {
    **_model_defaults("critic", 5e-6),
    **_model_defaults("actor", 1e-6),
    **TRAINER_DEFAULTS,
    "rollout.train.responses_per_prompt": 1,
    "rollout.train.apply_chat_template": True,
    "rollout.train.dynamic_filtering": True,
    f"rollout.train.{SAMPLING}.temperature": 1.0,
    f"rollout.test.{SAMPLING}.temperature": 0.0,
    "rollout.server_args.dtype": "bfloat16",
    "rollout.server_args.tp_size": 1,
    "rollout.server_args.mem_fraction_static": 0.6,
    "actor.update_per_rollout": 1,
    "actor.clip": 0.2,
    "actor.tis_coef": 0.0,
    "actor.kl.coef": 0.0,
    "actor.kl.reward_estimator": "k1",
    "actor.kl.loss_estimator": "k2",
    "actor.entropy.coef": 0.0,
    "critic.clip": 0.5,
    "adv.estimator": "reinforce",
    "adv.gamma": 1.0,
    "adv.lamda": 1.0,
    "adv.global_norm": False,
    "adv.norm_var": False,
    "trainer.test_freq": -1,
}
EXAMPLE_DEFAULTS: dict[str, Any] = {
    **TRAINER_DEFAULTS,
    "data.train.batch_size": 128,
    "data.train.apply_chat_template": True,
    "data.train.chosen_key": "chosen",
    "data.train.rejected_key": "rejected",
    "trainer.n_epochs": 1,
}


def _filtering(conv: Conversion, n: int) -> None:
    """Set dynamic sampling for n responses to a prompt."""
    key = "rollout.train.dynamic_filtering"
    if conv.get(key) and n == 1:
        conv.put("algo.dynamic_sampling", False, key, note="RL2 drops no groups of one response")
    elif conv.get(key):
        conv.notes.append(
            "RL2 drops groups of equal rewards; here they are dropped and replaced (dynamic_sampling)"
        )


def _rules_of_ppo(conv: Conversion) -> None:
    estimator = "adv.estimator"
    is_gae = conv.get(estimator) == "gae"
    conv.algo = "ppo" if is_gae else "grpo"
    n = conv.get("rollout.train.responses_per_prompt")
    if not is_gae:
        _reinforce(conv, n)
    level = LEVELS.get(str(conv.get("actor.avg_level")), "token")
    conv.put("algo.aggregation", level, "actor.avg_level")
    for side in ("low", "high"):
        conv.put(f"algo.clip_{side}", conv.get("actor.clip"), "actor.clip")
    _kl(conv)
    if cap := conv.get("actor.tis_coef"):
        conv.put("algo.correction.weight", "token", "actor.tis_coef")
        conv.put("algo.correction.cap", cap, "actor.tis_coef")
        conv.put("algo.correction.of", "policy", note="RL2's ratio is of the present policy")
    if not conv.is_set("actor.model_name") and conv.is_set("rollout.server_args.model_path"):
        conv.put("model.path", conv.get("rollout.server_args.model_path"), "rollout.server_args.model_path")
    if "prompts_per_step" not in conv.results:
        conv.notes.append("rollout.train.prompts_per_rollout is not set: prompts_per_step is the default, 16")
    updates = conv.get("actor.update_per_rollout")
    total = conv.value_of("prompts_per_step", 16) * n
    conv.put_minibatches(total, -(-total // updates), "actor.update_per_rollout")
    steps = conv.get("trainer.total_steps")
    if steps:
        conv.put("steps", steps, "trainer.total_steps", stated=True)
    elif conv.is_set("trainer.eval_only"):
        conv.notes.append(
            "trainer.eval_only: this run only evaluates; here --steps 1 and --eval.every 1 do, too"
        )
    _optimizer(conv, "actor", "optim")
    if is_gae:
        _optimizer(conv, "critic", "critic.optim")
    else:
        _without_critic(conv)
    _filtering(conv, n)
    if conv.is_set("rollout.env_path"):
        conv.put("env.name", conv.get("rollout.env_path"), "rollout.env_path", note="the environment rewards")
        conv.put("reward.name", "none", note="the environment rewards")
    stop = f"rollout.train.{SAMPLING}.stop"
    if conv.is_set(stop):
        for group in ("rollout", "eval"):
            conv.put(f"{group}.sampling.stop", _stop_words(conv.get(stop)), stop)
    _data(conv, "rollout")
    _common(conv, "actor")
    memory = conv.get("rollout.server_args.mem_fraction_static")
    conv.put_engine("", "SGLang (RL2)", conv.get("rollout.server_args.tp_size"), memory)


def _stop_words(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word.strip("'\"") for word in words)


def _without_critic(conv: Conversion) -> None:
    """Take out what is the critic's, which this run has none of."""
    conv.results = {key: result for key, result in conv.results.items() if not key.startswith("critic.")}
    for key in [key for key in conv.settings if key.startswith("critic.")]:
        conv.drop(key, "there is no critic with adv.estimator reinforce")


def _reinforce(conv: Conversion, n: int) -> None:
    """Set the advantages: reward - mean of the prompt's group, or of the batch."""
    scaled = conv.get("adv.norm_var")
    if n == 1 or conv.get("adv.global_norm"):
        keys = ("adv.estimator", "adv.global_norm", "rollout.train.responses_per_prompt")
        conv.put("algo.advantage", "reinforce", *keys, note="the batch's mean is the baseline")
        conv.put("algo.scale", "batch_std" if scaled else "none", "adv.norm_var")
    else:
        conv.put("algo.advantage", "grpo", "adv.estimator")
        conv.put("algo.scale", "std" if scaled else "none", "adv.norm_var")


def _kl(conv: Conversion) -> None:
    place = conv.get("actor.kl.type")
    if conv.get("actor.kl.coef"):
        conv.put("algo.kl_in", place or "loss", "actor.kl.type")
        key = "actor.kl.loss_estimator" if place == "loss" else "actor.kl.reward_estimator"
        conv.put("algo.kl", conv.get(key), key)


def _optimizer(conv: Conversion, model: str, ours: str) -> None:
    name = f"{model}.scheduler.name"
    schedules = {
        "cosine_with_min_lr": ("cosine", 0.1),
        "cosine": ("cosine", 0.0),
        "linear": ("linear", 0.0),
        "constant": ("constant", 1.0),
        "constant_with_warmup": ("constant", 1.0),
    }
    conv.put_schedule(schedules, name, ours)
    if conv.get(name) == "cosine_with_min_lr":
        key = conv.first(f"{model}.optimizer.min_lr", f"{model}.scheduler.min_lr")[0]
        rate = f"{model}.optimizer.lr"
        conv.put(f"{ours}.final_fraction", conv.fraction(key, rate), key, rate)


def _data(conv: Conversion, group: str) -> None:
    """Set the sources; RL2 writes a split as split@path."""
    for part, split in (("train", "train"), ("test", "eval")):
        key = f"{group}.{part}.path"
        if conv.is_set(key):
            name, _, path = str(conv.get(key)).rpartition("@")
            conv.put_sources([source_path(path)], key, split)
            if name and name != "train":
                conv.put(f"data.{split}.0.split", name, key)
    if not conv.get(f"{group}.train.apply_chat_template"):
        conv.put("data.chat.render", "plain", f"{group}.train.apply_chat_template")
    messages = f"{group}.train.messages_key"
    if conv.is_set(messages) and not conv.is_set(f"{group}.train.prompt_key"):
        conv.put("data.train.0.prompt_key", conv.get(messages), messages)


def _common(conv: Conversion, model: str) -> None:
    conv.put_mesh(
        conv.first(f"{model}.tf_config.tensor_model_parallel_size", f"{model}.tp_size"),
        conv.first(f"{model}.tf_config.context_parallel_size", f"{model}.cp_size"),
        ulysses=False,
    )
    length = f"{model}.max_length_per_device"
    if conv.is_set(length):
        conv.put_tokens_per_device(conv.get(length), length)
    folder, name = conv.get("trainer.save_dir"), conv.get("trainer.experiment_name")
    conv.put("run_dir", folder or f"runs/{name or 'rl2'}", "trainer.save_dir", "trainer.experiment_name")
    if conv.get("trainer.use_wandb") and conv.is_set("trainer.project"):
        conv.put("log.wandb", conv.get("trainer.project"), "trainer.project")


def _rules_of_examples(conv: Conversion) -> None:
    conv.algo = {"sft": "sft", "dpo": "dpo", "rm": "reward_model"}[conv.trainer]
    model = "critic" if conv.trainer == "rm" else "actor"
    if conv.trainer == "sft":
        level = LEVELS.get(str(conv.get("actor.avg_level")), "token")
        conv.put("algo.aggregation", level, "actor.avg_level")
    elif conv.trainer == "rm":
        conv.put("algo.margin", False, note="RL2's loss has no margin")
    length = conv.get("data.train.max_length")
    if length:
        conv.put_lengths(length, "data.train.max_length")
        conv.put("data.overlong", "cut", "data.train.max_length", note="RL2 cuts the end")
        conv.put("data.cut_side", "right", "data.train.max_length", note="RL2 cuts the end")
    conv.put_steps("trainer.n_epochs", "")
    _optimizer(conv, model, "optim")
    _data(conv, "data")
    _common(conv, model)


SYSTEM = System(
    name="rl2",
    title="RL2",
    tables={"ppo": PPO, "sft": SFT, "dpo": DPO, "rm": RM},
    defaults={
        "ppo": PPO_DEFAULTS,
        "sft": {**EXAMPLE_DEFAULTS, **_model_defaults("actor", 1e-6)},
        "dpo": {**EXAMPLE_DEFAULTS, **_model_defaults("actor", 1e-6), "actor.beta": 0.1},
        "rm": {**EXAMPLE_DEFAULTS, **_model_defaults("critic", 5e-6)},
    },
    rules={
        "ppo": _rules_of_ppo,
        "sft": _rules_of_examples,
        "dpo": _rules_of_examples,
        "rm": _rules_of_examples,
    },
    aliases={"actor.weight_decay": "actor.optimizer.weight_decay", "actor.lr": "actor.optimizer.lr"},
)
