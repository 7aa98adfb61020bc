"""Reward functions of other systems, called with their signatures.

The convention of a function is read from its parameter names:

    ours      reward(sample) or reward(sample, config)   -> score, or (score, Outcome)
    TRL       f(prompts, completions, completion_ids, **columns) -> list of scores; None abstains
    veRL      compute_score(data_source, solution_str, ground_truth, extra_info) -> score or {"score": ...}
    OpenRLHF  reward_func(queries, prompts, labels)      -> list or tensor, or {"rewards", "scores"}
    RL2 reward_fn(messages, answer) -> score; env_step(state, action, extra_info) -> {"reward", "score"}
    pairwise judge(prompt, a, b) -> 1 if a is better, 0 if b is better, 0.5 for a tie (--eval.judge)

Any of them may be `async`: a worker then runs the calls for several samples concurrently, in one event loop.
A bool is a score only in the conventions of veRL and RL2, whose examples return bools; elsewhere it counts as
a mistake.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxrl_llm.errors import UserError
from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.config import MAX_SCORE, RewardConfig
from jaxrl_llm.rewards.sample import RewardLoadError, RewardSample
from jaxrl_llm.thoughts import as_message
from jaxrl_llm.user_file import did_you_mean

ACCEPTED = """  reward(sample) or reward(sample, config)                            (ours)
  f(prompts, completions, completion_ids, **columns)                  (TRL)
  compute_score(data_source, solution_str, ground_truth, extra_info)  (veRL)
  reward_func(queries, prompts, labels)                               (OpenRLHF)
  reward_fn(messages, answer) or env_step(state, action, extra_info)  (RL2)
  judge(prompt, a, b)                                                 (of two responses)"""
OF_TRAINER = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments of TRL's trainer that a worker process does not have."""
KNOWN = ("sample", "config", "prompts", "completions", "completion_ids", "data_source", "solution_str")
KNOWN += ("ground_truth", "extra_info", "queries", "labels", "messages", "answer", "state", "action")
TEXT = ("response", "completion", "completions", "text", "prompt", "output", "answer", "solution")


class Score(NamedTuple):
    """Score of one reward function for one sample."""

    value: float | None  # None: it abstains
    outcome: Outcome


class InvalidScoreError(ValueError):
    """A reward function returned a value that cannot be a score."""


@dataclass(frozen=True)
class AdaptedReward:
    """A reward function in the form that workers call; scores of an async function are awaited."""

    call: Callable[[list[RewardSample]], list[Any] | Awaitable[list[Any]]]
    name: str = ""  # in messages
    batched: bool = False  # takes all samples at once
    bools: bool = False  # True and False are scores
    abstains: bool = False  # None = it abstains
    is_async: bool = False  # calls for several samples may run at once


