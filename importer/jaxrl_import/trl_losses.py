"""Losses of TRL's trainers, as algorithms here."""

from __future__ import annotations

import math

from jaxrl_import.algorithm_names import NO_ALGORITHM
from jaxrl_import.fields import NO_CLIP, Conversion

LOSSES = {  # loss_type of GRPO -> algorithm, aggregation
    "grpo": ("grpo", "sequence"),
    "bnpo": ("grpo", "token"),
    "dapo": ("grpo", "token"),
    "dr_grpo": ("grpo", "constant"),
    "cispo": ("cispo", "token"),
    "sapo": ("sapo", "sequence"),
    "vespo": ("vespo", "token"),
    "luspo": ("luspo", "sequence_sum"),
}
LOSS_FIELDS = {
    "sapo": {"sapo_temperature_pos": "algo.tau_positive", "sapo_temperature_neg": "algo.tau_negative"},
    "vespo": {
        "vespo_k_pos": "algo.k_positive",
        "vespo_lambda_pos": "algo.lambda_positive",
        "vespo_k_neg": "algo.k_negative",
        "vespo_lambda_neg": "algo.lambda_negative",
    },
}
NO_DPO_LOSSES = dict.fromkeys(("aot", "aot_unpaired", "aot_pair"), f"there is no AOT: {NO_ALGORITHM['aot']}")
"""loss_type of DPO that is not here -> why."""
DPO_LOSSES = {
    "sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo", "robust": "robust", "bco_pair": "bco",
    "nca_pair": "nca", "sppo_hard": "sppo", "exo_pair": "exo", "apo_zero": "apo_zero", "apo_down": "apo_down",
    "discopop": "discopop", "sigmoid_norm": "sigmoid",
}  # fmt: skip


LOWEST_RATIO = 1e-9  # of rollout over policy: no bound in practice
NO_LOSS = "there is no such loss"
CLIPPED = ("grpo", "gspo", "gdpo", "luspo", "rloo", "gmpo")


def set_grpo(conv: Conversion) -> None:
    """Set algorithm, aggregation, clip, KL, entropy and advantages of GRPO's loss_type."""
    loss, level = str(conv.get("loss_type")), conv.get("importance_sampling_level")
    if loss not in LOSSES:
        conv.refuse("loss_type", NO_LOSS, instead="grpo")
    conv.algo, aggregation = LOSSES.get(loss, LOSSES["grpo"])
    if conv.algo == "luspo" and level != "sequence":
        conv.lose("importance_sampling_level", "luspo's ratio here is that of the sequence, as in its paper")
    # The level of the ratio makes it GSPO.
    if level == "sequence" and conv.algo == "grpo":
        conv.algo = "gspo"
    elif level == "sequence" and conv.algo in ("cispo", "sapo"):
        conv.lose(
            "importance_sampling_level", f"{conv.algo}'s ratio here is of a token; there of the sequence"
        )
    _objectives(conv)
    conv.put("algo.aggregation", aggregation, "loss_type")
    if aggregation == "constant":
        constant = float(conv.value_of("max_response_tokens", 512))
        conv.put("algo.constant", constant, "loss_type", "max_completion_length")
    _grpo_clip(conv)
    for key, ours in LOSS_FIELDS.get(conv.algo, {}).items():
        conv.copy(ours, key)
    kl = conv.get("use_bias_correction_kl")
    if kl and conv.get("beta"):
        conv.put("algo.kl_importance", True, "use_bias_correction_kl")
        if level == "sequence":
            reason = "the KL is weighed by the ratio of its token; TRL's by that of the sequence"
            conv.lose("use_bias_correction_kl", reason)
    _entropy(conv, aggregation)
    group_scale(conv)


def _objectives(conv: Conversion) -> None:
    """Set the advantages of rewards that are normalized one by one, and then weighed."""
    key = "multi_objective_aggregation"
    if conv.get(key) != "normalize_then_sum":
        return
    if conv.algo == "grpo":
        conv.algo = "gdpo"
    else:
        conv.put("algo.advantage", "gdpo", key)
    if conv.get("reward_weights"):
        conv.notes.append(f"{conv.origin(key)}: each reward is normalized, and then weighed")


