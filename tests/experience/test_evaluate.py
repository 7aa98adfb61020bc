"""Held-out evaluation: its numbers by hand, by data source, the win rate, judges, and what is printed."""

import contextlib
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl_llm.algos import dpo, sft
from jaxrl_llm.builders.evaluation import evaluation_line, make_win_rate, open_judge
from jaxrl_llm.builders.run import load_reward_models
from jaxrl_llm.config import EvalConfig, RewardConfig, RewardModelConfig, TrainConfig
from jaxrl_llm.data.config import ChatConfig, DataConfig
from jaxrl_llm.data.loader import Prompt
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.data.rows import Example
from jaxrl_llm.errors import UserError
from jaxrl_llm.experience.evaluate import HeldOutLoss, HeldOutResponses, evaluate_all, majority
from jaxrl_llm.experience.rewards import Rewarder
from jaxrl_llm.experience.win_rate import Comparison, WinRate, pool_judge, verdicts, wilson_interval
from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.load import request_body
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.sample import RewardResult, RewardSample
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.native.engine import DeferredGeneration
from jaxrl_llm.structs import Trajectory

STATE = SimpleNamespace(params={}, version=0)
CHAT = ChatConfig()


class ScriptedEngine:
    """Response g to prompt p is texts[p][g]."""

    def __init__(self, texts):
        self.texts = texts

    def publish(self, params, version):
        return {}

    def release_memory(self):
        pass

    def start(self, call):
        return DeferredGeneration(
            lambda: [
                Trajectory(
                    prompt_ids=r.prompt_ids, response_ids=np.arange(len(text) + 1), logprobs=np.zeros(1),
                    mask=np.ones(len(text) + 1), versions=np.zeros(1), prompt_index=r.prompt_index,
                    response_index=g, finish="length" if len(text) > 4 else "stop", text=text,
                )
                for r in call.requests
                for g, text in enumerate(self.texts[r.prompt_index])
            ]
        )  # fmt: skip


class AnswerPool:
    """A verifier that needs an answer, as the built-in ones do."""

    config = RewardConfig()
    metrics: dict = {}  # noqa: RUF012

    def score(self, samples):
        assert all(sample.answer is not None for sample in samples)
        right = [s.response == s.answer for s in samples]
        outcomes = [Outcome.CORRECT if r else Outcome.WRONG for r in right]
        return [
            RewardResult(float(r), o, components=(float(r),)) for r, o in zip(right, outcomes, strict=True)
        ]


class FailingPool(AnswerPool):
    """The same, but it fails on the response "?"."""

    def score(self, samples):
        failed = RewardResult(math.nan, Outcome.FAILED, "no reply")
        results = super().score(samples)
        return [failed if s.response == "?" else r for s, r in zip(samples, results, strict=True)]


class LengthModel:
    """A reward model whose score is the length of the text, at the last token."""

    def __init__(self, weight):
        self.config = RewardModelConfig(path="rm", weight=weight)

    def start(self, trajectories, examples):
        return lambda: [np.array([0.0] * len(t.text) + [len(t.text)], np.float32) for t in trajectories]


def prompt(text, source, answer=None):
    return Prompt(Example(None, text, answer=answer, source=source), np.array([ord(c) for c in text]), 0)


PROMPTS = [prompt("a", "one", "x"), prompt("b", "one", "y"), prompt("c", "two/2"), prompt("d", "two/2")]


def evaluator(texts, weights=(), pool=AnswerPool, **fields):
    rewarder = Rewarder(pool(), [*map(LengthModel, weights)])
    return HeldOutResponses(
        PROMPTS, [True, True, False, False], ScriptedEngine(texts), rewarder,
        SamplingConfig(), len(texts[0]), 8, jax.random.key(0), CHAT, **fields,
    )  # fmt: skip


TEXTS = [["x", "z"], ["y", "y"], ["ccc", "c"], ["", "ddddd"]]


