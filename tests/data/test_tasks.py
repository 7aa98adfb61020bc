"""Generated tasks: right answers, systematic mistakes, a held-out part that training never sees."""

import json

import numpy as np
import pytest

from jaxrl_llm.data import tasks
from jaxrl_llm.data.config import SourceConfig
from jaxrl_llm.data.sources import open_source
from jaxrl_llm.envs import calls
from jaxrl_llm.envs.calls import ToolCall
from jaxrl_llm.errors import UserError
from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.builtin import countdown_reward, exact_reward, number_reward
from jaxrl_llm.rewards.sample import RewardSample

VERIFIERS = {
    "arithmetic": number_reward,
    "countdown": countdown_reward,
    "maximum": exact_reward,
    "reverse": exact_reward,
    "preference": number_reward,
    "steps": number_reward,
    "calculate": exact_reward,
}


def opened(name, seed=0, split="train", **options):
    return open_source(SourceConfig(path=f"task:{name}", split=split, options=json.dumps(options)), seed)


def verdict(example):
    response = example.turns[-1]["content"] if example.turns else example.response
    sample = RewardSample(response, example.answer, columns=example.columns, source=example.source)
    return VERIFIERS[example.source.removeprefix("task:")](sample)[1]


@pytest.mark.parametrize("name", VERIFIERS)
def test_demonstrations_are_right_and_mistakes_wrong(name):
    right, wrong = opened(name), opened(name, noise=1.0)
    for i in range(200):
        assert right[i].messages == wrong[i].messages and right[i].answer == wrong[i].answer
        assert verdict(right[i]) is Outcome.CORRECT, right[i]
        assert verdict(wrong[i]) is not Outcome.CORRECT, wrong[i]


@pytest.mark.parametrize("name", VERIFIERS)
def test_noise_is_the_share_of_wrong_demonstrations(name):
    source = opened(name, noise=0.3)
    wrong = sum(verdict(source[i]) is not Outcome.CORRECT for i in range(1000))
    assert 255 <= wrong <= 345  # 300 +- 3 standard deviations


@pytest.mark.parametrize("name", tasks.TASKS)
def test_an_index_is_one_problem_of_a_seed(name):
    source = opened(name)
    later, first = source[900], source[3]
    assert opened(name)[3] == first and opened(name)[900] == later
    assert [opened(name, seed=1)[i] for i in range(5)] != [source[i] for i in range(5)]
    with pytest.raises(IndexError):
        opened(name, size=10)[10]


def arithmetic_key(prompt):
    return tuple(sorted(prompt.rstrip("=").split("+")))


def test_held_out_sums_are_never_trained_on_in_any_order():
    train, test = opened("arithmetic", digits=1), opened("arithmetic", digits=1, split="test", seed=5)
    keys = lambda source: {arithmetic_key(source[i].messages[0]["content"]) for i in range(1000)}
    assert not keys(train) & keys(test)
    assert len(keys(train) | keys(test)) == 55  # all unordered pairs of 10 digits
    assert 3 <= len(keys(test)) <= 10  # about a tenth, and not the rest


@pytest.mark.parametrize("name", VERIFIERS)
def test_held_out_prompts_are_never_trained_on(name):
    sources = {split: opened(name, split=split) for split in ("train", "test")}
    prompts = lambda split: {sources[split][i].messages[0]["content"] for i in range(500)}
    assert not prompts("train") & prompts("test")


def test_a_tenth_is_held_out():
    assert 900 <= sum(tasks.is_held_out(f"{i}+{i}") for i in range(10_000)) <= 1100


def test_prompts_and_answers_are_short():
    lengths = {
        name: max(len(opened(name)[i].messages[0]["content"]) for i in range(200)) for name in tasks.TASKS
    }
    assert lengths == {
        "arithmetic": 6, "countdown": 10, "maximum": 9, "reverse": 5, "preference": 6, "steps": 8,
        "calculate": 8, "guess": 4,
    }  # fmt: skip


def test_settings_shape_the_problems():
    source = opened("arithmetic", digits=3, operators="-", terms=3)
    for i in range(50):
        a, b, c = map(int, source[i].messages[0]["content"].rstrip("=").split("-"))
        assert source[i].answer == str(a - b - c) and max(a, b, c) < 1000
    numbers = opened("maximum", count=2, digits=1)[0].messages[0]["content"].rstrip(">").split(",")
    assert len(numbers) == 2
    assert set(opened("reverse", letters="xy", length=3)[0].answer) == {"x", "y"}