def set_async_grpo(conv: Conversion) -> None:
    """Set GRPO as TRL's asynchronous trainer has it: the rollout's log-probs are the old ones."""
    set_grpo(conv)
    conv.put("algo.old", "rollout", note="TRL's asynchronous GRPO")
    staleness = conv.get("max_staleness")
    if conv.assumed.engine == "sglang":
        conv.put("rollout.max_staleness", staleness, "max_staleness")
    elif staleness:
        conv.lose("max_staleness", "responses are of the newest weights: docs/asynchronous.md")


def _grpo_clip(conv: Conversion) -> None:
    if conv.algo == "cispo":
        high = conv.get("epsilon_high") or conv.get("epsilon")
        note = "TRL's bound of the ratio is 1 + this"
        conv.put("algo.clip_high", max(high - 1, 0.0), "epsilon_high", "epsilon", note=note)
        conv.put("algo.clip_low", 1.0, note="TRL's CISPO has no lower bound")
        return
    clip_range(conv)
    if not conv.is_set("delta") or conv.algo not in CLIPPED:
        return
    if conv.get("delta") > 1 + conv.value_of("algo.clip_high", 0.2):
        conv.copy("algo.dual_clip", "delta", note="above the clip the same bound")
    else:
        conv.refuse(
            "delta", "below 1 + epsilon_high it bounds the ratio of good responses, too; there is none"
        )


def group_scale(conv: Conversion) -> None:
    """Set the divisor of the advantages, and the tokens that keep their advantage."""
    if conv.is_set("top_entropy_quantile"):
        note = "of the tokens of a step before its first update; TRL's are those of a micro-batch"
        conv.copy("algo.top_entropy", "top_entropy_quantile", note=note)
    scale = str(conv.get("scale_rewards")).lower()
    names = {"false": "none", "none": "none", "batch": "batch_std"}
    conv.put("algo.scale", names.get(scale, "std"), "scale_rewards")


def _entropy(conv: Conversion, aggregation: str) -> None:
    """Set the adaptive entropy bonus. TRL's bonus is a mean over tokens whatever the loss is."""
    adaptive = conv.get("use_adaptive_entropy")
    if adaptive:
        for key, ours in (
            ("entropy_target", "algo.entropy_target"),
            ("entropy_coef_delta", "algo.entropy_delta"),
        ):
            conv.copy(ours, key)
        if conv.get("entropy_coef_max") != 1.0:
            conv.lose("entropy_coef_max", "the coefficient may rise to 1")
        if conv.get("entropy_coef_min"):
            conv.lose("entropy_coef_min", "the coefficient may fall to 0")
    if (adaptive or conv.get("entropy_coef")) and aggregation != "token":
        conv.lose("entropy_coef", f"the bonus is aggregated as the loss, by {aggregation}; TRL's by token")


def clip_range(conv: Conversion) -> None:
    """Set the range of the ratio."""
    if conv.algo in CLIPPED:
        conv.copy("algo.clip_low", "epsilon")
        key = conv.first("epsilon_high", "epsilon")[0]
        conv.copy("algo.clip_high", key)


def set_gmpo(conv: Conversion) -> None:
    """Set the keys of GRPO that TRL's GMPO reads. Its ratio is bounded in nats, its loss is per response."""
    conv.put("algo.aggregation", "sequence", note="TRL's GMPO")
    _objectives(conv)
    clip_range(conv)
    group_scale(conv)
    conv.results.pop("algo.entropy_coef", None)
    conv.drop("entropy_coef", "TRL's GMPO has no entropy bonus")


def set_rloo(conv: Conversion) -> None:
    """Set TRL's RLOO: the KL in the reward, sums over tokens."""
    conv.put("algo.kl_in", "reward", "beta")
    conv.put("algo.kl", "k1", note="TRL's RLOO")
    conv.put("algo.aggregation", "sequence_sum", note="TRL's RLOO")
    clip_range(conv)
    if conv.get("normalize_advantages"):
        conv.put("algo.whiten", "unbiased", "normalize_advantages")
    if conv.get("reward_clip_range"):
        conv.lose("reward_clip_range", NO_CLIP)


