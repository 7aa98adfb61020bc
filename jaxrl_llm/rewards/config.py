"""Settings of rewards and reward models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrl_llm.addresses import holds_login, host_of
from jaxrl_llm.ranges import Count, CountOrZero, Fraction, Range
from jaxrl_llm.sharding.config import PlacementConfig
from jaxrl_llm.user_file import did_you_mean, missing_file, split_name

BUILTIN = ("exact", "arithmetic", "gsm8k", "math", "countdown", "gym", "verdict", "format", "overlong")
"""Names of the built-in rewards, the keys of `rewards.builtin.REWARDS`, whose import would slow `--help`."""
MAX_SCORE = 1e6
"""Largest absolute value of one reward function's score; more is a mistake."""
URL = ("http://", "https://")
TOKEN = "JAXRL_REWARD_TOKEN"
"""Environment variable with the token of services, which `reward.keep_env` must name."""
MAX_CHUNK = 64
"""Samples of one message to a worker."""

Factor = Annotated[float, Range(-1e6, 1e6, usual="1 is usual")]
"""A factor of a score; a negative one penalises."""
TimeLimit = Annotated[float, Range(0.01, 1e6)]
"""Seconds."""


@dataclass(frozen=True)
class RewardModelConfig(PlacementConfig):
    """A reward model in the memory of this run, sharded like the policy unless it has a mesh."""

    path: str = ""
    """Hugging Face folder (a sequence classifier, such as reward_model_tiny.py leaves; for generative a
    language model) or hub name."""
    weight: Factor = 1.0
    """Factor of its score in the reward."""
    kind: Literal["outcome", "process", "generative"] = "outcome"
    """outcome: one score a response, at its last token; process: one a step, at the end of each line;
    generative: the probability of Yes against No, after a prompt with question and answer."""
    mean: Annotated[float, Range(-1e6, 1e6)] = 0.0
    """Subtracted from its scores, so that they are around 0."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem)."""
        yield from super().problems()
        if not self.path:
            yield "path", "is empty: set the folder or hub name of a reward model."

    def head_problem(self, has_score_head: bool) -> str:
        """Return why a model with or without a score head cannot be of this kind; "" = it can."""
        if has_score_head == (self.kind != "generative"):
            return ""
        if has_score_head:
            return "a score head cannot answer Yes or No; kind generative needs a language model."
        return (
            "a language model without a score head; train one with --algo reward_model, or give a "
            "...ForSequenceClassification folder with one label."
        )


