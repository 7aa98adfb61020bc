"""Losses of veRL: estimators, policy losses, KL, the correction of the rollout's engine."""

from __future__ import annotations

import re

from jaxrl_import.fields import Conversion
from jaxrl_import.verl_names import (
    ACTOR,
    ADVANTAGES,
    ALONE,
    CLIPPED,
    CORRECTION,
    DISTILLATION,
    KL,
    LOSS_FIELDS,
    LOSSES,
    ROLLOUT,
)

NOT_NORMALIZED = "importance weights are not normalized: --algo.correction.cap bounds them"


def set_algorithm(conv: Conversion) -> None:
    """Set the algorithm and its advantages."""
    estimator, mode = "algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode"
    name, loss = str(conv.get(estimator)).lower(), str(conv.get(mode)).replace("-", "_")
    # The loss decides over the estimator.
    algo, advantage = ADVANTAGES.get(name, ("grpo", "grpo"))
    if name not in ADVANTAGES:
        conv.refuse(estimator, "there is no such estimator", instead="grpo")
    conv.algo = LOSSES.get(loss, algo)
    if loss not in LOSSES and loss != "vanilla":
        conv.refuse(mode, "there is no such loss", instead="vanilla")
    if conv.get(f"{CORRECTION}.bypass_mode"):
        _bypass(conv, algo)
    if conv.get("algorithm.use_pf_ppo"):
        conv.algo = "pf_ppo"
        conv.copy("algo.filter", "algorithm.pf_ppo.reweight_method")
        conv.copy("algo.power", "algorithm.pf_ppo.weight_pow")
    # A single response has nothing to compare with.
    responses = f"{ROLLOUT}.n"
    if conv.get(responses) == 1 and advantage in ALONE:
        note = "of one response veRL has no baseline: its advantage is the reward"
        conv.put("algo.advantage", "reward", estimator, responses, note=note)
        conv.notes.append(f"{conv.origin(responses)}: {note}")
        advantage = "reward"
    else:
        conv.put("algo.advantage", advantage, estimator)
    if advantage in ("grpo", "passk"):
        scaled = conv.get("algorithm.norm_adv_by_std_in_grpo")
        conv.put("algo.scale", "std" if scaled else "none", "algorithm.norm_adv_by_std_in_grpo")
    else:
        conv.drop("algorithm.norm_adv_by_std_in_grpo", f"{estimator} {advantage} does not read it")


def _bypass(conv: Conversion, algo: str) -> None:
    """Set veRL's bypass mode: the old log-probs are the rollout's, and policy_loss.loss_mode is not read.

    Its PPO loss has no importance weights; its REINFORCE weighs by the truncated policy / rollout.
    """
    conv.algo = algo
    conv.put("algo.old", "rollout", f"{CORRECTION}.bypass_mode")
    kind, weight, cap = (f"{CORRECTION}.{n}" for n in ("loss_type", "rollout_is", "rollout_is_threshold"))
    conv.drop(f"{ACTOR}.policy_loss.loss_mode", "veRL's bypass mode has a loss of its own")
    if conv.get(kind) != "reinforce":
        for key in (weight, cap):
            conv.drop(key, "veRL's bypass mode with ppo_clip applies no weights")
    elif conv.get(weight) in ("token", "sequence"):
        conv.algo = "reinforce"
    else:
        conv.refuse(kind, "its weights are rollout_is token or sequence", instead="ppo_clip")


