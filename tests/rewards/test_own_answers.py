"""A built-in verifier must accept a row's own answer, or no response can be right."""

import pytest

from jaxrl_llm.rewards.config import RewardConfig
from jaxrl_llm.rewards.gold import accepted_answers, answered_by_row, gold_number, gold_text
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.sample import RewardLoadError, RewardSample


def check(name, answers, skips=False, **columns):
    rows = [
        RewardSample("", answer=answer, where=f"rows.jsonl:{i + 1}", columns=columns)
        for i, answer in enumerate(answers)
    ]
    with RewardPool(RewardConfig(name=name, workers=1)) as pool:
        pool.check(rows, skips=skips)


def test_usual_answers_are_accepted():
    check(
        "exact",
        ["Paris", 3, 0.1, ["a", "b"], '["a", "b"]', {"target": ["a"]}, b"bytes", "(B)", "the answer is"],
    )
    check("exact", ["not guilty", "in the morning", "Not enough information", "6 x 7\n#### 42", "found"])
    check("gsm8k", ["42", 42, 0.5, "1,234", "3 1/2", "6 x 7\n#### 42", r"so \boxed{42}", "42 apples", "$5"])
    check("verdict", ["Yes", "A"])


def test_usual_answers_are_accepted_as_mathematics():
    pytest.importorskip("math_verify")
    check(
        "math",
        [
            "42",
            r"\frac{1}{2}",
            "$x^2$",
            "[1, 2]",
            r"We get $x=2$. So \boxed{2}.",
            "(1,2]",
            "1e-9",
            "50%",
            0.1,
            "12(x+1)",
            "3!",
            "3 hours 20 minutes",
            "12 April 2003",
        ],
    )


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [
        (
            "gsm8k",
            {"style": "rule", "data": [1]},
            "an object of style, data: .*answer_key COLUMN.KEY",
        ),
        ("exact", {"style": "rule"}, "an object of style"),
        ("gsm8k", "He has 6 boxes.\nEach holds 7.", "it has 2 numbers, and no mark"),
        ("arithmetic", "many", "'many' is not a number"),
        ("verdict", "maybe", "scores the row's own answer 'maybe' 0, not 1"),
    ],
)
def test_a_row_whose_answer_cannot_be_earned_ends_the_command(name, answer, message):
    good = {"gsm8k": "42", "arithmetic": "42", "exact": "a", "verdict": "Yes"}[name]
    with pytest.raises(
        RewardLoadError, match=rf"(?s)^rows.jsonl:2: .*{message}.*1 of the 2 rows.*bad_rows skip"
    ):
        check(name, [good, answer])


def test_where_bad_rows_are_skipped_a_few_are_told_of(caplog):
    check("gsm8k", ["42", "many"], skips=True)
    assert "rows.jsonl:2: no response to it could earn the reward gsm8k" in caplog.text
    with pytest.raises(RewardLoadError, match="2 of the 2"):
        check("gsm8k", ["some", "many"], skips=True)


def test_rows_of_reasoning_gym():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
    check("gym", [entry["answer"]], **entry)
    check("gym", [None], **{**entry, "answer": None})  # a task with several right answers


def test_answers_as_text_and_number():
    assert accepted_answers({"target": ["a", "b"], "other": 1}) == ["a", "b"]
    assert accepted_answers({"value": "Paris", "aliases": ["City of Light"]}) == ["City of Light", "Paris"]
    assert accepted_answers("[1, 2]") == ["[1, 2]"]  # a point or an interval
    assert accepted_answers([["a"], "b"]) == ["a", "b"]
    assert (
        gold_number("6 x 7 = 42, so\n#### 42")
        == gold_number(r"6, 7: \boxed{42}")
        == gold_number("42 km")
        == 42
    )
    assert gold_text(r"so \boxed{\frac{1}{2}} it is") == r"\frac{1}{2}"
    assert answered_by_row(RewardSample("x", answer="7"), "exact").response == "x"
    assert answered_by_row(RewardSample("", answer="7"), "mine.py:f").response == "7"
