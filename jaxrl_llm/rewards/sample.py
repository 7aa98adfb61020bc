"""What a reward reads and what it leaves behind. Plain Python, small to pickle."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.outcome import Outcome

ABSTAINED = "the reward abstained (returned None)"


@dataclass(frozen=True)
class RewardModelConfig:
    """A reward model in this run's own memory, sharded as the policy is."""

    path: str = ""
    """Hugging Face folder (a sequence classifier, such as reward_model_tiny.py leaves; for generative a
    language model) or hub name."""
    weight: float = 1.0
    """Its share in the reward, which it is added to."""
    kind: Literal["outcome", "process", "generative"] = "outcome"
    """outcome: one score a response, at its last token; process: one a step, at the end of each line;
    generative: asked whether the answer is right, the probability that it says Yes and not No."""
    mean: float = 0.0
    """Taken off its scores, so that they are around 0."""
    scale: float = 1.0
    """Divides its scores."""


@dataclass(frozen=True)
class RewardConfig:
    """How responses are scored, and what happens when scoring them goes wrong."""

    name: str = "auto"
    """A built-in reward (exact, arithmetic, gsm8k, math, countdown, gym), a function of yours as
    "my_rewards.py:my_reward", the URL of a service, "none" (reward models alone), or "auto": the built-in
    that fits each row's data source."""
    weight: float = 1.0
    """Share of `name` in the reward; 0 = it only says what is correct, and reward models reward."""
    env: Literal["replace", "add"] = "replace"
    """What an environment's own reward does to that of `name`: takes its place, or is added. Where it gives
    none, `name` alone judges."""
    shaping: tuple[tuple[str, float], ...] = ()
    """Further rewards added with their weights, e.g. format 0.2 overlong 1.0. Correct or wrong is said by
    `name` alone."""
    models: tuple[RewardModelConfig, ...] = ()
    """Reward models whose scores are added."""
    overlong_from: int = 0
    """`overlong` shaping: response tokens from which the penalty grows."""
    overlong_to: int = 0
    """`overlong` shaping: response tokens at which the penalty is whole (-1)."""
    correct_at: float = 1.0
    """A score of at least this counts as correct where a function returns a score only."""
    workers: int = 2
    """Worker processes."""
    timeout: float = 10.0
    """Seconds one sample may take. A function that scores lists gets a tenth of it more per further sample;
    when that is not enough, its samples are tried one by one."""
    start_timeout: float = 120.0
    """Seconds a worker may take to start and import the reward."""
    retries: int = 1
    """How often a sample that failed (error, time-out, crash, not a number) is tried again."""
    failed: Literal["mask", "zero"] = "mask"
    """What a sample is worth that still fails: nothing is learnt from it, or it scores 0."""
    max_failed_fraction: float = 0.5
    """A batch in which more than this part failed stops the run; 1 = never."""
    memory_gb: float = 8.0
    """Address space of a worker, GiB (Linux)."""
    recycle: int = 1000
    """Samples after which a worker is replaced, against leaks."""
    keep_env: tuple[str, ...] = ()
    """Environment variables that workers may see although their names or values look secret."""


@dataclass(frozen=True)
class Sample:
    """One response to be judged."""

    response: str
    answer: Any = None  # of the row: text, a number, a list of accepted ones, or what the reward expects
    prompt: str = ""  # text of the prompt
    messages: tuple[dict[str, Any], ...] = ()  # the prompt as chat messages; () = the prompt is plain text
    response_ids: tuple[int, ...] = ()
    source: str = ""  # name of the data source
    columns: dict[str, Any] = field(default_factory=dict)  # all columns of the row


@dataclass(frozen=True)
class Result:
    """What became of a sample. The score is NaN where nothing is to be learnt from it."""

    score: float
    outcome: Outcome
    reason: str = ""  # why it failed
    seconds: float = 0.0  # inside the reward
    components: tuple[float, ...] = ()  # of `name` and of each of `shaping`, before their weights

    @property
    def valid(self) -> bool:
        return not math.isnan(self.score)

    @property
    def abstained(self) -> bool:
        return self.reason == ABSTAINED


class RewardLoadError(UserError):
    """The reward function cannot be found or imported."""


class RewardFailureError(RunError):
    """Too many samples could not be scored."""