def set_loss(conv: Conversion) -> None:
    """Set clip, aggregation and the settings of a loss by itself."""
    # The settings that the loss reads.
    low, high = f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"
    for name in ("tau_pos", "tau_neg"):
        conv.drop(f"{ACTOR}.policy_loss.{name}", f"veRL reads {ACTOR}.{name}")
    conv.drop(f"{ACTOR}.clip_ratio", "veRL reads clip_ratio_low and _high alone")
    if conv.algo == "dppo":
        kind = f"{ACTOR}.policy_loss.loss_mode"
        conv.put("algo.divergence_of", str(conv.get(kind)).rpartition("_")[2], kind)
        conv.copy("algo.delta_low", low)
        conv.copy("algo.delta_high", high)
        conv.put("algo.old", "policy", note="veRL's old log-probs are computed anew")
    elif conv.algo not in ("gpg", "sapo", "kl_cov", "dro", "reinforce"):
        conv.copy("algo.clip_low", low)
        conv.copy("algo.clip_high", high)
    if conv.algo in CLIPPED and conv.algo != "gspo":
        conv.copy("algo.dual_clip", f"{ACTOR}.clip_ratio_c")
    for key, ours in LOSS_FIELDS.get(conv.algo, {}).items():
        conv.copy(ours, key)
    # The aggregation, unless veRL's code forces another.
    aggregation = f"{ACTOR}.loss_agg_mode"
    if conv.get(aggregation) == "constant":
        factor = conv.get(f"{ACTOR}.loss_scale_factor")
        if factor:
            conv.put("algo.constant", factor, f"{ACTOR}.loss_scale_factor")
        else:
            conv.put("algo.constant", float(conv.value_of("max_response_tokens", 512)), aggregation)
        conv.notes.append(sum_note(conv, aggregation, "optim"))
    if conv.algo in ("sapo", "gmpo"):  # veRL's code forces the mean over sequences
        conv.put("algo.aggregation", "sequence", aggregation, note=f"{conv.algo} is a mean over sequences")


def sum_note(conv: Conversion, aggregation: str, optimizer: str) -> str:
    """Return the note on an aggregation that is a sum over sequences there."""
    return (
        f"{conv.origin(aggregation)}: veRL sums over the sequences of a micro-batch, here it is their mean: "
        f"scale {optimizer}.learning_rate if the optimizer is not Adam"
    )