def test_verified_and_scored_responses_by_data_source():
    metrics, samples = evaluator(TEXTS, (0.5,))(STATE, lambda: None, 3)
    assert metrics == {
        "eval/response_tokens/mean": (1 + 1 + 1 + 1 + 3 + 1 + 0 + 5 + 8) / 8,
        "eval/truncated_fraction": 1 / 8,
        "eval/pass@1": 3 / 4,  # of the prompts with an answer
        "eval/pass@2": 1.0,
        "eval/maj@2": 1.0,
        "eval/pass@1/one": 3 / 4,
        "eval/score": 13 / 8,
        "eval/score/one": 1.0,
        "eval/score/two/2": 9 / 4,
        "eval/reward": (3 + 0.5 * 13) / 8,  # as in training
        "eval/reward/one": (3 + 0.5 * 4) / 4,
        "eval/reward/two/2": 0.5 * 9 / 4,
    }
    assert [(s["prompt"], s["response"], s["reward"], s["outcome"], s["data_source"]) for s in samples] == [
        ("a", "x", 1.5, "correct", "one"), ("b", "y", 1.5, "correct", "one"),
        ("c", "ccc", 1.5, "failed", "two/2"), ("d", "", 0.0, "failed", "two/2"),
    ]  # fmt: skip
    assert all(sample["eval"] and "win" not in sample for sample in samples)
    few = evaluator(TEXTS, num_logged=2)(STATE, lambda: None, 3).samples
    assert [sample["prompt"] for sample in few] == ["a", "c"]


def test_responses_that_the_verifier_cannot_judge_are_not_counted_as_wrong():
    texts = [["x", "?", "z"], ["?", "?", "?"], ["c", "c", "c"], ["d", "d", "d"]]
    metrics, _ = evaluator(texts, pool=FailingPool)(STATE, lambda: None, 3)
    assert metrics["eval/not_judged_fraction"] == pytest.approx(4 / 6)
    assert metrics["eval/pass@1"] == 1 / 2  # x right, z wrong
    assert metrics["eval/pass@3"] == metrics["eval/maj@3"] == 1.0  # of the first prompt
    unjudged, _ = evaluator([["?"], ["?"], ["c"], ["d"]], pool=FailingPool)(STATE, lambda: None, 3)
    assert unjudged["eval/not_judged_fraction"] == 1 and "eval/pass@1" not in unjudged


def test_a_majority_is_of_answers_that_are_equal_not_of_their_spellings():
    responses = ["#### 1,000", r"\boxed{7}", r"so \boxed{1000}", r"\boxed{7}", "#### 1000.0"]
    outcomes = [Outcome.CORRECT, Outcome.WRONG] * 2 + [Outcome.CORRECT]
    made = zip(responses, outcomes, strict=True)
    of = lambda made: [
        SimpleNamespace(text=text, answer=None, outcome=outcome, opens_thought=False)
        for text, outcome in made
    ]
    assert majority(of(made))
    words = [("<answer>Rome</answer>", Outcome.WRONG), *2 * [("<answer>Paris</answer>", Outcome.CORRECT)]]
    words += [("<answer>rome</answer>", Outcome.WRONG), ("<answer>Rome.</answer>", Outcome.WRONG)]
    assert not majority(of(words))
    thoughts = [("<think>7</think>8", Outcome.CORRECT), ("<think>7</think>8", Outcome.CORRECT)]
    assert majority(of([*thoughts, *3 * [("<think>7", Outcome.WRONG)], ("<think>8</think>7", Outcome.WRONG)]))


def test_reward_models_without_weight_score_all_the_same():
    score = lambda weights: evaluator(TEXTS, weights)(STATE, lambda: None, 0).metrics
    assert score((0.0,))["eval/score"] == score((2.0,))["eval/score"] == 13 / 8
    assert score((0.0,))["eval/reward"] == 3 / 8
    assert score((1.0, 3.0))["eval/score"] == 13 / 8
    assert score((1.0, -1.0))["eval/score"] == 0.0


def win_rate(path, judge=None, **settings):
    return WinRate(path / "eval/start.jsonl", 2, {"seed": 0, **settings}, CHAT, judge=judge)


BEFORE = [["xx", "z"], ["y", "yy"], ["c", "c"], ["", "d"]]


def wins(path, step, texts, judge=None, **settings):
    own = win_rate(path, judge, **settings)  # a process of its own, as after a kill
    metrics, samples = evaluator(texts, (1.0,), win_rate=own)(STATE, lambda: None, step)
    shown = {name: value for name, value in metrics.items() if "win_rate" in name}
    return shown, [sample.get("win") for sample in samples]


def test_the_win_rate_compares_scores_with_those_of_the_start(tmp_path):
    """By length: x < xx, z = z, y = y, y < yy, ccc > c, c = c, "" = "", ddddd > d."""
    assert wins(tmp_path, 2, BEFORE) == ({}, [None] * 4)
    shown, firsts = wins(tmp_path, 4, TEXTS)
    assert firsts == [0.0, 0.5, 1.0, 0.5]
    low, high = wilson_interval(0.5, 4)
    assert shown == {
        "eval/win_rate": 0.5, "eval/win_rate/one": 0.25, "eval/win_rate/two/2": 0.75,
        "eval/win_rate_low": low, "eval/win_rate_high": high,
    }  # fmt: skip
    head, first, *rest = [
        json.loads(line) for line in (tmp_path / "eval/start.jsonl").read_text().splitlines()
    ]
    assert head == {"settings": {"seed": 0}} and len(rest) == 7
    assert (first["step"], first["prompt"], first["response"], first["score"]) == (2, "a", "xx", 2.0)


