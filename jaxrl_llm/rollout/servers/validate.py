"""Replies to /generate, checked in full before anything is learned from them."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from reprlib import repr as short  # of nested and long values, too
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt

from jaxrl_llm.bridge.servers import Json
from jaxrl_llm.errors import RefusedError
from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.experts.router import route_spec

FINISHES = ("stop", "length", "abort")
ROUNDING = 1e-4  # nats above 0 that the log-prob of a certain token may be
MAX_ROUTE_BYTES = 2**14
"""Of a token: 8 experts in each of 61 layers (DeepSeek-V3) take 2,603."""
LOWEST = -104.0  # nats: exp of less is 0 in float32, and a token of probability 0 is never drawn


class Generated(NamedTuple):
    """Tokens of one reply to /generate."""

    ids: list[int]
    logprobs: list[float]  # nats, in [LOWEST, ROUNDING]
    versions: list[int]  # the policy version that generated each
    finish: str  # one of FINISHES; "abort" = broken off
    routes: Sequence[np.ndarray] = ()  # of `routed_experts`, where the request asks for them


def max_reply_bytes(body: Json) -> int:
    """Return how long a reply to this request can be: log-prob, id and text of each token, and the rest."""
    new = body["sampling_params"]["max_new_tokens"]
    routes = MAX_ROUTE_BYTES * (len(body["input_ids"]) + new) * bool(body.get("return_routed_experts"))
    return 2**20 + 1024 * new + routes


def read_generated(
    reply: Json,
    body: Json,
    label: str,
    versions: Mapping[str, int],
    *,
    model: TransformerConfig,
    base: str = "",
) -> Generated:
    """Return the tokens of a valid reply.

    Args:
        body: of the request.
        label: of the last weights that were sent to the server before the request; "" = not known.
        versions: label of weights -> policy version, for all weights that this run sent.
        base: label of the base on every server, if the request names adapters: then all tokens have the
            adapters' version.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: the reply is invalid; the server is left out.
            RefusedError: the server ended the response before the length that was asked for.
    """
    if base:
        label, versions = base, {base: versions[body["lora_path"]]}
    meta, max_tokens = reply["meta_info"], body["sampling_params"]["max_new_tokens"]
    _check_request(meta, body)
    finish = meta["finish_reason"]["type"]
    pairs = [(token, logprob) for logprob, token, *_ in meta["output_token_logprobs"]]
    # The number of tokens, and how the response ended.
    ids, logprobs = [token for token, _ in pairs], [logprob for _, logprob in pairs]
    if finish not in FINISHES:
        raise ValueError(f"it ended by {short(finish)}")
    if len(ids) > max_tokens or (not ids and finish != "abort"):
        raise ValueError(f"{len(ids)} tokens where 1 to {max_tokens} were asked for")
    counts = {len(ids), len(reply.get("output_ids", ids)), meta.get("completion_tokens", len(ids))}
    if len(counts) > 1 or list(reply.get("output_ids", ids)) != ids:
        raise ValueError(f"log-probs of {len(ids)} tokens, and other tokens or another number of them")
    if finish == "length" and len(ids) < max_tokens:  # healthy, but with too little memory
        raise RefusedError(
            f"it ended a response for length after {len(ids)} of {max_tokens} tokens, with "
            f"{len(body['input_ids'])} before them: they do not fit its --context-length or "
            "--max-total-tokens (--max-model-len of vLLM). Start it with more, "
            "or shorten --max_response_tokens by 2 or more"
        )
    # Each token and its log-prob.
    for token, logprob in pairs:
        if type(token) is not int or not 0 <= token < model.vocab_size:
            raise ValueError(f"token {short(token)} of a vocabulary of {model.vocab_size}")
        if type(logprob) not in (int, float) or not LOWEST <= logprob <= ROUNDING:
            raise ValueError(f"log-prob {short(logprob)} of token {token}")
    routes: Sequence[np.ndarray] = ()  # routes of an interrupted response may come with its next part
    if body.get("return_routed_experts") and (finish != "abort" or meta.get("routed_experts")):
        routes = routed_experts(meta, body, len(ids), model)
    return Generated(ids, logprobs, token_versions(meta, len(ids), label, versions), finish, routes=routes)


def routed_experts(
    meta: Mapping[str, Any], body: Json, count: int, model: TransformerConfig
) -> UInt[np.ndarray, "N L K"]:
    """Return the routes of tokens of prompt and response (`route_spec`), ascending numbers.

    SGLang sends routes as base64 of int32 (`--enable-return-routed-experts`), for all tokens from
    `routed_experts_start_len` on except the last, which no layer has read yet, and for all layers; routes of
    layers without experts have no meaning.

    Args:
        meta: `meta_info` of a reply that `read_generated` accepts.
        body: of the request, with "return_routed_experts": True.
        count: tokens of the reply.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: it is not valid.
    """
    moe, num_tokens = model.moe, len(body["input_ids"]) + count - 1 - body["routed_experts_start_len"]
    if meta.get("routed_experts") is None:
        raise ValueError("no experts: a server without --enable-return-routed-experts, or an old router")
    shape = num_tokens, model.num_layers, moe.experts_per_token
    data = base64.b64decode(meta["routed_experts"], validate=True)
    if len(data) != 4 * math.prod(shape):
        raise ValueError(f"{len(data)} bytes of experts, where {shape} tokens, layers and choices are int32")
    experts = np.sort(np.frombuffer(data, "<i4").reshape(shape)[:, moe.dense_layers :], axis=-1)
    if experts.size and not 0 <= experts.min() <= experts.max() < moe.num_experts:
        raise ValueError(f"experts {experts.min()} to {experts.max()} of {moe.num_experts}")
    if (experts[..., 1:] == experts[..., :-1]).any():
        raise ValueError("an expert that a token chose twice")
    return experts.astype(route_spec(model).dtype)


def _check_request(meta: Mapping[str, Any], body: Json) -> None:
    """Refuse a reply to another request; replies aborted in the queue have no `prompt_tokens`.

    Raises:
        ValueError: the id or the number of prompt tokens differs.
    """
    for name, sent in (("id", body["rid"]), ("prompt_tokens", len(body["input_ids"]))):
        if name in meta and meta[name] != sent:
            raise ValueError(f"the reply to another request: {name} is {short(meta[name])}, not {sent!r}")


def token_versions(meta: Mapping, count: int, label: str, versions: Mapping[str, int]) -> list[int]:
    """Return the policy version that generated each of `count` tokens.

    Raises:
        ValueError: weights that this run did not send, or older ones than the server had been given; spans
            that are not `count` tokens one after the other, from older to newer.
    """
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": count}]
    result: list[int] = []
    for span in spans:
        version, start, end = span["version"], span["start"], span["end"]
        if version not in versions:
            raise ValueError(f"generated with weights {short(version)}, which this run did not send")
        if (type(start), type(end)) != (int, int) or not len(result) == start <= end <= count:
            raise ValueError(f"versions {short(spans)} of {count} tokens")
        result += [versions[version]] * (end - start)
    oldest = versions.get(label, 0)
    if len(result) != count or result != sorted(result):
        raise ValueError(f"versions {short(spans)} of {count} tokens")
    if min(result, default=oldest) < oldest:
        raise ValueError(f"generated with weights of version {min(result)} after {label!r} was sent")
    return result