def set_kl(conv: Conversion) -> None:
    """Set the KL to the reference, in the loss or in the reward."""
    in_loss, in_reward = conv.get(f"{ACTOR}.use_kl_loss"), conv.get("algorithm.use_kl_in_reward")
    if in_loss:
        conv.copy("algo.kl_coef", f"{ACTOR}.kl_loss_coef")
        conv.copy("algo.kl", f"{ACTOR}.kl_loss_type")
        conv.put("algo.kl_in", "loss", f"{ACTOR}.use_kl_loss")
        if in_reward:
            conv.lose("algorithm.use_kl_in_reward", "the KL is in the loss or in the reward; in the loss")
    elif in_reward:
        conv.copy("algo.kl_coef", "algorithm.kl_ctrl.kl_coef")
        conv.copy("algo.kl", "algorithm.kl_penalty")
        conv.put("algo.kl_in", "reward", "algorithm.use_kl_in_reward")
        if conv.get("algorithm.kl_ctrl.type") == "adaptive":
            conv.copy("algo.kl_target", "algorithm.kl_ctrl.target_kl")
            conv.copy("algo.kl_horizon", "algorithm.kl_ctrl.horizon")
    else:
        conv.put("algo.kl_coef", 0.0, f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward")


def set_correction(conv: Conversion) -> None:
    """Set importance weights and rejection for the rollout's engine."""
    weight, cap = f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_is_threshold"
    if conv.get(f"{ACTOR}.tis_imp_ratio_cap") and conv.get(f"{ACTOR}.tis_imp_ratio_cap") > 0:
        conv.put("algo.correction.weight", "token", f"{ACTOR}.tis_imp_ratio_cap")
        conv.copy("algo.correction.cap", f"{ACTOR}.tis_imp_ratio_cap")
    # Weights, then rejection.
    bypass = conv.get(f"{CORRECTION}.bypass_mode")
    if conv.get(weight) in ("token", "sequence") and (not bypass or conv.algo == "reinforce"):
        conv.copy("algo.correction.weight", weight)
        bounds = conv.get(cap)
        conv.put("algo.correction.cap", bounds[-1], cap)
        if len(bounds) == 2:
            conv.put("algo.correction.floor", bounds[0], cap)
            conv.put("algo.correction.outside", "zero", cap, note="two bounds are IcePop")
        if conv.get(f"{CORRECTION}.rollout_is_batch_normalize"):
            conv.lose(f"{CORRECTION}.rollout_is_batch_normalize", NOT_NORMALIZED)
    if rules := conv.get(f"{CORRECTION}.rollout_rs"):
        thresholds = conv.get(f"{CORRECTION}.rollout_rs_threshold") or [(2.0,)]
        pairs = [(rule, thresholds[min(i, len(thresholds) - 1)]) for i, rule in enumerate(rules)]
        conv.put(
            "algo.correction.reject",
            tuple((rule, *_bounds(rule, bound)) for rule, bound in pairs),
            f"{CORRECTION}.rollout_rs",
            f"{CORRECTION}.rollout_rs_threshold",
        )
    if bypass and {"algo.correction.reject", "algo.correction.weight"} & set(conv.results):
        note = "without old log-probs the ratio is of the present policy"
        conv.put("algo.correction.of", "policy", f"{CORRECTION}.bypass_mode", note=note)


def _bounds(rule: str, threshold: tuple[float, ...]) -> tuple[float, float]:
    """Return the bounds of a rule; for k1 a ratio, whose lower bound defaults to the inverse of the upper."""
    if len(threshold) == 2:
        return threshold[0], threshold[1]
    high = threshold[0]
    return (1 / high if high else 0.0, high) if rule.endswith("k1") else (0.0, high)


# -- distillation from teachers: as --algo gkd, or as a KL to a teacher beside the task's reward

ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
TEACHER = re.compile(r"distillation\.teacher_models\.\w+\.(model_path|key)")


def distillation(conv: Conversion) -> None:
    """Set the loss against the teachers, which takes the place of the policy's without task rewards."""
    if not conv.get("distillation.enabled"):
        return
    # One teacher, and no clamps.
    teachers = [(key, conv.get(key)) for key in conv.settings if TEACHER.fullmatch(key)]
    paths = [(key, path) for key, path in teachers if key.endswith("model_path")]
    if len(paths) > 1:
        conv.lose("distillation.teacher_key", "each source of data names its teacher: --data.train.0.teacher")
    for name in ("loss_max_clamp", "log_prob_min_clamp"):
        if conv.is_set(f"{DISTILLATION}.{name}"):
            conv.lose(f"{DISTILLATION}.{name}", "the loss against a teacher is not clamped")
    # The kinds of loss that are here.
    mode, task = str(conv.get(f"{DISTILLATION}.loss_mode")), conv.get(f"{DISTILLATION}.use_task_rewards")
    gradient = conv.get(f"{DISTILLATION}.use_policy_gradient")
    if mode == "forward_kl_topk" and not gradient:
        _gkd(conv, "divergence", task=task)
        conv.put("algo.beta", 0.0, f"{DISTILLATION}.loss_mode")
        conv.copy("algo.top_k", f"{DISTILLATION}.topk")
        conv.lose(f"{DISTILLATION}.loss_mode", "the tokens beyond the top k are pooled, there left out")
    elif mode in ("k1", "kl") and gradient:
        _gkd(conv, "policy_gradient", task=task)
        if conv.get(f"{DISTILLATION}.policy_loss_mode") != "vanilla":
            conv.lose(f"{DISTILLATION}.policy_loss_mode", "the surrogate is PPO's clip")
        for side in ("low", "high"):
            key = f"{DISTILLATION}.clip_ratio_{side}"
            conv.copy(f"algo.clip_{side}", key)
    elif mode in ESTIMATORS and task and not gradient and not conv.get(f"{ACTOR}.use_kl_loss"):
        _teacher_as_reference(conv, mode, paths)
        return
    else:
        conv.refuse(
            f"{DISTILLATION}.loss_mode",
            "of distillation without task rewards there are forward_kl_topk, and k1 with use_policy_gradient",
            instead="forward_kl_topk",
        )
    conv.put("algo.teachers", tuple(str(path) for _, path in paths), *(key for key, _ in paths))


def _gkd(conv: Conversion, form: str, *, task: bool) -> None:
    """Make the run gkd, whose settings take the place of the policy's."""
    conv.algo = "gkd"
    conv.results = {key: result for key, result in conv.results.items() if not key.startswith("algo.")}
    conv.put("algo.form", form, f"{DISTILLATION}.use_policy_gradient")
    coef = f"{DISTILLATION}.distillation_loss_coef"
    if task:
        conv.put("algo.reward_coef", 1 / (conv.get(coef) or 1.0), coef, note="of the teacher's loss it is 1")


def _teacher_as_reference(conv: Conversion, mode: str, paths: list[tuple[str, str]]) -> None:
    """Set the teacher as the reference: an estimator of the KL to it is added to the policy's loss."""
    coef = f"{DISTILLATION}.distillation_loss_coef"
    conv.copy("algo.kl_coef", coef)
    conv.put("algo.kl", KL(mode), f"{DISTILLATION}.loss_mode")
    conv.put("algo.kl_in", "loss", f"{DISTILLATION}.use_task_rewards")
    for key, path in paths[:1]:
        conv.put("reference.path", str(path), key)
