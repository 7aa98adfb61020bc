"""Rows of samples.jsonl: prompt and response, reward, and the values that the update used for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.builders.run import Run
from jaxrl_llm.data.chat import prompt_row
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.learn.stage import Experience
from jaxrl_llm.report.log import sample_rows
from jaxrl_llm.structs import Trajectory

PER_TOKEN = "per_token"
SPLIT = "\N{REPLACEMENT CHARACTER}"  # decoded for a part of a character
MAX_PARTS = 4  # tokens of one character of UTF-8, at most


def samples_of(run: Run, step: int, experience: Experience) -> list[dict[str, Any]]:
    """Return the rows of samples.jsonl of a step, after its update: `sample_rows` with "per_token"."""
    log, stage = run.config.log, run.stage(step)
    shown = experience.trajectories[: log.samples]
    examples = [experience.prompts[t.prompt_index].example for t in shown]
    rows = sample_rows(shown, [prompt_row(example, run.config.data.chat) for example in examples])
    items = experience.items[: len(shown)] or [None] * len(shown)  # dynamic sampling may have kept none
    trainer = "old_logprobs" if stage.policy.config.old_logprobs_source == "recompute" else "logprobs"
    for row, trajectory, item in zip(rows, shown, items, strict=True):
        if log.sample_tokens:
            row[PER_TOKEN] = per_token(trajectory, item, run.tokenizer, trainer, log.sample_tokens)
    return rows


def per_token(
    trajectory: Trajectory, item: PackItem | None, tokenizer: Any, trainer: str, limit: int
) -> dict[str, Any]:
    """Return arrays over the first `limit` tokens of a response, rounded to 4 digits.

    Args:
        item: the trajectory's, after the update; None = it was not trained on.
        trainer: signal with the log-probs that the metrics mismatch/ compare with the rollout's.

    Returns: "text" (of each token; joined, the response with its special tokens), "trained" (1 = in the loss,
        0 = an observation of the environment, or a masked trajectory), "rollout_logprobs" (nats; null for
        observations) and, of what was trained on, "advantages", "logprobs" (the trainer's) and "mismatch"
        (trainer minus rollout, before rounding). An array of equal numbers is one number.
    """
    generated = trajectory.mask[:limit] > 0
    columns: dict[str, Any] = {
        "text": token_texts(tokenizer, trajectory.response_ids[:limit].tolist()),
        "rollout_logprobs": four_digits(trajectory.logprobs[:limit], generated),
    }
    trained = np.zeros_like(generated)
    if item is not None:
        response = slice(len(trajectory.prompt_ids), len(trajectory.prompt_ids) + limit)
        signals = {name: array[response] for name, array in item.signals.items()}
        trained = (item.mask[response] > 0) & (trainer in signals)
        if trained.any():
            columns["advantages"] = four_digits(signals["advantages"], trained)
            columns["logprobs"] = four_digits(signals[trainer], trained)
            columns["mismatch"] = four_digits(signals[trainer] - signals["rollout_logprobs"], trained)
    constant = {
        name: values[0] if values and values.count(values[0]) == len(values) else values
        for name, values in {"trained": trained.astype(int).tolist(), **columns}.items()
        if name != "text"
    }
    return {"text": columns["text"], **constant}


def four_digits(values: np.ndarray, present: np.ndarray) -> list[float | None]:
    """Return the numbers with 4 significant digits; null where absent, NaN or infinite."""
    present = present & np.isfinite(values)
    return [float(f"{x:.4g}") if p else None for x, p in zip(values.tolist(), present.tolist(), strict=True)]


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; joined they are the decoded ids, special tokens included.

    A character of several tokens is the text of its last one. Tokens are decoded alone where that gives the
    same, else each with those before it, back to the last complete character.
    """
    decode = lambda part: tokenizer.decode(
        part, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    texts = [decode([i]) for i in ids]
    if "".join(texts) == decode(ids):
        return texts
    texts, context, start = [], 0, 0  # ids[context:start] precede the first token without a text
    for end in range(1, len(ids) + 1):
        before, after = decode(ids[context:start]), decode(ids[context:end])
        if after.endswith(SPLIT) and end - start < MAX_PARTS and end < len(ids):
            texts.append("")
            continue
        texts.append(after[len(before) :])
        context, start = start, end
    return texts
