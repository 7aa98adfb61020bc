"""Settings of calls that the gateway refuses or does not use, so that none is left out without a word."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jaxrl_llm.envs.gateway.call import CallError
from jaxrl_llm.rollout.config import SamplingConfig

NESTED = ("text", "output_config")  # objects of several settings: text.format, text.verbosity
IDLE = {
    "cache_control", "client_metadata", "inference_geo", "metadata", "model", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "request_id", "rid", "safety_identifier",
    "service_tier", "store", "stream_options", "user",
}  # fmt: skip
"""Of accounts, storage, caches and transport: they ask for nothing of the policy."""
DECIDED = ("temperature", "top_p", "top_k", "min_p")  # by the run (`SamplingConfig`)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "include": (["message.output_text.logprobs"],),
    "logprobs": (0, 1),  # more ask for alternatives
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "seed": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "text.format": ({"type": "text"},),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
    "truncation": ("disabled",),
}
"""Values that change nothing; of other settings false, 0 and empty ones."""

_FORMAT = "the policy is not shown this format, and its text is not forced into one; ask for it in a message"
_BIAS = "the run trains the policy's own choice of tokens, so no token is favoured or banned"
_STORED = "nothing is stored here; send the whole conversation"
_GONE = "is OpenAI's older form; send tools and tool_choice"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("response_format", "text.format", "output_format", "output_config.format"), _FORMAT),
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice"), _FORMAT),
    **dict.fromkeys(("guided_grammar", "json_schema", "regex", "ebnf", "structural_tag"), _FORMAT),
    **dict.fromkeys(("logit_bias", "allowed_token_ids", "bad_words"), _BIAS),
    **dict.fromkeys(("previous_response_id", "conversation", "prompt"), _STORED),
    **dict.fromkeys(("functions", "function_call"), _GONE),
    "audio": "the policy writes text alone",
    "background": "a reply comes with its call; send the call without it",
    "echo": "the prompt is not given back",
    "mcp_servers": "no server runs here; call it in the program, and show the policy a tool",
    "modalities": "the policy writes text alone",
    "suffix": "the policy continues a text, and fills no gap",
    "use_beam_search": "each token is sampled",
    "web_search_options": "no search runs here; call it in the program, and show the policy a tool",
}
"""Setting -> why a call with it is refused: a reply that ignores the setting would not be what was asked."""


def unused_settings(body: dict[str, Any], reads: Collection[str], sampling: SamplingConfig) -> dict[str, Any]:
    """Return the settings of a call that are not used, although they ask for something.

    Args:
        reads: names that the protocol reads.
        sampling: of the run.

    Raises:
        CallError: a setting is refused (400).
    """
    nested = {outer: body[outer] for outer in NESTED if isinstance(body.get(outer), dict)}
    inner = {f"{outer}.{name}": value for outer, held in nested.items() for name, value in held.items()}
    tools = body["tools"] if isinstance(body.get("tools"), list) else []
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)]
    if any(isinstance(function, dict) and function.get("strict") for function in functions):
        inner["tools.strict"] = True
    unused = {}
    for name, value in [*body.items(), *inner.items()]:
        if name in reads or name in IDLE or name in nested or _is_neutral(name, value, sampling):
            continue
        if reason := REFUSED.get(name):
            raise CallError(400, f"{name}: {reason}", "unsupported_parameter", param=name)
        unused[name] = value
    return unused


def _is_neutral(name: str, value: Any, sampling: SamplingConfig) -> bool:
    if value in (None, "", [], {}):
        return True
    if name in DECIDED:
        own = getattr(sampling, name)
        return value == own or (value == -1 and not own)  # vLLM and SGLang write -1 for all tokens
    return value in NEUTRAL[name] if name in NEUTRAL else not value
