"""Win rate: responses to held-out prompts against responses of the start, by score or by a pairwise judge.

The responses of the start stay in RUN/eval/start.jsonl. They are compared prompt by prompt with responses of
the same random keys; the interval is Wilson's (1927) over prompts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data.chat import prompt_row, question_text
from jaxrl_llm.data.config import ChatConfig
from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.preference import conversation_text, pairwise_prompt
from jaxrl_llm.data.rows import Example
from jaxrl_llm.experience.reward_models import RewardModel
from jaxrl_llm.experience.rewards import reward_sample
from jaxrl_llm.host.files import replace_lines
from jaxrl_llm.host.processes import on_first
from jaxrl_llm.report.samples import sample_rows
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.sample import RewardSample
from jaxrl_llm.structs import Metrics, Trajectory
from jaxrl_llm.thoughts import as_message

Z = 1.959964  # of a 95% interval
SAME = 1e-6  # preferences closer to 0.5 are ties
log = logging.getLogger(__name__)


class Comparison(NamedTuple):
    """Two responses to a prompt, as text."""

    example: Example
    question: str
    a: str
    b: str


PairwiseJudge = Callable[[Sequence[Comparison]], Sequence[float]]
"""Returns the preference for `a`, 1 = better than `b`, 0.5 = as good, 0 = worse; NaN = no verdict."""


@dataclass
class WinRate:
    """Comparison with the responses of the start of a run."""

    path: Path
    start: int  # step at which the responses are kept
    settings: dict[str, Any]  # that responses and scores depend on: a change ends the comparison
    chat: ChatConfig
    judge: PairwiseJudge | None = None  # None = the higher score wins
    kept: dict[str, dict[str, Any]] | None = None  # key -> row of the file; None = not read yet

    def __call__(
        self,
        step: int,
        prompts: Sequence[Prompt],
        trajectories: Sequence[Trajectory],
        scores: Sequence[float],
    ) -> np.ndarray:
        """Return 1 = win, 0.5 = tie, 0 = loss, NaN = not compared for each response; all NaN at the start."""
        keys = response_keys(prompts, trajectories)
        if step == self.start:
            self._keep(keys, prompts, trajectories, scores)
        if step == self.start or not (kept := self._read()):
            return np.full(len(keys), np.nan)
        # Wins by score, or the pairs that the judge compares.
        wins, pairs = np.full(len(keys), np.nan), []
        for i, (key, trajectory, score) in enumerate(zip(keys, trajectories, scores, strict=True)):
            if (before := kept.get(key)) is None:
                continue
            if self.judge is None:
                wins[i] = compare_scores(score, before["score"])
                continue
            example = prompts[trajectory.prompt_index].example
            turns = before.get("turns") or [as_message(before["response"])]
            question = question_text(example, self.chat)
            now, start = conversation_text(trajectory.messages), conversation_text(turns)
            pairs.append((i, Comparison(example, question, now, start)))
        if pairs:
            wins[[i for i, _ in pairs]] = verdicts(self.judge, [pair for _, pair in pairs])
        return wins

    def _keep(
        self,
        keys: list[str],
        prompts: Sequence[Prompt],
        trajectories: Sequence[Trajectory],
        scores: Sequence[float],
    ) -> None:
        """Write the file, on the disk when this returns. A collective."""
        rows = eval_rows(prompts, trajectories, self.chat)
        for row, key, score in zip(rows, keys, scores, strict=True):
            row |= {"key": key, "score": float(score) if math.isfinite(score) else None}
        lines = [{"settings": self.settings}, *({"step": self.start, **row} for row in rows)]
        on_first(lambda: replace_lines(self.path, lines))
        self.kept = None

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return the rows of the start by their keys; {} with a warning if they cannot be compared."""
        if self.kept is not None:
            return self.kept
        text = on_first(lambda: self.path.read_text() if self.path.exists() else "")
        head, *rows = [json.loads(line) for line in text.splitlines()] or [{}]
        self.kept = {row["key"]: row for row in rows}
        before = head.get("settings", {})
        settings = json.loads(json.dumps(self.settings))
        if changed := [name for name, value in settings.items() if before.get(name) != value]:
            reason = f"has other {', '.join(changed)}" if text else "is missing"
            log.warning("no win rate: %s, with the responses of the start, %s", self.path, reason)
            self.kept = {}
        return self.kept