@dataclass(frozen=True)
class RewardConfig:
    """Scoring of responses, and its failures."""

    name: str = "auto"
    """A built-in reward (exact, arithmetic, gsm8k, math, countdown, gym), a function of yours as
    "my_rewards.py:my_reward", the URL of a service, "none" (reward models or an environment alone), or
    "auto": the built-in that fits each row's data source, or none if nothing needs a reward."""
    weight: Factor = 1.0
    """Factor of `name` in the reward; 0 = it only decides correctness, and reward models give the reward."""
    env: Literal["replace", "add"] = "replace"
    """Replace the reward of `name` by the environment's reward, or add the two. If the environment gives
    none, `name` alone decides."""
    shaping: tuple[tuple[str, Factor], ...] = ()
    """Further rewards added with their weights, e.g. format 0.2 overlong 1.0. `name` alone decides
    correctness."""
    models: tuple[RewardModelConfig, ...] = ()
    """Reward models whose scores are added."""
    overlong_from: CountOrZero = 0
    """`overlong` shaping: response tokens from which the penalty grows."""
    overlong_to: CountOrZero = 0
    """`overlong` shaping: response tokens from which the penalty is -1."""
    correct_at: Annotated[float, Range(-MAX_SCORE, MAX_SCORE)] = 1.0
    """A score of at least this counts as correct, if a function returns only a score."""
    workers: Annotated[int, Range(1, 1024, usual="one a processor is usual")] = 2
    """Worker processes."""
    timeout: TimeLimit = 10.0
    """Seconds one sample may take. A function that scores lists gets a tenth of it more per further sample;
    when that is not enough, its samples are tried one by one."""
    concurrency: Annotated[int, Range(1, MAX_CHUNK, usual=f"{MAX_CHUNK} is usual")] = MAX_CHUNK
    """Calls of an async reward function that a worker has in flight; a lower number respects a rate limit."""
    service_samples: Annotated[int, Range(1, MAX_CHUNK)] = MAX_CHUNK
    """Samples of one request to a service; with 1 a worker has `concurrency` requests in flight."""
    start_timeout: TimeLimit = 120.0
    """Seconds a worker may take to start and import the reward."""
    retries: Annotated[int, Range(0, 100)] = 1
    """Times that a sample that failed (error, time-out, crash, not a number) is tried again."""
    failed: Literal["mask", "zero"] = "mask"
    """Treatment of a sample that still fails: exclude it from learning, or score it 0."""
    max_failed_fraction: Fraction = 0.5
    """A batch in which more than this part failed stops the run; 1 = never."""
    memory_gb: Annotated[float, Range(0.25, 1e5)] = 8.0
    """Address space of a worker, GiB (Linux)."""
    recycle: Count = 1000
    """Samples after which a worker is replaced, against leaks."""
    keep_env: tuple[str, ...] = ()
    """Names of environment variables that workers may see although names or values look secret, such as
    OPENAI_API_KEY."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem)."""
        if problem := name_problem(self.name):
            yield "name", problem
        for name, _ in self.shaping:
            if name in ("auto", "none"):
                yield "shaping", f"has {name}: name a reward, such as format or my_rewards.py:my_reward."
            elif problem := name_problem(name):
                yield "shaping", problem
        if self.shaping and self.name == "none":
            yield (
                "shaping",
                f"needs a reward to shape, but reward.name is none; set it to {self.shaping[0][0]}.",
            )
        if not 0 < self.overlong_from < self.overlong_to and "overlong" in self.used:
            yield (
                "overlong_from",
                (
                    f"is {self.overlong_from} and reward.overlong_to {self.overlong_to}: the reward overlong "
                    "needs 0 < overlong_from < overlong_to."
                ),
            )

    @property
    def used(self) -> tuple[str, ...]:
        """Names of the reward and of the shaping rewards: the components of a score, in order."""
        return (self.name, *(name for name, _ in self.shaping))

    @property
    def weights(self) -> tuple[float, ...]:
        """Factors of `used`."""
        return (self.weight, *(weight for _, weight in self.shaping))


def name_problem(name: str) -> str:
    """Return the problem with the name of a reward, or "". Does not import the user's file."""
    if name in ("auto", "none") or name in BUILTIN:
        return ""
    if name.startswith(URL):
        return _address_problem(name)
    path, _ = split_name(name)
    if path.suffix == ".py":
        missing = missing_file(path)
        return missing and f"is {name}: {missing}"
    return (
        f'is "{name}": unknown.{did_you_mean(name, [*BUILTIN, "auto", "none"])} Built in are '
        f'{", ".join(BUILTIN)}; a function of yours is "path/to/file.py:function", a service its URL; '
        "none if only reward models or an environment give rewards."
    )


def _address_problem(url: str) -> str:
    """Return the problem with a service's address, which may hold a key, or ""."""
    host = host_of(url)
    if not host:
        return "is not a valid address; write https://host:port/path, with %20 and the like."
    if holds_login(url):
        return (
            f"is an address of {host} with a user or password before it, which is not sent. Set the "
            f"environment variable {TOKEN}, which is sent as a bearer token, and --reward.keep_env {TOKEN}; "
            f"or write a parameter as ?api_key=${{NAME}} with --reward.keep_env NAME."
        )
    return ""
