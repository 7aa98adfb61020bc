"""Checks of requests and their sampling: bad input is refused before any work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl_llm import ranges
from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.rollout.config import EIGHT_BITS, RolloutConfig, SamplingConfig
from jaxrl_llm.rollout.engine import Request


def check_requests(
    requests: Sequence[Request], sampling: SamplingConfig, model: TransformerConfig, tokenizer: Any
) -> None:
    """Refuse requests that no engine can serve.

    Raises:
        UserError: an impossible sampling setting or prompt, with its `prompt_index` and the fix.
    """
    check_sampling(sampling, model, tokenizer)
    for request in requests:
        if problem := _request_problem(request, model):
            raise UserError(f"prompt {request.prompt_index}: {problem}")


def check_sampling(sampling: SamplingConfig, model: TransformerConfig, tokenizer: Any) -> None:
    """Refuse a sampling setting that no engine can follow for this model.

    Raises:
        ConfigError: names the field and the fix.
    """
    for field, problem in ranges.problems(sampling):
        raise ConfigError(f"sampling.{field} {problem}")
    if sampling.stop and tokenizer is None:
        raise ConfigError("sampling.stop needs a tokenizer: give one to the engine, or use stop_tokens.")
    for problem in token_problems(sampling, model):
        raise ConfigError(f"sampling.{problem}")


def token_problems(sampling: SamplingConfig, model: TransformerConfig) -> Iterator[str]:
    """Yield the problems of token ids that end responses of this model, each starting with the field's
    name."""
    for token in sampling.stop_tokens:
        if token >= model.vocab_size:
            yield (
                f"stop_tokens has {token}: the model's vocabulary has {model.vocab_size} tokens, "
                f"0 to {model.vocab_size - 1}. Set one of these."
            )


def _request_problem(request: Request, model: TransformerConfig) -> str:
    ids, max_tokens = np.asarray(request.prompt_ids), request.max_tokens
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        return f"token ids are a list of integers, not {ids.dtype} of shape {ids.shape}."
    if not ids.size:
        return "it has no tokens; a prompt needs at least one (a beginning-of-sequence token will do)."
    if ids.min() < 0 or ids.max() >= model.vocab_size:
        wrong = ids[(ids < 0) | (ids >= model.vocab_size)][0]
        return (
            f"token id {wrong} is outside the model's vocabulary of {model.vocab_size} tokens. Does the "
            "tokenizer belong to this model?"
        )
    if max_tokens < 1 or request.num_responses < 1:
        return f"num_responses={request.num_responses} and max_tokens={max_tokens}: both must be at least 1."
    if ids.size + max_tokens > model.max_position:
        return (
            f"{ids.size} prompt tokens + max_tokens={max_tokens} exceed the model's {model.max_position} "
            f"positions; shorten one of them{dynamic_rope_hint(model.rope.scaling)}"
        )
    return ""


def dynamic_rope_hint(scaling: str) -> str:
    """Return why "dynamic" RoPE ends at max_position, up to which it is the default one; "." for others.

    Beyond it the frequencies of all keys depend on the final length of the sequence, which the rollout does
    not know when it caches them: its log-probs would not be the trainer's.
    """
    if scaling != "dynamic":
        return "."
    return (
        '. "dynamic" RoPE would go on, but rotates all keys again with every token, and cached keys stay: '
        'for longer text set rope scaling to "yarn" in the config.json of the model, or --model.yarn_factor.'
    )


def unpaged(model: TransformerConfig) -> str:
    """Return what keeps the cache of a model out of pages; "" = nothing."""
    if model.global_heads:
        return "the model's layers have heads of two sizes, and pages hold heads of one"
    return ""


def ring_problem(config: RolloutConfig, model: TransformerConfig) -> str:
    """Return why a model without pages, or with ALiBi or an indexer, cannot be decoded with these settings;
    "" = it can."""
    kept = "the positions that ALiBi keeps in keys" if model.alibi else "the keys of the indexer"
    if (model.alibi or model.index) and config.cache_dtype in EIGHT_BITS:
        return (
            f"rollout.cache_dtype {config.cache_dtype} rounds {kept}. Set "
            "a --rollout.cache_dtype of 16 or 32 bits."
        )
    needs = {
        "cache paged": config.cache == "paged",
        f"cache_dtype {config.cache_dtype}": config.cache_dtype in EIGHT_BITS,
        f"draft_tokens {config.draft_tokens}": config.draft_tokens > 0,
    }
    setting = next((name for name, on in needs.items() if on), "")
    if not setting or not (reason := unpaged(model)):
        return ""
    return (
        f"rollout.{setting} needs pages, and {reason}. "
        "Set --rollout.cache auto, --rollout.draft_tokens 0 and a --rollout.cache_dtype of 16 or 32 bits."
    )
