"""Input and output of reward functions. Plain Python, small to pickle."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.outcome import Outcome
from jaxrl_llm.thoughts import Parts, opens_thought, split_thought

log = logging.getLogger(__name__)
ABSTAINED = "the reward abstained (returned None)"


@dataclass(frozen=True)
class RewardSample:
    """One response to be scored."""

    response: str  # as the policy wrote it; of gpt-oss's channels the final one
    answer: Any = None  # of the row: text, a number, a list of accepted answers, or the reward's format
    prompt: str = ""  # text of the prompt
    messages: tuple[dict[str, Any], ...] = ()  # the prompt as chat messages; () = the prompt is plain text
    response_ids: tuple[int, ...] = ()  # turns that the policy has read again are left out
    source: str = ""  # name of the data source
    columns: dict[str, Any] = field(default_factory=dict)  # all columns of the row
    other: str | None = None  # for a pairwise judge: the response that `response` is compared with
    text: str = ""  # the response with all its marks: thoughts, channels, calls; "" = `response`
    opens_thought: bool | None = None  # the prompt opens the response's thought; None = unknown
    where: str = ""  # the row: "file.jsonl:12"

    @property
    def thought(self) -> str:
        """Thought of the response, or ""."""
        return self._parts.thought

    @property
    def final(self) -> str:
        """Text that follows the thought: it alone can be the answer; "" where the thought is unfinished."""
        return self._parts.answer

    @property
    def _parts(self) -> Parts:
        opened = opens_thought(self.prompt) if self.opens_thought is None else self.opens_thought
        return split_thought(self.text or self.response, opened)


@dataclass(frozen=True)
class RewardResult:
    """Score and outcome of one sample. The score is NaN if the sample must not be learned from."""

    score: float
    outcome: Outcome
    reason: str = ""  # why it failed
    seconds: float = 0.0  # inside the reward
    components: tuple[float, ...] = ()  # of each of `RewardConfig.used`, before their weights
    error: str = ""  # type of the exception that the reward raised, if it raised

    @property
    def valid(self) -> bool:
        """True if the sample has a score to learn from."""
        return not math.isnan(self.score)

    @property
    def abstained(self) -> bool:
        """True if the reward returned None on purpose."""
        return self.reason == ABSTAINED

    @property
    def failed(self) -> bool:
        """True if the reward could not score the sample."""
        return self.outcome is Outcome.FAILED and not self.abstained


class RewardLoadError(UserError):
    """The reward function cannot be found, imported or called."""


class RewardFailureError(RunError):
    """Too many samples could not be scored."""


def summarize(results: Sequence[RewardResult]) -> dict[str, float]:
    """Return the rates of the outcomes, as fractions of all samples. An abstention does not count as
    failed."""
    total = max(len(results), 1)
    counts = Counter(result.outcome for result in results)
    return {
        "reward/correct_fraction": counts[Outcome.CORRECT] / total,
        "reward/wrong_fraction": counts[Outcome.WRONG] / total,
        "reward/unparsed_fraction": counts[Outcome.UNPARSED] / total,
        "reward/failed_fraction": sum(result.failed for result in results) / total,
        "reward/abstained_fraction": sum(result.abstained for result in results) / total,
        "reward/seconds_max": max((result.seconds for result in results), default=0.0),
    }


def check_failures(results: Sequence[RewardResult], limit: float) -> None:
    """Refuse a batch of which more than the part `limit` failed.

    Raises:
        RewardFailureError: has the commonest reasons.
    """
    reasons = Counter(result.reason for result in results if result.failed)
    failed = reasons.total()
    if failed > limit * len(results):
        listed = "\n".join(f"  {count} x {reason}" for reason, count in reasons.most_common(3))
        raise RewardFailureError(
            f"{failed} of {len(results)} samples could not be scored, more than reward.max_failed_fraction "
            f"= {limit:g} allows. The commonest reasons:\n{listed}"
        )


class FailureWarning:
    """Warning of failed samples: at the first, and whenever their number has doubled.

    Otherwise a reward that raises for wrong responses would train on right responses alone, unnoticed.

    Args:
        zero: such samples score 0; otherwise they are masked.
    """

    def __init__(self, zero: bool):
        self.effect, self.failed, self.due = "score 0" if zero else "do not count", 0, 1
        self.warned_of_list = False

    def of_list(self, error: str, reason: str) -> None:
        """Warn once of a reward whose list of scores is none for the list of samples that it got."""
        if error == "InvalidScoreError" and not self.warned_of_list:
            self.warned_of_list = True
            log.warning("a list of samples is scored one by one, which hides a mistake: %s", reason)

    def __call__(self, results: Sequence[RewardResult]) -> None:
        """Count the failures of a batch, and warn if it is time."""
        reasons = Counter(result.reason for result in results if result.failed)
        self.failed += reasons.total()
        if not reasons or self.failed < self.due:
            return
        self.due = 2 * self.failed
        count, more = reasons.total(), f", {self.failed} so far" * (self.failed > reasons.total())
        log.warning(
            "the reward failed for %d of %d samples%s, which %s (a wrong response should get 0, not an "
            "error); the commonest reason: %s",
            count,
            len(results),
            more,
            self.effect,
            reasons.most_common(1)[0][0],
        )