def response_keys(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[str]:
    """Return a name of each response: a hash of its prompt's tokens, and its number among its prompt's."""
    counts: dict[str, int] = defaultdict(int)
    keys = []
    for trajectory in trajectories:
        ids = np.ascontiguousarray(prompts[trajectory.prompt_index].ids, np.int32)
        name = hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()
        keys.append(f"{name}.{counts[name]}")
        counts[name] += 1
    return keys


def compare_scores(score: float, before: float | None) -> float:
    """Return 1 = the score is higher, 0.5 = equal, 0 = lower, NaN = one of them is none."""
    if before is None or not math.isfinite(score):
        return math.nan
    return (float(score > before) + float(score >= before)) / 2


def verdicts(judge: PairwiseJudge, pairs: Sequence[Comparison]) -> np.ndarray:
    """Return 1 = `a` wins, 0.5 = tie, 0 = `b` wins, NaN = no verdict, of both orders together.

    A judge that prefers a position (arXiv 2306.05685) contradicts itself, which is a tie. Equal texts are a
    tie without being judged.
    """
    results = np.full(len(pairs), 0.5)
    differing = [i for i, pair in enumerate(pairs) if pair.a != pair.b]
    if not differing:
        return results
    ordered = [pairs[i] for i in differing]
    swapped = [pair._replace(a=pair.b, b=pair.a) for pair in ordered]
    preferences = np.array(list(judge([*ordered, *swapped])), np.float64).reshape(2, -1)
    margin = (preferences[0] + 1 - preferences[1]) / 2 - 0.5
    rounded = np.where(np.abs(margin) < SAME, 0.0, margin)
    results[differing] = (np.sign(rounded) + 1) / 2
    return results


def pool_judge(pool: RewardPool) -> PairwiseJudge:
    """Return the judge that is a user's function or service in reward workers; process 0 calls it."""

    def judge(pairs: Sequence[Comparison]) -> list[float]:
        results = on_first(lambda: pool.score([judge_sample(*pair) for pair in pairs]))
        if beyond := [r.score for r in results if r.valid and not 0 <= r.score <= 1]:
            log.warning(
                "--eval.judge: %d of %d preferences are not from 0 to 1, such as %g, and do not count",
                len(beyond),
                len(results),
                beyond[0],
            )
        return [r.score if r.valid and 0 <= r.score <= 1 else math.nan for r in results]

    return judge


def model_judge(model: RewardModel) -> PairwiseJudge:
    """Return the judge that is a generative reward model: its probability of A against B."""

    def judge(pairs: Sequence[Comparison]) -> list[float]:
        prompts = [pairwise_prompt(pair.question, pair.a, pair.b) for pair in pairs]
        return model.start_replies(prompts, ("A", "B"))()

    return judge


def judge_sample(example: Example, question: str, a: str, b: str) -> RewardSample:
    """Return a comparison as a pairwise judge in a reward worker reads it."""
    sample = reward_sample(example)
    return dataclasses.replace(sample, prompt=question, response=a, other=b)


def win_rate_metrics(wins: np.ndarray) -> Metrics:
    """Return the 95% interval of the win rate, and the fraction of responses that were not compared.

    Args:
        wins: [prompts, responses], NaN for a response that was not compared.
    """
    compared = np.isfinite(wins)
    per_prompt = [row[known].mean() for row, known in zip(wins, compared, strict=True) if known.any()]
    if not per_prompt:
        return {}
    low, high = wilson_interval(float(np.mean(per_prompt)), len(per_prompt))
    missing = 1 - float(compared.mean())
    return {"eval/win_rate_low": low, "eval/win_rate_high": high, "eval/not_compared_fraction": missing}


def wilson_interval(mean: float, count: int) -> tuple[float, float]:
    """Return the 95% score interval of a proportion (Wilson 1927); conservative for means of ties."""
    center = (mean + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z / (1 + Z**2 / count) * math.sqrt(mean * (1 - mean) / count + Z**2 / (4 * count**2))
    return max(center - half, 0.0), min(center + half, 1.0)


def source_name(example: Example) -> str:
    """Return the data source of a row as a part of a metric's name; the file where the row names none."""
    name = example.source or Path(example.where.rpartition(":")[0]).stem
    return re.sub(r"[^\w./-]+", "_", name)


def eval_rows(
    prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], chat: ChatConfig
) -> list[dict[str, Any]]:
    """Return rows of samples.jsonl, with "eval" and "data_source"."""
    examples = [prompts[t.prompt_index].example for t in trajectories]
    rows = sample_rows(trajectories, [prompt_row(example, chat) for example in examples])
    extra = ({"eval": True, "data_source": source_name(example)} for example in examples)
    return [{**row, **more} for row, more in zip(rows, extra, strict=True)]
