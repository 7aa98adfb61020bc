"""A reward behind HTTP: a reward model on another machine, or any scorer that speaks JSON.

One POST carries a list of samples and gets a list of scores in their order:

    {"samples": [{"prompt": "...", "messages": [...], "response": "...", "answer": ..., "source": "..."}]}
    {"scores": [0.5, {"score": 1.0, "judged": true}, ...]}

OpenRLHF's remote reward models answer the same way to {"query", "prompts", "labels"}, which is sent too, with
{"rewards": [...]}. A token for the service comes from the environment variable JAXRL_REWARD_TOKEN, which
`reward.keep_env` must name.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards.sample import Sample
from jaxrl_llm.rewards.signatures import Scorer

TOKEN = "JAXRL_REWARD_TOKEN"
MAX_ANSWER = 1 << 24  # bytes


def scorer(url: str, timeout: float) -> Scorer:
    """The Scorer that asks the service at `url`; a request may take `timeout` seconds."""
    return Scorer(lambda samples: ask(url, samples, timeout), batched=True, abstains=True)


def ask(url: str, samples: list[Sample], timeout: float) -> list[Any]:
    """Raw scores from the service.

    Raises:
        ValueError: it cannot be reached, or its answer is not a list of one score a sample.
    """
    headers = {"Content-Type": "application/json"}
    if os.environ.get(TOKEN):
        headers["Authorization"] = f"Bearer {os.environ[TOKEN]}"
    request = urllib.request.Request(url, json.dumps(question(samples)).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            said = json.loads(answer.read(MAX_ANSWER))
    except urllib.error.HTTPError as error:
        raise UserError(f"{url} answered {error.code} {error.reason}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{url}: {error}") from None
    scores = said.get("scores", said.get("rewards")) if isinstance(said, dict) else said
    if not isinstance(scores, list) or len(scores) != len(samples):
        raise UserError(f'{url}: expected {{"scores": [...]}} with {len(samples)} of them, got {said!r:.200}')
    return scores


def question(samples: list[Sample]) -> dict[str, Any]:
    """The body of the request, in our words and in OpenRLHF's."""
    full = [
        {
            "prompt": s.prompt,
            "messages": list(s.messages),
            "response": s.response,
            "answer": s.answer,
            "source": s.source,
        }
        for s in samples
    ]
    return {
        "samples": full,
        "query": [s.prompt + s.response for s in samples],
        "prompts": [s.prompt for s in samples],
        "labels": [s.answer for s in samples],
    }