def test_responses_of_other_settings_are_not_compared(tmp_path, caplog):
    assert wins(tmp_path, 4, TEXTS)[0] == {}
    assert "start.jsonl, with the responses of the start, is missing" in caplog.text
    wins(tmp_path, 2, BEFORE, temperature=1.0)
    assert wins(tmp_path, 4, TEXTS, temperature=0.5)[0] == {}
    assert "with the responses of the start, has other temperature" in caplog.text
    assert wins(tmp_path, 4, TEXTS, temperature=1.0)[0]["eval/win_rate"] == 0.5


def test_a_judge_reads_both_orders_of_texts_that_differ(tmp_path):
    seen = []

    def longer_or_first(pairs):
        seen.extend((pair.question, pair.a, pair.b) for pair in pairs)
        return [float(len(p.a) > len(p.b)) if p.question != "a" else 1.0 for p in pairs]

    wins(tmp_path, 2, BEFORE, longer_or_first)
    assert not seen
    shown, firsts = wins(tmp_path, 4, TEXTS, longer_or_first)
    assert seen[:2] == [("a", "x", "xx"), ("b", "y", "yy")] and ("a", "xx", "x") in seen and len(seen) == 8
    assert firsts == [0.5, 0.5, 1.0, 0.5]  # of "a" always the first one: a tie
    assert shown["eval/win_rate"] == (0.5 + 0.5 + 0.5 + 0 + 1 + 0.5 + 0.5 + 1) / 8


@pytest.mark.parametrize(
    ("forward", "backward", "verdict"),
    [
        (1, 0, 1),
        (0, 1, 0),
        (1, 1, 0.5),
        (0, 0, 0.5),
        (0.9, 0.3, 1),
        (0.6, 0.7, 0),
        (0.5, 0.5, 0.5),
        (math.nan, 0, math.nan),
    ],
)
def test_verdicts_cancel_the_preference_for_a_position(forward, backward, verdict):
    pair = Comparison(Example(None, "q"), "q", "a", "b")
    judge = lambda pairs: [forward if p.a == "a" else backward for p in pairs]
    np.testing.assert_equal(verdicts(judge, [pair, pair._replace(b="a")]), [verdict, 0.5])


def test_the_interval_is_wilsons():
    """Newcombe (1998), table I: 81 of 263 and 0 of 20; and 10 of 20."""
    np.testing.assert_allclose(wilson_interval(81 / 263, 263), (0.2553, 0.3662), atol=5e-5)
    np.testing.assert_allclose(wilson_interval(0.0, 20), (0.0, 0.1611), atol=5e-5)
    np.testing.assert_allclose(wilson_interval(0.5, 20), (0.2993, 0.7007), atol=5e-5)


# Judges


def config_of(tmp_path, **fields):
    return TrainConfig(run_dir=str(tmp_path / "run"), reward=RewardConfig(workers=1), **fields)


def opened(tmp_path, source, name="judge"):
    (tmp_path / "my_judge.py").write_text(source)
    path = f"{tmp_path}/my_judge.py:{name}"
    config = config_of(tmp_path, eval=EvalConfig(every=1, judge=path))
    with contextlib.ExitStack() as closing:
        pool = open_judge(config, [Example(None, "1+1=", answer="2")], closing)
        pairs = [
            Comparison(Example(None, "q"), "q", a, b) for a, b in (("long", "b"), ("b", "long"), ("", "x"))
        ]
        return pool_judge(pool)(pairs)


def test_a_judge_is_a_function_of_the_user(tmp_path, caplog):
    source = (
        "def judge(prompt, a, b):\n"
        "    assert prompt in ('q', '1+1=')\n"
        "    return len(a) > len(b) if a else 1 / 0\n"
    )
    np.testing.assert_equal(opened(tmp_path, source), [1.0, 0.0, math.nan])
    assert "the reward failed for 1 of 3 samples, which do not count" in caplog.text
    beyond = "def judge(prompt, a, b):\n    return 2 if prompt == 'q' else 0.5\n"
    np.testing.assert_equal(opened(tmp_path, beyond), [math.nan] * 3)
    assert "--eval.judge: 3 of 3 preferences are not from 0 to 1, such as 2, and do not count" in caplog.text


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (
            "def judge(prompt, a, b): return 7.0",
            "judge",
            "it returned 7: it must be from 0 to 1; 1 = the first",
        ),
        ("def judge(prompt, a, b): return 1", "better", "no function or class better; it has judge."),
        ("def judge(prompt, a, b): return prmpt", "judge", "name 'prmpt' is not defined"),
    ],
)
def test_a_judge_that_cannot_judge_is_refused_before_the_run(tmp_path, source, name, message):
    with pytest.raises(UserError) as error:
        opened(tmp_path, source, name)
    assert str(error.value).startswith(f"--eval.judge {tmp_path}/my_judge.py:{name}: ") and message in str(
        error.value
    )


