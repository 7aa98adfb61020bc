"""Async rewards run at once in one worker; keys that a worker lacks are named, with the fix."""

import asyncio
import logging
import textwrap
import time

import pytest

from jaxrl_llm.rewards.config import RewardConfig
from jaxrl_llm.rewards.environment import explain_failure, key_hint
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.sample import RewardLoadError, RewardSample
from jaxrl_llm.rewards.signatures import adapt

JUDGE = """
    import asyncio, os, time
    LOOPS, RUNNING, MOST = set(), 0, 0

    async def reward(sample):
        global RUNNING, MOST
        LOOPS.add(id(asyncio.get_running_loop()))
        RUNNING += 1
        MOST = max(MOST, RUNNING)
        try:
            r = sample.response
            if r == "raise": raise RuntimeError("no such luck")
            if r == "exit": raise SystemExit(3)
            if r == "cancel": raise asyncio.CancelledError
            if r == "hang": await asyncio.sleep(99)
            if r == "block": time.sleep(99)
            if r == "die": os._exit(7)
            if r == "loops": return float(len(LOOPS))
            if r == "most": return float(MOST)
            await asyncio.sleep(float(r))
            return float(r)
        finally:
            RUNNING -= 1
"""
ONCE = dict(max_failed_fraction=1.0, retries=0, workers=1)


@pytest.fixture
def write(tmp_path):
    def to_file(text, name="rewards.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return str(tmp_path / name)

    return to_file


def samples(*responses):
    return [RewardSample(response=str(response), answer="1") for response in responses]


def test_64_judges_wait_at_once_in_one_worker(write):
    """Results keep the order of the samples, not that of their ends."""
    waits = [0.05 - 0.0005 * i for i in range(64)]
    with RewardPool(RewardConfig(name=write(JUDGE), **ONCE)) as pool:
        assert pool.score(samples("0"))[0].score == 0.0  # the worker has started
        assert [r.score for r in pool.score(samples(*waits))] == pytest.approx(waits)
        assert [r.score for r in pool.score(samples("most", "loops"))] == [64.0, 1.0]


def test_no_more_calls_are_in_flight_than_allowed(write):
    with RewardPool(RewardConfig(name=write(JUDGE), concurrency=3, **ONCE)) as pool:
        pool.score(samples(*[0.002] * 12))
        assert pool.score(samples("most"))[0].score == 3.0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise", "RuntimeError: no such luck"),
        ("exit", "SystemExit: 3"),
        ("cancel", "CancelledError"),
        ("hang", "took longer than 1 s"),
        ("block", "took longer than 1 s"),
        ("die", "exited with code 7"),
    ],
)
def test_a_fault_costs_its_own_sample_only(write, fault, reason):
    """A blocked event loop and a dead worker take all calls in flight with them, which are tried again."""
    timeout = 1.0 if fault in ("hang", "block") else 60.0
    with RewardPool(RewardConfig(name=write(JUDGE), timeout=timeout, **ONCE)) as pool:
        results = pool.score(samples("0.01", fault, "0.02", "0.03"))
        assert [r.score for r in results if r.valid] == [0.01, 0.02, 0.03]
        assert not results[1].valid and reason in results[1].reason
        assert pool.metrics["reward/timeouts"] == {"hang": 1.0, "block": 2.0}.get(fault, 0.0)
        assert pool.score(samples("0.01"))[0].score == 0.01


def test_failures_are_tried_again_together(write):
    """20 failures that take 50 ms each: once more at once, not one after the other."""
    flaky = """
        import asyncio
        SEEN = set()
        async def compute_score(data_source, solution_str, ground_truth):
            await asyncio.sleep(0.05)
            if solution_str in SEEN: return True
            SEEN.add(solution_str)
            raise OSError("not yet")
    """
    config = RewardConfig(name=write(flaky), workers=1, retries=1)
    with RewardPool(config) as pool:
        started = time.monotonic()
        results = pool.score(samples(*range(20)))
        assert [r.score for r in results] == [1.0] * 20
        assert pool.metrics["reward/retries"] == 20.0
        assert pool.metrics["reward/wall_seconds"] <= time.monotonic() - started
        assert pool._workers[0].scored == 20


