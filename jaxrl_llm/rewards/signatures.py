"""Reward functions of other systems, called as they are.

Which convention a function follows is read from its parameter names:

    ours      reward(sample) or reward(sample, config)   -> score, or (score, Outcome)
    TRL       f(prompts, completions, completion_ids, **columns) -> list of scores; None abstains
    veRL      compute_score(data_source, solution_str, ground_truth, extra_info) -> score or {"score": ...}
    OpenRLHF  reward_func(queries, prompts, labels)      -> list or tensor, or {"rewards", "scores"}
    RL2       reward_fn(messages, answer) -> score; env_step(state, action, extra_info) -> {"reward", "score"}

Any of them may be `async`. A bool is a score only under the conventions of veRL and RL2, whose own
examples return one; elsewhere it is taken for a mistake.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.sample import RewardConfig, RewardLoadError, Sample

ACCEPTED = """  reward(sample) or reward(sample, config)                            (ours)
  f(prompts, completions, completion_ids, **columns)                  (TRL)
  compute_score(data_source, solution_str, ground_truth, extra_info)  (veRL)
  reward_func(queries, prompts, labels)                               (OpenRLHF)
  reward_fn(messages, answer) or env_step(state, action, extra_info)  (RL2)"""
MAX_SCORE = 1e6  # beyond this a score is a mistake
Verdict = tuple[float | None, Outcome]  # score (None: abstains)


@dataclass(frozen=True)
class Scorer:
    """A reward function behind one face: samples in, raw values out."""

    call: Callable[[list[Sample]], list[Any]]
    batched: bool = False  # wants its samples as a list
    bools: bool = False  # True and False are scores
    abstains: bool = False  # None means: no opinion


def adapt(function: Callable[..., Any], name: str, config: RewardConfig) -> Scorer:
    """The Scorer of a reward function. Raises RewardLoadError where the convention is not recognised."""
    parameters = inspect.signature(function).parameters
    names = set(parameters)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def call(**arguments: Any) -> Any:
        known = arguments if open_ended else {k: v for k, v in arguments.items() if k in names}
        return _finish(function(**known))

    if "completions" in names:
        return Scorer(lambda samples: _listed(call(**_trl(samples))), batched=True, abstains=True)
    if {"solution_str", "ground_truth"} <= names:
        return Scorer(lambda samples: [call(**_verl(s)) for s in samples], bools=True)
    if {"queries", "prompts"} <= names:
        return Scorer(lambda samples: _rewards_and_scores(call(**_openrlhf(samples))), batched=True)
    if {"messages", "answer"} <= names:
        return Scorer(lambda samples: [call(messages=_chat(s), answer=s.answer) for s in samples], bools=True)
    if {"state", "action", "extra_info"} <= names:
        return Scorer(lambda samples: [call(**_env_step(s)) for s in samples], bools=True)
    required = [p for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if [p.name for p in required] == ["sample", "config"]:
        return Scorer(lambda samples: [_finish(function(s, config)) for s in samples])
    if len(required) == 1:
        return Scorer(lambda samples: [_finish(function(s)) for s in samples])
    raise RewardLoadError(
        f"reward {name}: no convention has parameters ({', '.join(parameters)}). Accepted are:\n{ACCEPTED}"
    )


def judge(raw: Any, scorer: Scorer, correct_at: float) -> Verdict:
    """(score, outcome) of a raw value. Raises ValueError saying what is wrong with it."""
    if raw is None and scorer.abstains:
        return None, Outcome.FAILED
    if isinstance(raw, dict):
        value = _number(raw.get("score", raw.get("reward")), scorer.bools)
        judged = raw.get("judged", raw.get("acc"))
        if isinstance(judged, bool):
            return value, Outcome.CORRECT if judged else Outcome.WRONG
        return value, _outcome(value if judged is None else _number(judged, True), correct_at)
    if isinstance(raw, tuple) and len(raw) == 2:
        return _number(raw[0], scorer.bools), Outcome(raw[1])
    value = _number(raw, scorer.bools)
    return value, _outcome(value, correct_at)


def _outcome(value: float, correct_at: float) -> Outcome:
    return Outcome.CORRECT if value >= correct_at else Outcome.WRONG


def _number(raw: Any, bools: bool) -> float:
    value = raw.item() if hasattr(raw, "item") else raw  # numpy and torch scalars
    if isinstance(value, bool) and not bools:
        raise UserError("returned a bool; return float(...) of it")
    if not isinstance(value, int | float):
        raise UserError(f"returned {type(value).__name__} instead of a number")
    if not math.isfinite(value) if isinstance(value, float) else value.bit_length() > 64:
        raise UserError("returned " + (str(value) if isinstance(value, float) else "a huge integer"))
    if abs(value) > MAX_SCORE:
        raise UserError(f"returned {value:g}, beyond +-{MAX_SCORE:g}")
    return float(value)


def _finish(value: Any) -> Any:
    return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value


def _listed(raw: Any) -> list[Any]:
    values = raw.tolist() if hasattr(raw, "tolist") else raw
    if not isinstance(values, list | tuple):
        raise UserError(f"returned {type(raw).__name__} instead of a list of scores")
    return [value[0] if isinstance(value, list) and len(value) == 1 else value for value in values]


def _chat(sample: Sample) -> list[dict[str, Any]]:
    prompt = list(sample.messages) or [{"role": "user", "content": sample.prompt}]
    return [*prompt, {"role": "assistant", "content": sample.response}]


def _trl(samples: list[Sample]) -> dict[str, Any]:
    """Conversational rows get messages, plain ones strings, as TRL passes them; columns as lists."""
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


def _verl(sample: Sample) -> dict[str, Any]:
    return {
        "data_source": sample.source,
        "solution_str": sample.response,
        "ground_truth": sample.answer,
        "extra_info": sample.columns.get("extra_info", {}),
    }


def _openrlhf(samples: list[Sample]) -> dict[str, Any]:
    return {
        "queries": [s.prompt + s.response for s in samples],
        "prompts": [s.prompt for s in samples],
        "labels": [s.answer for s in samples],
    }


def _rewards_and_scores(raw: Any) -> list[Any]:
    """OpenRLHF's dict: `rewards` are learnt from, `scores` in [0, 1] say whether it is correct."""
    if not isinstance(raw, dict):
        return _listed(raw)
    rewards = _listed(raw.get("rewards"))
    scores = _listed(raw["scores"]) if raw.get("scores") is not None else rewards
    if len(scores) != len(rewards):
        raise UserError(f"returned {len(rewards)} rewards and {len(scores)} scores")
    return [{"score": reward, "judged": score} for reward, score in zip(rewards, scores, strict=True)]


def _env_step(sample: Sample) -> dict[str, Any]:
    extra = sample.columns.get("extra_info") or {"answer": sample.answer}
    return {"state": sample.prompt, "action": sample.response, "extra_info": extra}