def adapt(function: Callable[..., Any], name: str, config: RewardConfig) -> AdaptedReward:
    """Return the AdaptedReward of a reward function.

    Raises:
        RewardLoadError: the parameters fit no convention; the message lists the conventions.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise RewardLoadError(f"reward {name}: its parameters cannot be read: {error}") from None
    names = set(parameters)
    call, is_async = _caller(function, parameters), _is_async(function)

    def each(one: Callable[[RewardSample], Any], bools: bool = False) -> AdaptedReward:
        take = lambda samples: gather_scores([one(sample) for sample in samples], config.concurrency)
        return AdaptedReward(take, bools=bools, is_async=is_async)

    # Conventions of other systems, by their parameters.
    if "completions" in names:
        _refuse_trainer(name, parameters)
        take = lambda samples: _then(call(_trl(samples)), _listed)
        return AdaptedReward(take, batched=True, abstains=True)
    if {"solution_str", "ground_truth"} <= names:
        return each(lambda sample: call(_verl(sample)), bools=True)
    if {"queries", "prompts"} <= names:
        return AdaptedReward(lambda s: _then(call(of_openrlhf(s)), _rewards_and_scores), batched=True)
    if {"messages", "answer"} <= names:
        return each(lambda sample: call({"messages": _chat(sample), "answer": sample.answer}), bools=True)
    if {"prompt", "a", "b"} <= names:
        return each(lambda sample: call(_pair(sample)), bools=True)
    if {"state", "action", "extra_info"} <= names:
        return each(lambda sample: call(_env_step(sample)), bools=True)
    # Our convention: (sample) or (sample, config).
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p.name for p in parameters.values() if p.default is p.empty and p.kind in positional]
    keywords = [p for p in parameters.values() if p.default is p.empty and p.kind is p.KEYWORD_ONLY]
    if required == ["sample", "config"] and not keywords:
        return each(lambda sample: function(sample, config))
    if len(required) == 1 and not keywords and required[0] not in TEXT:
        return each(function)
    raise RewardLoadError(_no_convention(name, parameters))


def parse_score(raw: Any, reward: AdaptedReward, correct_at: float) -> Score:
    """Return score and outcome of a raw value.

    Raises:
        InvalidScoreError: the value cannot be a score (another type, NaN, infinite or huge), or has no
            Outcome.
    """
    if raw is None and reward.abstains:
        return Score(None, Outcome.FAILED)
    if isinstance(raw, dict):
        value = _number(raw.get("score", raw.get("reward")), reward.bools)
        judged = raw.get("judged", raw.get("acc"))
        judged = judged.item() if hasattr(judged, "item") else judged  # numpy's bool
        if isinstance(judged, bool):
            return Score(value, Outcome.CORRECT if judged else Outcome.WRONG)
        return Score(value, _outcome(value if judged is None else _number(judged, True), correct_at))
    if isinstance(raw, tuple) and len(raw) == 2:
        value = _number(raw[0], reward.bools)
        if raw[1] not in list(Outcome):
            raise InvalidScoreError(
                f"returned {raw[1]!r:.80} for an Outcome; return a number, (number, Outcome), or "
                '{"score": number, "acc": bool}'
            )
        if raw[1] == Outcome.FAILED:
            raise ValueError("returned Outcome.FAILED")
        return Score(value, Outcome(raw[1]))
    value = _number(raw, reward.bools)
    return Score(value, _outcome(value, correct_at))


def _caller(function: Callable[..., Any], parameters: Any) -> Callable[[dict[str, Any]], Any]:
    """Return a function that calls `function` with the arguments that it accepts."""
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = [p.name for p in parameters.values() if p.default is p.empty and p.kind not in variadic]

    def call(arguments: dict[str, Any]) -> Any:
        if missing := [name for name in required if name not in arguments]:
            raise UserError(
                f"the function takes {missing[0]}, but the row has only the columns "
                f"{', '.join(sorted(arguments))}.{did_you_mean(missing[0], arguments)}"
            )
        known = arguments if open_ended else {k: v for k, v in arguments.items() if k in parameters}
        return function(**known)

    return call


def _refuse_trainer(name: str, parameters: Any) -> None:
    """Refuse a reward of TRL that must have an object of its trainer."""
    required = [p.name for p in parameters.values() if p.default is p.empty and p.name in OF_TRAINER]
    if required:
        raise RewardLoadError(
            f"reward {name}: it takes {required[0]}, an object of TRL's trainer, which a reward worker does "
            f"not have; give the parameter a default ({required[0]}=None) and do without it"
        )


def _no_convention(name: str, parameters: Any) -> str:
    given = ", ".join(parameters)
    hints = [hint for word in parameters if word not in KNOWN and (hint := did_you_mean(word, KNOWN))]
    if len(parameters) == 1 and given in TEXT:
        hints = [" A function of one parameter gets the sample: reward(sample) reads sample.response."]
    hint = "".join(hints[:1])
    return f"reward {name}: no convention has parameters ({given}).{hint} Accepted are:\n{ACCEPTED}"


def _outcome(value: float, correct_at: float) -> Outcome:
    return Outcome.CORRECT if value >= correct_at else Outcome.WRONG


def _number(raw: Any, bools: bool) -> float:
    value = raw.item() if hasattr(raw, "item") else raw  # numpy and torch scalars
    if isinstance(value, bool) and not bools:
        raise InvalidScoreError("returned a bool; return float(...) of it")
    if not isinstance(value, int | float):
        raise InvalidScoreError(f"returned {type(value).__name__} instead of a number")
    if not math.isfinite(value) if isinstance(value, float) else value.bit_length() > 64:
        raise InvalidScoreError("returned " + (str(value) if isinstance(value, float) else "a huge integer"))
    if abs(value) > MAX_SCORE:
        raise InvalidScoreError(f"returned {value:g}, beyond +-{MAX_SCORE:g}")
    return float(value)


def gather_scores(values: Sequence[Any], limit: int) -> list[Any] | Awaitable[list[Any]]:
    """Return the values, or if some are awaitable an awaitable of all, of which `limit` run concurrently."""
    if not any(map(inspect.isawaitable, values)):
        return list(values)

    async def finish() -> list[Any]:
        slots = asyncio.Semaphore(limit)

        async def one(value: Any) -> Any:
            async with slots:
                return await value if inspect.isawaitable(value) else value

        if len(values) == 1:  # in this task: SystemExit in another would leave the event loop
            return [await one(values[0])]
        return await asyncio.gather(*map(one, values))

    return finish()


def _then(value: Any, finish: Callable[[Any], list[Any]]) -> list[Any] | Awaitable[list[Any]]:
    """Return `finish(value)`, or an awaitable of it if the value is awaitable."""

    async def awaited() -> list[Any]:
        return finish(await value)

    return awaited() if inspect.isawaitable(value) else finish(value)


def _is_async(function: Callable[..., Any]) -> bool:
    """Return whether each call of a function, or of an object with `__call__`, gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _listed(raw: Any) -> list[Any]:
    values = raw.tolist() if hasattr(raw, "tolist") else raw
    if not isinstance(values, list | tuple):
        raise InvalidScoreError(f"returned {type(raw).__name__} instead of a list of scores")
    return [value[0] if isinstance(value, list) and len(value) == 1 else value for value in values]


