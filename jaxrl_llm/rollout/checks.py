"""Requests and settings that no engine can do are refused before any work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.rollout.engine import Request, SamplingConfig
from jaxrl_llm.rollout.native.shapes import most_pages


def check_requests(
    requests: Sequence[Request], sampling: SamplingConfig, model: TransformerConfig, tokenizer: Any
) -> None:
    """Refuse what no engine can do.

    Raises:
        ValueError: an impossible request or sampling setting, with the fix.
    """
    if sampling.stop and tokenizer is None:
        raise UserError("sampling.stop needs a tokenizer: give one to the engine, or use stop_tokens")
    ranges = {
        "temperature": (sampling.temperature >= 0, "0 (greedy) or more"),
        "top_k": (sampling.top_k >= 0, "0 (all tokens) or more"),
        "top_p": (0 < sampling.top_p <= 1, "above 0 and at most 1 (all tokens)"),
        "min_p": (0 <= sampling.min_p <= 1, "between 0 (all tokens) and 1"),
    }
    for name, (valid, wanted) in ranges.items():
        if not valid:
            raise UserError(f"sampling.{name} must be {wanted}, not {getattr(sampling, name)}")
    for i, request in enumerate(requests):
        length = len(request.prompt_ids)
        if length == 0 or request.max_tokens < 1:
            raise UserError(
                f"request {i}: a prompt of {length} tokens and max_tokens={request.max_tokens}; "
                "both must be at least 1"
            )
        if length + request.max_tokens > model.max_position:
            raise UserError(
                f"request {i}: {length} prompt tokens + max_tokens={request.max_tokens} exceed the "
                f"model's {model.max_position} positions; shorten one of them{_why_not(model)}"
            )


def check_pages(requests: Sequence[Request], page: int, pages: int) -> None:
    """Refuse a response that the paged cache cannot hold even alone.

    Raises:
        ValueError: which, and how many pages it takes.
    """
    for i, request in enumerate(requests):
        length = len(request.prompt_ids)
        needed = most_pages(length + request.max_tokens, page)
        if needed >= pages:
            raise UserError(
                f"request {i}: {length} prompt tokens + max_tokens={request.max_tokens} take {needed} pages "
                f"of {page} tokens, and a device has {pages - 1}: shorten it, raise rollout.pages, take a "
                "rollout.cache_dtype of fewer bits, or divide the heads over more devices (mesh.tensor)"
            )


def not_strict(rollout: RolloutConfig, dtype: str, devices: int) -> Iterator[str]:
    """What makes the rollout's log-probs others than those of a trainer that computes in `dtype`."""
    if devices > 1:
        yield (
            f"--strict works on one device, and the mesh has {devices}: what is divided is summed in another "
            "order. Show the run one device (XLA_FLAGS, CUDA_VISIBLE_DEVICES) and leave --mesh as it is."
        )
    if rollout.engine != "native":
        yield (
            f"--strict and --rollout.engine {rollout.engine} exclude each other: servers sum in an order of "
            "their own. Set --rollout.engine native."
        )
    for name in ("dtype", "cache_dtype"):
        found = getattr(rollout, name) or rollout.dtype
        if found != dtype:
            yield (
                f"--strict: --rollout.{name} is {found}, --model.dtype is {dtype}, so the two would round "
                f"differently. Set --rollout.{name} {dtype}."
            )
    if rollout.cache == "paged":
        yield "--strict and --rollout.cache paged exclude each other: pages are summed in another order."
    if rollout.weight_noise:
        yield "--strict and --rollout.weight_noise exclude each other: noise is there to make a mismatch."


def _why_not(model: TransformerConfig) -> str:
    """Beyond max_position, "dynamic" RoPE turns all keys of a trajectory by its final length, which rollout
    does not know when it writes them: its log-probs would not be the trainer's."""
    if model.rope.scaling != "dynamic":
        return ""
    return (
        '. "dynamic" RoPE would go on, but turns the keys anew with every token, and cached keys stay: '
        'for longer text set rope scaling to "yarn" in the config.json of the model'
    )