def set_online_dpo(conv: Conversion) -> None:
    """Set the loss of a pair: log-ratios are sums over tokens, of ipo, too."""
    betas = conv.get("beta")
    conv.put("algo.dpo.beta", betas[0], "beta")
    if len(betas) > 1:
        conv.lose("beta", f"there is one for the whole run: {betas[0]:g}, that of the first epoch")
    loss = str(conv.get("loss_type"))
    if loss not in ("sigmoid", "ipo"):
        conv.refuse("loss_type", NO_LOSS, instead="sigmoid")
    conv.put("algo.dpo.loss", loss, "loss_type")
    for key in ("judge", "missing_eos_penalty"):
        if conv.is_set(key):
            conv.lose(key, "--reward.models.0.kind generative judges; --algo.drop_truncated drops")
    prompt = max(conv.get("max_length") - conv.get("max_new_tokens"), 1)
    conv.put("max_prompt_tokens", prompt, "max_length", "max_new_tokens")


def set_distillation(conv: Conversion) -> None:
    """Set the divergence of TRL's DistillationTrainer, on one response to a prompt."""
    conv.copy("algo.temperature", "temperature", note="divides the logits there, too")
    conv.put("responses_per_prompt", 1, note="TRL's distillation")
    _teacher(conv)


def off_policy_mask(conv: Conversion) -> None:
    """Set the off-policy sequence mask of DeepSeek-V3.2.

    TRL drops a sequence of negative advantage where the mean over its tokens of rollout - policy is above the
    threshold, in nats; seq_mean_k1 is that mean, and its bounds are ratios.
    """
    key = "off_policy_mask_threshold"
    if not conv.is_set(key):
        return
    high = round(math.exp(conv.get(key)), 6)
    conv.put("algo.correction.reject", (("seq_mean_k1", LOWEST_RATIO, high),), key, note="exp(threshold)")
    conv.put("algo.correction.reject_only", "negative", key)
    if conv.value_of("algo.correction.weight", "none") == "none":
        conv.put("algo.correction.of", "policy", key)
    else:
        note = "before a step's updates, as the importance weights are; TRL masks in each update"
        conv.notes.append(f"{conv.origin(key)}: {note}")


def rollout_correction(conv: Conversion) -> None:
    """Set the correction of vLLM's log-probs, which TRL applies where vLLM generates."""
    if not conv.get("use_vllm") or not conv.get("vllm_importance_sampling_correction"):
        return
    mode = "vllm_importance_sampling_mode"
    if conv.algo == "vespo":  # TRL's W is policy / old x old / rollout, of tokens that the mode leaves
        conv.put("algo.old", "rollout", "vllm_importance_sampling_correction")
        conv.lose(mode, "VESPO's W is policy / rollout of all tokens: no ratio is bounded before")
        return
    level, _, how = str(conv.get(mode)).partition("_")
    high = conv.first("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max")
    conv.put("algo.correction.weight", level, "vllm_importance_sampling_correction", mode)
    conv.put("algo.correction.cap", high[1] if high[1] is not None else float("inf"), high[0])
    conv.put("algo.correction.outside", "zero" if how == "mask" else "clip", mode)
    low = "vllm_importance_sampling_clip_min"
    conv.copy_set("algo.correction.floor", low)


def set_dpo(conv: Conversion) -> None:
    """Set the loss of DPO, with TRL's sft beside it as the NLL term."""
    if conv.get("reference_free"):
        conv.lose("reference_free", "--algo cpo --algo.nll_coef 0 is DPO's loss without a reference")
    losses = list(conv.get("loss_type") or ("sigmoid",))
    weights = [float(weight) for weight in conv.get("loss_weights") or [1.0] * len(losses)]
    if len(weights) != len(losses):
        conv.refuse("loss_weights", f"{len(weights)} weights of {len(losses)} losses: one for each")
        return
    if "sft" in losses and len(losses) > 1:
        at = losses.index("sft")
        conv.put("algo.nll_coef", weights.pop(at) / (sum(weights) or 1.0), "loss_type", "loss_weights")
        losses.pop(at)
    if conv.get("loss_weights") and sum(weights) not in (0.0, 1.0):
        conv.lose("loss_weights", f"the whole loss is not multiplied, there by {sum(weights):g}")
    # One loss at a time, besides the NLL term.
    known = [loss for loss in losses if loss in DPO_LOSSES]
    loss = known[0] if known else "sigmoid"
    reasons = [NO_DPO_LOSSES.get(name, f"there is no {name}") for name in losses if name not in DPO_LOSSES]
    reasons += ["there is one loss at a time"] * (len(known) > 1)
    if reasons:
        conv.refuse("loss_type", "; ".join(reasons), instead=loss)
    conv.put("algo.loss", DPO_LOSSES[loss], "loss_type")
    if loss in ("ipo", "sigmoid_norm"):
        conv.put("algo.length_normalized", True, "loss_type", note=f"TRL's {loss} averages over tokens")
    if loss == "sigmoid_norm":
        conv.put("algo.label_smoothing", 0.0, "loss_type")
    divergences = {"js_divergence": "js", "alpha_divergence": "alpha"}
    if conv.is_set("f_divergence_type"):
        name = str(conv.get("f_divergence_type"))
        conv.put("algo.divergence", divergences.get(name, name), "f_divergence_type")


