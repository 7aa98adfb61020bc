"""Verdicts of a generative reward model, from its text and from its probabilities."""

import math

import pytest

from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.builtin import REWARDS
from jaxrl_llm.rewards.extract import find_verdict, verdict_probability
from jaxrl_llm.rewards.sample import RewardSample


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Yes", "Yes"),
        ("no.", "No"),
        ("No, that is a slip. On reflection: yes", "Yes"),
        ("B is worse, so [[A]]", "A"),
        ("the answer is \\boxed{B}. A was close.", "B"),
        ("Answer A skips a step that b makes", "A"),
        ("Nothing to say, nor a word", None),
        ("", None),
    ],
)
def test_verdicts(text, said):
    assert find_verdict(text) == said


def test_the_reward_is_agreement_with_the_row():
    scored = lambda response: REWARDS["verdict"](RewardSample(response, "Yes"))
    assert scored("yes") == (1.0, Outcome.CORRECT)
    assert scored("No") == (0.0, Outcome.WRONG)
    assert scored("perhaps") == (0.0, Outcome.UNPARSED)


def test_probability_of_yes_against_no():
    logs = {"Yes": math.log(0.3), "No": math.log(0.1), "Well": math.log(0.6)}
    assert verdict_probability(logs) == pytest.approx(0.75)
    assert verdict_probability({"A": -800.0, "B": -801.0}, "A", "B") == pytest.approx(1 / (1 + math.exp(-1)))
    assert verdict_probability({"No": -1.0}) == 0.0
    assert math.isnan(verdict_probability({"Well": 0.0}))
