"""What a scored batch says: rates of the outcomes, and whether too much of it failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.sample import ABSTAINED, Result, RewardFailureError


def summarize(results: Sequence[Result]) -> dict[str, float]:
    """Rates of the outcomes, as fractions of all samples. An abstention is not a failure."""
    total = max(len(results), 1)
    abstained = sum(result.abstained for result in results)
    counts = Counter(result.outcome for result in results)
    return {
        "reward/correct_fraction": counts[Outcome.CORRECT] / total,
        "reward/wrong_fraction": counts[Outcome.WRONG] / total,
        "reward/unparsed_fraction": counts[Outcome.UNPARSED] / total,
        "reward/failed_fraction": (counts[Outcome.FAILED] - abstained) / total,
        "reward/abstained_fraction": abstained / total,
        "reward/seconds_max": max((result.seconds for result in results), default=0.0),
    }


def check_failures(results: Sequence[Result], limit: float) -> None:
    """Raises RewardFailureError with the commonest reasons if more than the part `limit` failed."""
    reasons = Counter(r.reason for r in results if r.outcome is Outcome.FAILED and r.reason != ABSTAINED)
    failed = reasons.total()
    if failed > limit * len(results):
        listed = "\n".join(f"  {count} x {reason}" for reason, count in reasons.most_common(3))
        raise RewardFailureError(
            f"{failed} of {len(results)} samples could not be scored, more than reward.max_failed_fraction "
            f"= {limit:g} allows. The commonest reasons:\n{listed}"
        )