def set_cpo(conv: Conversion) -> None:
    """Set the loss of CPO, or SimPO."""
    loss = conv.get("loss_type")
    if loss in ("simpo", "alphapo"):
        conv.algo = "simpo"
        conv.copy("algo.gamma", "simpo_gamma")
        if loss == "alphapo":
            conv.put("algo.alpha", conv.get("alpha") or 0.0, "alpha")
    elif loss in ("sigmoid", "hinge"):
        conv.put("algo.loss", loss, "loss_type")
    else:
        conv.refuse("loss_type", f"cpo has no {loss}", instead="sigmoid")


def set_gkd(conv: Conversion) -> None:
    """Set GKD on the student's own responses, or distillation on the data's where lmbda is 0."""
    own = conv.get("lmbda")
    if own == 0:
        conv.algo = "distill"
        conv.put_lengths(conv.get("max_length") or 1024, "max_length")
    else:
        conv.copy("rollout.sampling.temperature", "temperature")
        conv.copy("max_response_tokens", "max_new_tokens")
        rest = max((conv.get("max_length") or 1024) - conv.get("max_new_tokens"), 1)
        conv.put("max_prompt_tokens", rest, "max_length", "max_new_tokens")
        conv.put("responses_per_prompt", 1, note="TRL's GKD")
        if own != 1:
            conv.lose("lmbda", "all responses are the student's own (1), or none (0: --algo distill)")
    _teacher(conv)


def _teacher(conv: Conversion) -> None:
    key = "teacher_model_name_or_path"
    if conv.is_set(key):
        conv.put("algo.teachers", (conv.get(key),), key)


def set_prm(conv: Conversion) -> None:
    """Set which tokens have the labels of steps, and what becomes of long rows and of rows without steps."""
    separator = "step_separator"
    tokens = "each step but the last has its new line, tokenized with it; there its own tokens end every step"
    conv.lose(separator, tokens if conv.get(separator) == "\n" else "steps end with a new line")
    for key, reason in (
        ("max_completion_length", "--max_prompt_tokens and --max_response_tokens limit a row together"),
        ("train_on_last_step_only", "all steps are learned"),
    ):
        if conv.get(key):
            conv.lose(key, reason)
    conv.put("data.overlong", "cut", "max_length")
    conv.put("data.cut_side", "right", note="TRL keeps the start of a row")
    conv.put("data.bad_rows", "skip", note="TRL learns nothing from a row without steps")
    conv.notes.append("TRL's head has two labels, wrong and right; here it has one value, their difference")


def set_sft(conv: Conversion) -> None:
    """Set the loss of a token, and which tokens are learned: TRL's default is all of a chat."""
    loss = str(conv.get("loss_type"))
    if loss not in ("nll", "chunked_nll", "dft"):
        conv.refuse("loss_type", NO_LOSS, instead="nll")
    conv.put("algo.loss", "dft" if loss == "dft" else "nll", "loss_type")
    only = conv.get("completion_only_loss")
    if conv.get("assistant_only_loss") or only:
        conv.put("data.chat.loss", "all", "assistant_only_loss", "completion_only_loss")
    else:
        note = "TRL learns the users' text, too, of rows that are a chat alone"
        conv.put("data.chat.loss", "chat", "assistant_only_loss", note=note)
    if only is False:
        conv.lose("completion_only_loss", "of a row with a completion the prompt is not learned")
    if conv.get("dataset_text_field") not in (None, "text"):
        conv.lose("dataset_text_field", "text that is learned whole is in a column `text`: rename it")
