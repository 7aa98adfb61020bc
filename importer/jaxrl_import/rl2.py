"""RL2: `torchrun -m RL2.trainer.ppo a.b=c` and its SFT, reward-model and DPO trainers, as keys here."""

from __future__ import annotations

from jaxrl_import.fields import Conversion
from jaxrl_import.tables import load_system
from jaxrl_import.values import source_path

SAMPLING = "sampling_params"


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
    _aggregation(conv)
    for side in ("low", "high"):
        conv.copy(f"algo.clip_{side}", "actor.clip")
    _kl(conv)
    if cap := conv.get("actor.tis_coef"):
        conv.put("algo.correction.weight", "token", "actor.tis_coef")
        conv.put("algo.correction.cap", cap, "actor.tis_coef")
        conv.put("algo.correction.of", "policy", note="RL2's ratio is of the present policy")
    if not conv.is_set("actor.model_name") and conv.is_set("rollout.server_args.model_path"):
        conv.copy("model.path", "rollout.server_args.model_path")
    if "prompts_per_step" not in conv.results:
        conv.notes.append("rollout.train.prompts_per_rollout is not set: prompts_per_step is the default, 16")
    # Sizes and optimizers; only GAE has a critic.
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
        conv.drop_critic("there is no critic with adv.estimator reinforce")
    # Rollout, environment and data.
    _filtering(conv, n)
    if conv.is_set("rollout.env_path"):
        conv.copy("env.name", "rollout.env_path", note="the environment rewards")
        conv.put("reward.name", "none", note="the environment rewards")
    stop = f"rollout.train.{SAMPLING}.stop"
    if conv.is_set(stop):
        words = tuple(word.strip("'\"") for word in conv.get(stop))
        for group in ("rollout", "eval"):
            conv.put(f"{group}.sampling.stop", words, stop)
    _data(conv, "rollout")
    _common(conv, "actor")
    memory = conv.get("rollout.server_args.mem_fraction_static")
    conv.put_engine("", "SGLang (RL2)", conv.get("rollout.server_args.tp_size"), memory)


def _aggregation(conv: Conversion) -> None:
    """Set the aggregation of the loss: a mean over tokens, unless the file says "sequence"."""
    level = "sequence" if conv.get("actor.avg_level") == "sequence" else "token"
    conv.put("algo.aggregation", level, "actor.avg_level")


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
        conv.copy("algo.kl", key)


def _optimizer(conv: Conversion, model: str, ours: str) -> None:
    name = f"{model}.scheduler.name"
    conv.put_schedule(name, ours)
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
        conv.copy("data.train.0.prompt_key", messages)


def _common(conv: Conversion, model: str) -> None:
    conv.put_mesh(
        conv.first(f"{model}.tf_config.tensor_model_parallel_size", f"{model}.tp_size"),
        conv.first(f"{model}.tf_config.context_parallel_size", f"{model}.cp_size"),
        ulysses=False,
        stage=conv.first(f"{model}.tf_config.pipeline_model_parallel_size"),
    )
    length = f"{model}.max_length_per_device"
    if conv.is_set(length):
        conv.put_tokens_per_device(conv.get(length), length)
    folder, name = conv.get("trainer.save_dir"), conv.get("trainer.experiment_name")
    conv.put("run_dir", folder or f"runs/{name or 'rl2'}", "trainer.save_dir", "trainer.experiment_name")
    if conv.get("trainer.use_wandb") and conv.is_set("trainer.project"):
        conv.copy("log.wandb", "trainer.project")


def _rules_of_examples(conv: Conversion) -> None:
    conv.algo = {"sft": "sft", "dpo": "dpo", "rm": "reward_model"}[conv.trainer]
    model = "critic" if conv.trainer == "rm" else "actor"
    if conv.trainer == "sft":
        _aggregation(conv)
    elif conv.trainer == "rm":
        conv.put("algo.margin", False, note="RL2's loss has no margin")
    length = conv.get("data.train.max_length")
    if length:
        conv.put_lengths(length, "data.train.max_length")
        conv.put("data.overlong", "cut", "data.train.max_length", note="RL2 cuts the end")
        conv.put("data.cut_side", "right", "data.train.max_length", note="RL2 cuts the end")
    conv.put_steps("trainer.n_epochs")
    _optimizer(conv, model, "optim")
    _data(conv, "data")
    _common(conv, model)


SYSTEM = load_system(
    "rl2", "RL2", rules={"ppo": _rules_of_ppo, **dict.fromkeys(("sft", "dpo", "rm"), _rules_of_examples)}
)
