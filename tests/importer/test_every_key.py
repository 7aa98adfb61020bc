"""Every key that a table carries over makes a difference: nothing counts as carried over and is dropped."""

import pytest

from jaxrl_import.fields import Assumptions, Conversion
from jaxrl_import.systems import SYSTEMS
from jaxrl_import.values import Setting, SourceSettings, number_list, switch, two_numbers
from jaxrl_llm.errors import UserError

ACTOR, LOSS = "actor_rollout_ref.actor", "actor_rollout_ref.actor.policy_loss.loss_mode"
CORRECTION, OVERLONG = "algorithm.rollout_correction", "reward.reward_kwargs.overlong_buffer_cfg"
DAPO = {"reward.reward_manager.name": "dapo", f"{OVERLONG}.enable": True, f"{OVERLONG}.len": 10}
TEACHER, DISTILLED = "distillation.distillation_loss", {"distillation.enabled": True}
SFT_COLUMNS = {
    "data.prompt_key": "a",
    "data.prompt_dict_keys": ["q"],
    "data.response_key": "b",
    "data.response_dict_keys": ["q"],
}
EXAMPLES = [{}, {"optim": "muon"}, {"ds.lora.rank": 8}, {"logger.wandb.key": "x", "train.enable_ema": True}]
EXAMPLES += [{"eval.dataset": "x.json", "data.dataset": "a.json"}]
TRL = [
    {},
    {"use_peft": True, "dataset_name": "a/b", "eval_strategy": "steps"},
    {"report_to": "wandb", "model_name_or_path": "m/m", "optim": "rmsprop", "lr_scheduler_type": "cosine"},
]
PREFERENCES = [*TRL, {"loss_type": "simpo"}, {"loss_type": "alphapo"}, {"loss_type": ["sigmoid", "sft"]}]
ROLLOUTS = [*TRL, {"use_vllm": True}, {"reward_funcs": ["a", "b"]}, {"reward_weights": [1.0, 2.0]}]
ROLLOUTS += [{"beta": 0.1}, {"use_adaptive_entropy": True}]
ROLLOUTS += [{"loss_type": loss} for loss in ("cispo", "sapo", "vespo")]
EOS = {"stop_token": "eos"}
CONTEXTS = {  # settings beside which a key has an effect
    "verl ppo": [
        {},
        {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"},
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"},
        {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4},
        {f"{ACTOR}.use_dynamic_bsz": True, "trainer.test_freq": 5, "trainer.logger": "wandb"},
        {
            "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
            "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
        },
        *[{LOSS: loss} for loss in ("sapo", "clip_cov", "kl_cov", "dro", "dppo_tv")],
        {"algorithm.use_pf_ppo": True, "actor_rollout_ref.model.lora_rank": 8, "data.truncation": "left"},
        {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_rs": "token_k1"},
        {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.rollout_is": "token"},
        {"reward.custom_reward_function.path": "x.py"},
        {"reward.reward_model.enable": True},
        {"reward.reward_model.model_path": "m/r"},
        DAPO,
        *[{key: value for key, value in DAPO.items() if key != left} for left in DAPO],
        DISTILLED,
        {**DISTILLED, f"{TEACHER}.loss_mode": "forward_kl_topk"},
        {**DISTILLED, f"{TEACHER}.loss_mode": "k1", f"{TEACHER}.use_policy_gradient": True},
        {"data.train_batch_size": 0},
        {f"{ACTOR}.optim.lr_scheduler_type": "cosine", "critic.optim.lr_scheduler_type": "cosine"},
        {f"{ACTOR}.optim.optimizer": "muon", "critic.optim.optimizer": "muon"},
    ],
    "verl sft": [
        {},
        {"data.use_dynamic_bsz": False},
        {"optim.optimizer": "muon"},
        {"optim.lr_scheduler_type": "cosine", "model.lora_rank": 8, "trainer.logger": "wandb"},
        *[{key: value for key, value in SFT_COLUMNS.items() if key != left} for left in SFT_COLUMNS],
    ],
    "openrlhf ppo": [
        {},
        {"actor.optim": "muon", "critic.optim": "muon", "algo.kl.use_loss": True},
        {"algo.advantage.estimator": "group_norm", "rollout.max_new_tokens": 100},
        {"ds.lora.rank": 8, "logger.wandb.key": "x", "train.enable_ema": True},
        {"train.dynamic_batch_enable": True, "train.async_enable": True, "reward.overlong_buffer_len": 10},
        {"algo.advantage.is_correction_level": "token"},
        {"algo.advantage.is_correction_enable": True},
        {"eval.dataset": "x.json", "data.prompt_dataset": "a.json"},
    ],
    **{f"openrlhf {trainer}": EXAMPLES for trainer in ("sft", "dpo", "rm")},
    **{f"trl {trainer}": ROLLOUTS for trainer in ("grpo", "rloo", "online_dpo", "distillation")},
    **{f"trl {trainer}": PREFERENCES for trainer in ("sft", "dpo", "kto", "reward", "orpo", "cpo", "gkd")},
    "trl ppo": [*TRL, {"total_episodes": 900, "eval_strategy": "steps", "missing_eos_penalty": 1.0}, EOS],
    "trl prm": TRL,
}
WITHOUT = {  # system -> keys that have a counterpart, or a hint, and change no recipe
    "verl": "trainer.n_gpus_per_node trainer.nnodes total_training_steps micro_batch_size log_prob_micro "
    "actor.clip_ratio rollout.name val_kwargs.do_sample teacher_key distillation_loss.clip_ratio "
    "multiturn.enable data.use_dynamic_bsz",
    "openrlhf": "bf16 zero_stage tensorboard_dir actor.num_ rollout.micro_batch_size "
    "colocate_all num_engines dynamic_batch_enable max_tokens_per_gpu data.multiturn",
    "trl": "per_device_eval_batch_size log_completions vllm_mode max_staleness shuffle_dataset "
    "truncation_mode",
}
UNUSED = {  # system and trainer -> keys of a table that it shares, and does not read
    "trl distillation": "epsilon epsilon_high reward_funcs reward_model_name_or_path reward_weights use_vllm",
    "trl rloo": "use_vllm",
    "trl online_dpo": "epsilon epsilon_high use_vllm max_completion_length",
    "trl ppo": "max_grad_norm max_steps",
}
PROBES = {switch: (True, False), two_numbers: ("0.4 0.6",), number_list: ("0.4", "0.4 0.6")}
VALUES = (
    0,
    1,
    0.37,
    3,
    7,
    "m/other",
    "0.4_0.6",
    "bfloat16",
    "float32",
    "hinge",
    "k2",
    "k3",
    "dft",
    "R3",
    "SGD",
)
VALUES += (
    "seq-mean-token-mean",
    "sequence",
    "seq",
    "clip",
    "tv",
    "token_k2",
    "reinforce",
    "adagrad",
    "cosine",
)
VALUES += (
    "no",
    "epoch",
    "wandb",
    "dapo",
    "max_min",
    "x.jinja",
    "alphapo",
    "keep_end",
    "left",
    "gspo",
    {"a": 1},
)
VALUES += (
    "fixed",
    "adaptive",
    "constant",
    [{"path": "a.json"}],
    "normalize_then_sum",
    True,
    False,
    "prime",
    "sequence_clip",
)


def outcome(name, settings):
    """Results, algorithm, notes and losses of a conversion, or the message that refuses it."""
    system, trainer = name.split()
    given = {key: Setting(value, "f:1") for key, value in settings.items()}
    source = SourceSettings(system, trainer, given, 8, notes=[])
    conversion = Conversion(SYSTEMS[system], source, Assumptions(None, "sglang", {}))
    try:
        conversion.run()
    except UserError as error:
        return str(error)
    results = {key: result.value for key, result in conversion.results.items()}
    return results, conversion.algo, conversion.notes, conversion.lost


def is_silent(name, key, bases):
    """`bases`: the outcome of each context. Most keys show their effect with one of the first values."""
    convert = SYSTEMS[name.split()[0]].tables[name.split()[1]][key].convert
    probes = PROBES.get(convert, VALUES)
    for values in (probes[:2], probes[2:]):
        for context, base in zip(CONTEXTS[name], bases, strict=True):
            if key in context:
                base = outcome(name, {k: v for k, v in context.items() if k != key})
            for value in values:
                changed = outcome(name, {**context, key: value})
                if changed != base and not (isinstance(changed, str) and "it must be" in changed):
                    return False
    return True


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (len(CONTEXTS[name]) > 6)) for name in CONTEXTS],
)
def test_every_key_makes_a_difference(name):
    system, trainer = name.split()
    without = WITHOUT[system].split()
    keys = [key for key in SYSTEMS[system].tables[trainer] if not any(part in key for part in without)]
    bases = [outcome(name, context) for context in CONTEXTS[name]]
    silent = [key for key in keys if is_silent(name, key, bases)]
    assert sorted(silent) == sorted(UNUSED.get(name, "").split())