@pytest.mark.parametrize(
    "operands, signs, value",
    [([3, 5, 2], "*-", 13), ([2, 3, 4], "+*", 14), ([2, 3, 4, 5], "-*+", -5), ([7], "", 7)],
)
def test_compute_keeps_the_usual_precedence(operands, signs, value):
    assert tasks.evaluate_expression(operands, list(signs)) == value
    assert eval(tasks.format_expression(operands, list(signs))) == value


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("countdown", {"operators": "+"}, "operators is '+': it must be 2 or more of"),
        ("countdown", {"numbers": 1}, "numbers is 1: it must be at least 2 and at most 100"),
        ("maximum", {"count": 11, "digits": 1}, "count is 11: it must be at most 10"),
        ("reverse", {"letters": "aa"}, "letters is 'aa': it must be two or more different letters"),
        ("arithmetic", {"terms": 1}, "terms is 1: it must be at least 2"),
        ("arithmetic", {"digits": 10**9}, "digits is 1000000000: it must be at least 1 and at most 18"),
        ("arithmetic", {"noise": float("nan")}, "noise is nan: it must be at least 0 and at most 1"),
        ("guess", {"largest": 10**9}, "largest is 1000000000: it must be at least 2 and at most 1000"),
        ("steps", {"size": 0}, "size is 0: it must be at least 1"),
    ],
)
def test_impossible_options_are_refused(name, options, message):
    with pytest.raises(UserError) as error:
        opened(name, **options)
    assert str(error.value).startswith(f"task:{name}: option {message}")


def test_every_problem_is_a_pair_and_noise_turns_it_round():
    right, wrong = opened("arithmetic")[5], opened("arithmetic", noise=1.0)[5]
    assert (right.response, right.rejected.response) == (wrong.rejected.response, wrong.response)
    assert int(right.rejected.response) == int(right.response) + 1
    assert right.messages == right.rejected.messages and right.margin == 0


def test_wrong_answers_of_the_preference_task_are_of_many_kinds():
    source = opened("preference")
    off = [int(source[i].rejected.response) - int(source[i].response) for i in range(300)]
    assert 0 not in off and len(set(off)) > 60
    assert sum(abs(x) <= 3 for x in off) > 90 and sum(abs(x) > 10 for x in off) > 60


def test_steps_are_right_up_to_the_slip():
    source = opened("steps")
    whole = 0
    for i in range(200):
        example = source[i]
        terms = [int(x) for x in example.messages[0]["content"].rstrip("=").split("+")]
        sums = [sum(terms[: n + 2]) for n in range(3)]
        assert example.response == "\n".join(map(str, sums)) and example.answer == str(sums[-1])
        labels = [label for _, label in example.steps]
        assert labels == [
            float(int(text) == value) for (text, _), value in zip(example.steps, sums, strict=True)
        ]
        assert [text.endswith("\n") for text, _ in example.steps] == [True, True, False]
        assert labels == sorted(labels, reverse=True)  # once wrong, wrong to the end
        whole += all(labels)
    assert 75 <= whole <= 125


def test_the_held_out_tenth_is_the_same_in_every_version():
    """64 bits of BLAKE2b, big-endian, that 10 divides."""
    assert [n for n in range(60) if tasks.is_held_out(str(n))] == [1, 2, 7, 30, 48, 52]


def test_the_calculator_is_called_as_the_format_wants_and_its_result_copied():
    for i in range(20):
        example = opened("calculate")[i]
        expression = example.messages[0]["content"].rstrip("=")
        call, result, answer = example.turns
        assert calls.parse_calls(call["content"], "hermes") == [
            ToolCall("calculator", {"expression": expression})
        ]
        assert result["role"] == "tool" and int(result["content"]) == eval(expression)
        assert answer["content"] == result["content"] == example.answer


def test_games_end_with_the_number_and_those_that_listen_are_short():
    def guesses(noise):
        for i in range(100):
            example = opened("guess", noise=noise)[i]
            mine = [int(turn["content"]) for turn in example.turns if turn["role"] == "assistant"]
            told = [turn["content"] for turn in example.turns if turn["role"] == "user"]
            number = int(example.answer)
            assert mine[-1] == number and number not in mine[:-1]
            assert told == ["higher" if guess < number else "lower" for guess in mine[:-1]]
            yield mine

    listens, does_not = list(guesses(0.0)), list(guesses(1.0))
    assert all(len(set(mine)) == len(mine) for mine in listens)
    assert np.mean(list(map(len, listens))) < 5 < 10 < np.mean(list(map(len, does_not)))
