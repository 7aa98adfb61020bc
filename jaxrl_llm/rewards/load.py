"""From a reward's name to its function: a built-in, a service, the user's file, or a pickled function."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import importlib
import importlib.util
import io
import json
import os
import pickle
import re
import urllib.error
import urllib.request
from collections import ChainMap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import CodeType
from typing import Any
from urllib.parse import quote

from jaxrl_llm.errors import RunError, UserError
from jaxrl_llm.rewards.builtin import REWARDS
from jaxrl_llm.rewards.config import TOKEN, URL, RewardConfig
from jaxrl_llm.rewards.environment import torch_hint
from jaxrl_llm.rewards.messages import strict_json
from jaxrl_llm.rewards.sample import RewardLoadError, RewardSample
from jaxrl_llm.rewards.signatures import AdaptedReward, adapt, of_openrlhf
from jaxrl_llm.user_file import explain, get_attribute, import_user_file, split_name

LIBRARIES = {"math": "math_verify", "gym": "reasoning_gym"}  # slow: imported before any deadline
USUAL_NAMES = ("reward", "compute_score", "reward_func", "reward_fn", "env_step")
SOURCES = {  # for "auto": the first key that the name of the data source contains
    "judgement": "verdict",
    "gym": "gym",
    "gsm8k": "gsm8k",
    "countdown": "countdown",
    "arithmetic": "arithmetic",
    "task:guess": "exact",
    "task:calculate": "exact",
    "task:maximum": "exact",
    "task:reverse": "exact",
    "task:preference": "arithmetic",
    "task:steps": "arithmetic",
    "math": "math",
    "aime": "math",
    "amc": "math",
    "deepscaler": "math",
}
PICKLED = "function "
"""Prefix of names in requests to workers, for a Python function instead of a named reward."""
MAX_PICKLE = 64 << 20  # bytes: each worker gets a copy


def resolve_reward(name: str, source: str, columns: dict[str, Any]) -> str:
    """Return the reward of a row: `name`, or for "auto" the reward that fits the row's data source.

    Raises:
        RewardLoadError: no built-in reward fits.
    """
    if name != "auto":
        return name
    if isinstance(columns.get("metadata"), dict) and "source_dataset" in columns["metadata"]:
        return "gym"
    for key, reward in SOURCES.items():
        if key in source.lower():
            return reward
    raise RewardLoadError(
        f'--reward.name auto knows no reward for the data source "{source}" (it knows {", ".join(SOURCES)}). '
        f"Set --reward.name to one of {', '.join(REWARDS)}, to your own file.py:function, or to none if only "
        "reward models (reward.models) or an environment give rewards."
    )


def choose_reward(config: RewardConfig, rows: Sequence[RewardSample], required: bool) -> RewardConfig:
    """Return the config with "auto" replaced by "none" if no built-in reward fits and none is required.

    Args:
        rows: at least one of each data source.
        required: rewards are needed, and only a verifier can give them.

    Raises:
        RewardLoadError: a verifier is required, but "auto" finds none.
    """
    try:
        for row in rows:
            resolve_reward(config.name, row.source, row.columns)
    except RewardLoadError:
        if required:
            raise
        return dataclasses.replace(config, name="none", shaping=())
    return config


def load_reward(name: str, config: RewardConfig, function: bytes = b"") -> AdaptedReward:
    """Return the AdaptedReward of a built-in, a service, the user's file, or of `function` (`pickled_name`).

    Raises:
        RewardLoadError: the reward cannot be loaded; the message names file, line and fix.
    """
    if function and name.startswith(PICKLED):
        return adapt(_unpickle(function), name, config)
    if name.startswith(URL):
        return service_reward(name, config)
    if name not in REWARDS:
        return adapt(_user_function(name), name, config)
    library = LIBRARIES.get(name)
    if library and importlib.util.find_spec(library) is None:
        package = library.replace("_", "-")
        raise RewardLoadError(f'reward "{name}" needs {package}: pip install "jaxrl-llm[tasks]"')
    if library:
        importlib.import_module(library)
    return adapt(REWARDS[name], name, config)


def pickled_name(function: Callable[..., Any]) -> str:
    """Return the name of a Python function in requests to workers and in messages: "function my_reward"."""
    return PICKLED + getattr(function, "__name__", type(function).__name__)


def pickle_function(function: Callable[..., Any]) -> bytes:
    """Pickle a Python function, such as one defined in a notebook, for our workers.

    Raises:
        RewardLoadError: the function cannot be pickled, or is too large; the message has reason and fix.
    """
    name = pickled_name(function)
    if not callable(function):
        raise RewardLoadError(f"the reward must be a function, not {type(function).__name__}")
    fix = (
        "Its objects are sent with it: make locks, clients, models and open files inside the function, "
        "or put it into a file and set reward.name to file.py:function."
    )
    try:
        data = _pickle_with_files(function)
    except Exception as error:  # any error of the objects that it refers to
        problem = f"{type(error).__name__}: {error}"
        raise RewardLoadError(
            f"the reward {name} cannot be sent to reward workers: {problem}. {fix}"
        ) from error
    if len(data) > MAX_PICKLE:
        raise RewardLoadError(
            f"the reward {name} carries {len(data) >> 20} MiB with it, more than the "
            f"{MAX_PICKLE >> 20} that are sent to each reward worker. {fix}"
        )
    return data


def _pickle_with_files(function: Callable[..., Any]) -> bytes:
    """Pickle a function by value, also one of __main__, so that its errors name its file."""
    import cloudpickle  # loading needs pickle alone

    reduce = cloudpickle.Pickler.dispatch_table[CodeType]

    def reduce_code(code: CodeType) -> tuple[Any, ...]:
        """Restore the file name, which cloudpickle replaces by "<dynamic-code>"."""
        make, parts = reduce(code)
        return make, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)

    table = ChainMap({CodeType: reduce_code}, cloudpickle.Pickler.dispatch_table)
    pickler, data = type("Pickler", (cloudpickle.Pickler,), {"dispatch_table": table}), io.BytesIO()
    pickler(data).dump(function)
    return data.getvalue()


def _unpickle(data: bytes) -> Callable[..., Any]:
    """Return the function that our parent process pickled."""
    try:
        return pickle.loads(data)
    except Exception as error:
        raise RewardLoadError(
            f"the reward function cannot be loaded in a worker: {explain(error)}. Its imports must be "
            "importable from a new process, or defined in the notebook itself."
        ) from error


def _user_function(name: str) -> Callable[..., Any]:
    path, function = split_name(name)
    key = "reward.name"
    try:
        module = import_user_file(path, key)
        usual = [usual for usual in USUAL_NAMES if hasattr(module, usual)]
        if function or usual:
            return get_attribute(module, function or usual[0], key)
    except UserError as error:
        raise RewardLoadError(f"{error}{torch_hint(str(error))}") from error
    functions = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
    raise RewardLoadError(
        f"--{key}: {path} has no function named {', '.join(USUAL_NAMES)}; it has "
        f"{', '.join(functions) or 'none'}. Name the one to use: {path}:{(functions or ['my_reward'])[0]}"
    )


VARIABLE = re.compile(r"\$\{(\w+)\}")
MAX_REPLY = 1 << 24  # bytes


class ServiceError(RunError):
    """The service cannot be reached, or its reply is not one score per sample."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuse redirects: urllib would turn the POST into a GET, and pass the token on."""

    def redirect_request(self, *_: Any) -> None:
        return None


