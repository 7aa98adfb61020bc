"""veRL's distillation from teachers, as --algo gkd or as a KL to a teacher beside the task's reward."""

from __future__ import annotations

import re

from jaxrl_import.fields import Conversion
from jaxrl_import.verl_fields import ACTOR, DISTILLATION, KL

ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
TEACHER = re.compile(r"distillation\.teacher_models\.\w+\.(model_path|key)")


def distillation(conv: Conversion) -> None:
    """Set the loss against the teachers, which takes the place of the policy's without task rewards."""
    if not conv.get("distillation.enabled"):
        return
    teachers = [(key, conv.get(key)) for key in conv.settings if TEACHER.fullmatch(key)]
    paths = [(key, path) for key, path in teachers if key.endswith("model_path")]
    if len(paths) > 1:
        conv.lose("distillation.teacher_key", "each source of data names its teacher: --data.train.0.teacher")
    for name in ("loss_max_clamp", "log_prob_min_clamp"):
        if conv.is_set(f"{DISTILLATION}.{name}"):
            conv.lose(f"{DISTILLATION}.{name}", "the loss against a teacher is not clamped")
    mode, task = str(conv.get(f"{DISTILLATION}.loss_mode")), conv.get(f"{DISTILLATION}.use_task_rewards")
    gradient = conv.get(f"{DISTILLATION}.use_policy_gradient")
    if mode == "forward_kl_topk" and not gradient:
        _gkd(conv, "divergence", task=task)
        conv.put("algo.beta", 0.0, f"{DISTILLATION}.loss_mode")
        conv.put("algo.top_k", conv.get(f"{DISTILLATION}.topk"), f"{DISTILLATION}.topk")
        conv.lose(f"{DISTILLATION}.loss_mode", "the tokens beyond the top k are pooled, there left out")
    elif mode in ("k1", "kl") and gradient:
        _gkd(conv, "policy_gradient", task=task)
        if conv.get(f"{DISTILLATION}.policy_loss_mode") != "vanilla":
            conv.lose(f"{DISTILLATION}.policy_loss_mode", "the surrogate is PPO's clip")
        for side in ("low", "high"):
            key = f"{DISTILLATION}.clip_ratio_{side}"
            conv.put(f"algo.clip_{side}", conv.get(key), key)
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
    conv.put("algo.kl_coef", conv.get(coef), coef)
    conv.put("algo.kl", KL(mode), f"{DISTILLATION}.loss_mode")
    conv.put("algo.kl_in", "loss", f"{DISTILLATION}.use_task_rewards")
    for key, path in paths[:1]:
        conv.put("reference.path", str(path), key)