def test_calls_in_flight_are_cancelled_when_the_pool_is_interrupted(write, tmp_path, monkeypatch):
    cleanup = f"""
        import asyncio, pathlib
        async def reward(sample):
            folder = pathlib.Path({str(tmp_path)!r})
            try:
                (folder / ("started " + sample.response)).touch()
                await asyncio.sleep(99)
            finally:
                (folder / sample.response).touch()
    """
    with RewardPool(RewardConfig(name=write(cleanup), **ONCE)) as pool:
        wait = pool._wait

        def interrupt_once_started(round_):
            wait(round_)
            while pool._workers[0].assigned.loaded:
                if len([*tmp_path.glob("started *")]) == 2:
                    raise KeyboardInterrupt
                time.sleep(0.01)

        monkeypatch.setattr(pool, "_wait", interrupt_once_started)
        with pytest.raises(KeyboardInterrupt):
            pool.score(samples("a", "b"))
    assert (tmp_path / "a").exists() and (tmp_path / "b").exists()


async def trl(prompts, completions, **kwargs):
    return [1.0 for _ in completions]


async def openrlhf(queries, prompts, labels):
    return {"rewards": [1.0] * len(queries), "scores": [1.0] * len(queries)}


async def verl(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


async def rl2(messages, answer):
    return 1.0


async def env_step(state, action, extra_info):
    return {"reward": 1.0, "score": 1.0}


async def ours(sample):
    return 1.0


async def ours_with_config(sample, config):
    return 1.0


class Judge:
    async def __call__(self, sample):
        return 1.0


@pytest.mark.parametrize(
    "function", [trl, openrlhf, verl, rl2, env_step, ours, ours_with_config, Judge(), lambda sample: ours(0)]
)
def test_every_convention_may_be_async(function):
    reward = adapt(function, "f", RewardConfig())
    scores = asyncio.run(as_coroutine(reward.call(samples("a", "b"))))
    assert [s["score"] if isinstance(s, dict) else s for s in scores] == [1.0, 1.0]
    lists = function in (trl, openrlhf)
    assert reward.batched == lists and reward.is_async == (not lists and "lambda" not in repr(function))


async def as_coroutine(awaitable):
    return await awaitable


def test_a_key_that_was_not_passed_on_is_named_with_the_fix(write, monkeypatch, caplog):
    """Found before a model is loaded, though a KeyError may come from a response."""
    monkeypatch.setenv("JUDGE_API_KEY", "sk-0123456789")
    text = """
        import os
        def reward(sample): return float(len(os.environ["JUDGE_API_KEY"]))
    """
    withheld = pytest.raises(RewardLoadError, match=r"withheld.*--reward.keep_env JUDGE_API_KEY")
    caplog.set_level(logging.WARNING)
    with RewardPool(RewardConfig(name=write(text), workers=1)) as pool, withheld:
        pool.check(samples("a"))
    assert "rewards.py names JUDGE_API_KEY, which reward workers do not see" in caplog.text
    passed = RewardConfig(name=write(text), workers=1, keep_env=("JUDGE_API_KEY",))
    with RewardPool(passed) as pool:
        assert pool.score(samples("a"))[0].score == 13.0


def test_hints_of_keys():
    environment = {"OPENAI_API_KEY": "x", "KEPT_KEY": "x", "PATH": "/bin"}
    hint = lambda text: key_hint(text, environment, ["KEPT_KEY", "UNSET_KEY"])
    client = "OpenAIError: The api_key client option must be set or the OPENAI_API_KEY environment variable"
    assert "--reward.keep_env OPENAI_API_KEY" in hint(client)
    assert hint("KeyError: 'HF_TOKEN'").endswith("set it, and pass it on: --reward.keep_env HF_TOKEN")
    assert hint("KeyError: 'UNSET_KEY'").endswith(
        "UNSET_KEY is not set in this command's environment; set it"
    )
    assert hint("KeyError: 'KEPT_KEY'") == hint("ValueError: MAX_TOKENS is 3") == hint("KeyError: 'a'") == ""


def test_secrets_that_were_passed_on_are_masked_in_messages_and_logs(write, monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_API_KEY", "sk-0123456789")
    text = """
        import os
        def reward(sample):
            print("key", os.environ["JUDGE_API_KEY"], flush=True)
            raise RuntimeError("bad key " + os.environ["JUDGE_API_KEY"])
    """
    config = RewardConfig(name=write(text), keep_env=("JUDGE_API_KEY",), **ONCE)
    log = tmp_path / "rewards.log"
    with RewardPool(config, log) as pool:
        (result,) = pool.score(samples("a"))
        pool.score(samples("a"))
    assert "bad key ***" in result.reason and "0123" not in result.reason
    assert "key ***" in log.read_text() and "0123" not in log.read_text()
    assert "0123" not in explain_failure("sk-0123456789", ["JUDGE_API_KEY"])