def test_a_service_gets_the_other_response_only_to_compare():
    (sample,) = request_body([RewardSample("a", other="b")])["samples"]
    assert (sample["response"], sample["other"]) == ("a", "b")
    assert "other" not in request_body([RewardSample("a")])["samples"][0]


def test_what_can_be_scored_without_an_answer():
    scored = lambda name, **fields: RewardPool(RewardConfig(name=name)).can_score(RewardSample("", **fields))
    assert [scored(name) for name in ("exact", "gsm8k", "none", "gym", "auto")] == [
        False,
        False,
        False,
        True,
        False,
    ]
    assert scored("exact", answer="2") and scored("auto", source="gym:x") and not scored("none", answer="2")
    function = RewardPool(RewardConfig(), function=lambda sample: 1.0)
    assert function.can_score(RewardSample("")) and not function.is_builtin
    assert RewardPool(RewardConfig(name="http://host")).can_score(RewardSample(""))


# Examples


def test_the_loss_of_examples_by_data_source():
    item = PackItem(np.arange(3), np.ones(3))
    measure = lambda state, items, reference: {"loss": np.float32(len(items)), "entropy": np.float32(1)}
    stage = lambda algo: SimpleNamespace(measure=measure, policy=SimpleNamespace(algo=algo))
    held_out = HeldOutLoss([item] * 3, stage(sft.Config()), {"a": [item], "b": [item] * 2})
    metrics, samples = evaluate_all([held_out], STATE, lambda: None, 0)
    assert metrics == {
        "eval/loss": 3.0, "eval/entropy": 1.0, "eval/perplexity": math.exp(3),
        "eval/loss/a": 1.0, "eval/perplexity/a": math.e, "eval/loss/b": 2.0, "eval/perplexity/b": math.exp(2),
    }  # fmt: skip
    assert samples == []
    assert (
        "eval/perplexity" not in replace(held_out, stage=stage(dpo.Config()))(STATE, lambda: None, 0).metrics
    )


# What a run says


def test_a_run_without_evaluation_says_so_and_why(tmp_path):
    line = lambda **fields: evaluation_line(config_of(tmp_path, **fields), [])
    assert line(data=DataConfig(path="a.jsonl")) == (
        "no evaluation: --eval.every is 0. --eval.every 10 --data.holdout 200 evaluates on held-out data "
        "every 10 steps"
    )
    assert line(data=DataConfig(path="task:arithmetic")).startswith(
        "no evaluation: --eval.every is 0. --eval.every 10 ev"
    )
    assert line(data=DataConfig(path="a.jsonl", holdout=0.1)) == (
        "no evaluation: --eval.every is 0; the rows of --data.holdout 0.1 are neither trained on nor "
        "evaluated"
    )
    assert line(data=DataConfig(path="a"), eval=EvalConfig(every=1)).startswith(
        "no evaluation: no held-out prompt has"
    )


def test_what_is_evaluated_is_one_line(tmp_path):
    config = config_of(tmp_path, eval=EvalConfig(every=5))
    own = evaluator(TEXTS, (1.0,), win_rate=win_rate(tmp_path))
    assert evaluation_line(config, [own]) == (
        "evaluation every 5 steps on held-out data: 4 prompts x 2 responses, pass@1 of 2, score of the "
        "reward models, win rate against the start by the higher score"
    )


def test_the_win_rate_needs_more_than_right_answers(tmp_path):
    made = lambda rewarder: make_win_rate(config_of(tmp_path), 0, rewarder, None)
    verifier, function = RewardPool(RewardConfig(name="exact")), RewardPool(RewardConfig(name="http://host"))
    assert made(Rewarder(verifier)) is None
    assert made(Rewarder(function)).judge is None
    assert made(Rewarder(verifier, [LengthModel(0.0)])).path == tmp_path / "run/eval/start.jsonl"


def test_reward_models_without_weight_are_not_loaded_where_nothing_is_evaluated(tmp_path):
    models = RewardConfig(models=(RewardModelConfig(path="/no/such", weight=0.0),))
    assert load_reward_models(replace(TrainConfig(), reward=models), None, {}, None) == []
