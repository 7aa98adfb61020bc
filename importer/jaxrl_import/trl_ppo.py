"""TRL's PPOTrainer (trl/experimental/ppo): its loss, updates, rewards and critic, as `--algo ppo` here."""

from __future__ import annotations

from jaxrl_import.fields import Conversion

BATCH, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
MINI, EPISODES, SAMPLES = "num_mini_batches", "total_episodes", "num_sample_generations"
UNREAD = ("max_steps", "max_grad_norm")
NO_CLIP = "TRL's PPO clips no gradients"


def set_ppo(conv: Conversion) -> None:
    """Set the loss: PPO's clip, the KL to the reference in the reward, GAE that is whitened over the step."""
    conv.put("algo.clip_low", conv.get("cliprange"), "cliprange")
    conv.put("algo.clip_high", conv.get("cliprange"), "cliprange")
    conv.put("algo.old", "rollout", note="TRL's PPO has the log-probs of generation")
    # TRL averages over the tokens of a micro-batch: with one response in it, over the tokens of a response.
    alone = min(conv.get(BATCH), conv.get(BATCH) * conv.get(ACCUMULATION) // conv.get(MINI)) <= 1
    aggregation = "sequence" if alone else "token"
    for ours in ("algo", "critic.loss"):
        conv.put(f"{ours}.aggregation", aggregation, BATCH, note="TRL's mean is over a micro-batch")
    if conv.get("whiten_rewards"):
        conv.lose("whiten_rewards", "rewards are not whitened; advantages are, there and here")
    if conv.devices and conv.devices > 1:
        conv.notes.append(
            "advantages are whitened over all responses of a step; TRL's over a process's responses"
        )
    _ends(conv)


def _ends(conv: Conversion) -> None:
    """Set what ends a response; without a stop token TRL generates response_length tokens."""
    key, penalty = "missing_eos_penalty", conv.get("missing_eos_penalty")
    stops = [name for name in ("stop_token", "stop_token_id") if conv.get(name)]
    if not stops:
        conv.put("rollout.sampling.ignore_eos", True, "stop_token", note="TRL's PPO without a stop token")
    for name in stops:
        conv.lose(
            name,
            "the score is the reward of the last token; TRL's of one more, whose value the critic learns",
        )
    if conv.get("stop_token_id"):
        conv.put("rollout.sampling.stop_tokens", (conv.get("stop_token_id"),), "stop_token_id")
    # A response that was not stopped has all the tokens that are allowed.
    longest = conv.get("response_length")
    if penalty and stops == ["stop_token"] and longest > 1:
        conv.put("reward.name", "overlong", key, note="-1 for a response of response_length tokens")
        conv.put("reward.weight", float(penalty), key)
        conv.put("reward.overlong_from", longest - 1, "response_length")
        conv.put("reward.overlong_to", longest, "response_length")
        conv.notes.append(
            f"{conv.origin(key)}: a response whose last allowed token is the end token has it, too"
        )
    elif penalty:
        conv.lose(key, "responses without the end token keep their score: --reward.name FILE.py:FUNCTION")


def ppo_updates(conv: Conversion) -> int:
    """Return the updates of an epoch of a step.

    TRL divides the batch into mini-batches, a mini-batch into micro-batches, and updates after each
    gradient_accumulation_steps micro-batches (accelerate's `accumulate`), whatever the mini-batches are.
    """
    micro, steps, count = conv.get(BATCH), conv.get(ACCUMULATION), conv.get(MINI)
    updates = max(count * -(-max(micro * steps // count, 1) // micro) // steps, 1)
    if updates != count:
        conv.notes.append(
            f"{conv.origin(MINI, ACCUMULATION)}: {updates} update{'s' * (updates > 1)} an epoch: TRL makes "
            f"one in {ACCUMULATION} micro-batches"
        )
    return updates


def put_models(conv: Conversion) -> None:
    """Set the reward model, and the critic, which starts from it unless the script gives another."""
    path, value = "reward_model_path", "value_model_path"
    conv.copy("reward.models.0.path", path)
    if "reward.name" not in conv.results:
        conv.put("reward.name", "none", note="the reward model alone rewards")
    key = value if conv.is_set(value) else path
    conv.copy("critic.path", key, note="" if key == value else "the scripts of TRL load the critic from it")
    conv.put("critic.loss.factor", 0.5 * conv.get("vf_coef"), "vf_coef", note="x 0.5 there")
    if conv.get("model_revision") not in (None, "main"):
        conv.lose(
            "model_revision", "it is the policy's alone; TRL's scripts load the reward model by it, too"
        )
    if conv.get("use_peft"):
        conv.lose("use_peft", "the critic has adapters, too; there all its weights are trained")


def put_ppo_schedule(conv: Conversion, updates: int, total: int | None) -> None:
    """Set what TRL counts in steps of `updates` updates, and the critic's optimizer, as the policy's."""
    if total:
        conv.put("steps", total, EPISODES, note="/ the responses of a step, rounded up", stated=True)
    warm_up = "optim.warmup_steps"
    if conv.value_of(warm_up, 0) >= 1:
        keys = ("warmup_steps", "warmup_ratio")
        conv.put(warm_up, conv.value_of(warm_up, 0) * updates, *keys, note=f"x {updates} updates a step")
    conv.put("optim.max_grad_norm", 0.0, note=NO_CLIP)
    for key, result in list(conv.results.items()):
        if key.startswith("optim."):
            conv.results[f"critic.{key}"] = result
    # Evaluation: TRL samples so many times in a run, if there are rows for it.
    unread = UNREAD
    if conv.value_of("eval.every", 0) and total:
        samples, unread = conv.get(SAMPLES), (*UNREAD, "eval_steps")
        conv.put(
            "eval.every", max(total // samples, 1) if samples > 0 else 0, SAMPLES, note=f"of {total} steps"
        )
    for key in unread:
        conv.drop(key, NO_CLIP if key == "max_grad_norm" else f"TRL's PPO reads {EPISODES} and {SAMPLES}")