def service_reward(url: str, config: RewardConfig) -> AdaptedReward:
    """Return the AdaptedReward that posts to `url`; a request may take `config.timeout` seconds.

    With `config.service_samples` 1 each sample is a request, and `config.concurrency` are in flight at once.

    Raises:
        RewardLoadError: the address names an environment variable that the worker does not have.
    """
    if missing := [name for name in VARIABLE.findall(url) if not os.environ.get(name)]:
        raise RewardLoadError(f"the environ of the workers lacks {missing[0]}, which {url} names")
    threads = ThreadPoolExecutor(config.concurrency)

    async def request(samples: list[RewardSample]) -> list[Any]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, request_scores, url, samples, config.timeout)

    return AdaptedReward(request, batched=config.service_samples > 1, abstains=True, is_async=True)


def request_scores(url: str, samples: list[RewardSample], timeout: float) -> list[Any]:
    """Return raw scores from the service, one per sample; `signatures.parse_score` validates each.

    Raises:
        ServiceError: the service cannot be reached, or its reply is not a list of one score per sample.
    """
    headers = {"Content-Type": "application/json"}
    if os.environ.get(TOKEN):
        headers["Authorization"] = f"Bearer {os.environ[TOKEN]}"
    address = VARIABLE.sub(lambda match: quote(os.environ[match[1]], safe=""), url)
    request = urllib.request.Request(address, json.dumps(request_body(samples)).encode(), headers)
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout) as response:
            body = response.read(MAX_REPLY + 1)
    except urllib.error.HTTPError as error:
        raise ServiceError(f"{url} answered {error.code} {error.reason}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ServiceError(f"{url}: {error}") from None
    return parse_scores(url, body, len(samples))


def parse_scores(url: str, body: bytes, count: int) -> list[Any]:
    """Return the `count` raw scores of a reply.

    Raises:
        ServiceError: the reply is too large, not JSON, or not `count` scores.
    """
    if len(body) > MAX_REPLY:
        raise ServiceError(f"{url}: the reply is larger than {MAX_REPLY >> 20} MiB")
    try:
        reply = strict_json(body)
    except (ValueError, RecursionError) as error:  # nested too deeply
        raise ServiceError(f"{url}: the reply is not JSON: {error}") from None
    scores = reply.get("scores", reply.get("rewards")) if isinstance(reply, dict) else reply
    if not isinstance(scores, list) or len(scores) != count:
        raise ServiceError(f'{url}: expected {{"scores": [...]}} with {count} of them, got {reply!r:.200}')
    return scores


def request_body(samples: list[RewardSample]) -> dict[str, Any]:
    """Return the body of the request, in our words and in OpenRLHF's."""
    full = [
        {
            "prompt": s.prompt,
            "messages": list(s.messages),
            "response": s.response,
            "thought": s.thought,
            "text": s.text or s.response,
            "answer": s.answer,
            "source": s.source,
            **({} if s.other is None else {"other": s.other}),
        }
        for s in samples
    ]
    return {"samples": full, **of_openrlhf(samples, "query")}
