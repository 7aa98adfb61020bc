"""Requests and sampling settings that no engine can do are refused before any work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.rollout.engine import Request, SamplingConfig


def check_requests(
    requests: Sequence[Request], sampling: SamplingConfig, model: TransformerConfig, tokenizer: Any
) -> None:
    """Refuse what no engine can do.

    Raises:
        ValueError: an impossible request or sampling setting, with the fix.
    """
    if sampling.stop and tokenizer is None:
        raise ValueError("sampling.stop needs a tokenizer: give one to the engine, or use stop_tokens")
    ranges = {
        "temperature": (sampling.temperature >= 0, "0 (greedy) or more"),
        "top_k": (sampling.top_k >= 0, "0 (all tokens) or more"),
        "top_p": (0 < sampling.top_p <= 1, "above 0 and at most 1 (all tokens)"),
        "min_p": (0 <= sampling.min_p <= 1, "between 0 (all tokens) and 1"),
    }
    for name, (valid, wanted) in ranges.items():
        if not valid:
            raise ValueError(f"sampling.{name} must be {wanted}, not {getattr(sampling, name)}")
    for i, request in enumerate(requests):
        length = len(request.prompt_ids)
        if length == 0 or request.max_tokens < 1:
            raise ValueError(
                f"request {i}: a prompt of {length} tokens and max_tokens={request.max_tokens}; "
                "both must be at least 1"
            )
        if length + request.max_tokens > model.max_position:
            raise ValueError(
                f"request {i}: {length} prompt tokens + max_tokens={request.max_tokens} exceed the "
                f"model's {model.max_position} positions; shorten one of them{_why_not(model)}"
            )


def _why_not(model: TransformerConfig) -> str:
    """Beyond max_position, "dynamic" RoPE turns all keys of a trajectory by its final length, which rollout
    does not know when it writes them: its log-probs would not be the trainer's."""
    if model.rope.scaling != "dynamic":
        return ""
    return (
        '. "dynamic" RoPE would go on, but turns the keys anew with every token, and cached keys stay: '
        'for longer text set rope scaling to "yarn" in the config.json of the model'
    )
