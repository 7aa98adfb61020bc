"""A reward behind HTTP: a reward model on another machine, or any other that takes and returns JSON.

One POST carries a list of samples and gets a list of scores in their order:

    {"samples": [{"prompt": "...", "messages": [...], "response": "...", "answer": ..., "source": "...",
                  "thought": "...", "text": "..."}]}
    {"scores": [0.5, {"score": 1.0, "judged": true}, ...]}

OpenRLHF's remote reward models answer the same way to {"query", "prompts", "labels"}, which is sent too, with
{"rewards": [...]}. A token for the service comes from the environment variable JAXRL_REWARD_TOKEN, or is a
parameter of the address: "https://host/score?api_key=${JUDGE_KEY}". `reward.keep_env` must name the variable.
A request has up to `reward.service_samples` samples. Samples for a pairwise judge have "other", too: the
response to compare with. All this runs in a reward worker: a broken service costs samples, not the run.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn
from urllib.parse import quote

from jaxrl_llm.errors import RunError
from jaxrl_llm.rewards.config import TOKEN, RewardConfig
from jaxrl_llm.rewards.sample import RewardLoadError, RewardSample
from jaxrl_llm.rewards.signatures import AdaptedReward

VARIABLE = re.compile(r"\$\{(\w+)\}")
MAX_REPLY = 1 << 24  # bytes


class ServiceError(RunError):
    """The service cannot be reached, or its reply is not one score a sample."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error: urllib would turn the POST into a GET, and pass the token on."""

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
    if config.service_samples > 1:
        take = lambda samples: request_scores(url, samples, config.timeout)
        return AdaptedReward(take, batched=True, abstains=True)
    threads = ThreadPoolExecutor(config.concurrency)

    async def request(samples: list[RewardSample]) -> list[Any]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, request_scores, url, samples, config.timeout)

    return AdaptedReward(request, abstains=True, is_async=True)


def request_scores(url: str, samples: list[RewardSample], timeout: float) -> list[Any]:
    """Return raw scores from the service, one a sample; `signatures.parse_score` validates each.

    Raises:
        ServiceError: it cannot be reached, or its reply is not a list of one score a sample.
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
        ServiceError: it is too large, no JSON, or not `count` scores.
    """
    if len(body) > MAX_REPLY:
        raise ServiceError(f"{url}: the reply is larger than {MAX_REPLY >> 20} MiB")
    try:
        reply = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # nested too deeply
        raise ServiceError(f"{url}: the reply is no JSON: {error}") from None
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
    return {
        "samples": full,
        "query": [s.prompt + s.response for s in samples],
        "prompts": [s.prompt for s in samples],
        "labels": [s.answer for s in samples],
    }


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