def _chat(sample: RewardSample) -> list[dict[str, Any]]:
    prompt = list(sample.messages) or [{"role": "user", "content": sample.prompt}]
    return [*prompt, as_message(sample.text or sample.response)]


def _trl(samples: list[RewardSample]) -> dict[str, Any]:
    """Return the arguments as TRL passes them: messages or strings as the row has them, columns as lists."""
    names = {name for sample in samples for name in sample.columns} - {
        "prompt",
        "completion",
        "completion_ids",
    }
    columns = {name: [sample.columns.get(name) for sample in samples] for name in names}
    return {
        "answer": [sample.answer for sample in samples],
        **columns,
        "prompts": [list(s.messages) if s.messages else s.prompt for s in samples],
        "completions": [_chat(s)[-1:] if s.messages else s.response for s in samples],
        "completion_ids": [list(s.response_ids) for s in samples],
    }


def _verl(sample: RewardSample) -> dict[str, Any]:
    return {
        "data_source": sample.source,
        "solution_str": sample.response,
        "ground_truth": sample.answer,
        "extra_info": sample.columns.get("extra_info", {}),
    }


def of_openrlhf(samples: list[RewardSample], query: str = "queries") -> dict[str, Any]:
    """Return the arguments as OpenRLHF passes them; its services read `query` in place of `queries`."""
    return {
        query: [s.prompt + s.response for s in samples],
        "prompts": [s.prompt for s in samples],
        "labels": [s.answer for s in samples],
    }


def _rewards_and_scores(raw: Any) -> list[Any]:
    """Read OpenRLHF's dict: `rewards` train the policy, `scores` in [0, 1] decide correctness."""
    if not isinstance(raw, dict):
        return _listed(raw)
    rewards = _listed(raw.get("rewards"))
    scores = _listed(raw["scores"]) if raw.get("scores") is not None else rewards
    if len(scores) != len(rewards):
        raise InvalidScoreError(f"returned {len(rewards)} rewards and {len(scores)} scores")
    return [{"score": reward, "judged": score} for reward, score in zip(rewards, scores, strict=True)]


def _pair(sample: RewardSample) -> dict[str, Any]:
    known = {"messages": list(sample.messages), "answer": sample.answer, "data_source": sample.source}
    return {**known, "prompt": sample.prompt, "a": sample.response, "b": sample.other}


def _env_step(sample: RewardSample) -> dict[str, Any]:
    extra = sample.columns.get("extra_info") or {"answer": sample.answer}
    return {"state": sample.prompt, "action": sample.response, "extra_info": extra}
