"""Replies to /generate, checked in full before anything is learned from them."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short  # of nested and long values, too
from typing import Any, NamedTuple

from jaxrl_llm.bridge.servers import Json

FINISHES = ("stop", "length", "abort")
ROUNDING = 1e-4  # nats above 0 that the log-prob of a certain token may be
LOWEST = -104.0  # nats: exp of less is 0 in float32, and what has probability 0 is never drawn


class Generated(NamedTuple):
    """Tokens of one reply to /generate."""

    ids: list[int]
    logprobs: list[float]  # nats, in [LOWEST, 0]
    versions: list[int]  # the policy version that generated each
    finish: str  # one of FINISHES; "abort" = broken off


def max_reply_bytes(body: Json) -> int:
    """Return how long a reply to this request can be: log-prob, id and text of each token, and the rest."""
    return 2**20 + 1024 * body["sampling_params"]["max_new_tokens"]


def read_generated(
    reply: Json, body: Json, label: str, versions: Mapping[str, int], vocab_size: int, base: str = ""
) -> Generated:
    """Return the tokens of a valid reply.

    Args:
        body: of the request.
        label: of the last weights that were sent to the server before the request; "" = not known.
        versions: label of weights -> policy version, of all that this run ever sent.
        base: label of the base that every server holds, where the request names adapters: then all tokens
            have their version.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: it is not valid; the server is left out.
    """
    if base:
        label, versions = base, {base: versions[body["lora_path"]]}
    meta, max_tokens = reply["meta_info"], body["sampling_params"]["max_new_tokens"]
    _check_request(meta, body)
    finish = meta["finish_reason"]["type"]
    pairs = [(token, logprob) for logprob, token, *_ in meta["output_token_logprobs"]]
    ids, logprobs = [token for token, _ in pairs], [logprob for _, logprob in pairs]
    if finish not in FINISHES:
        raise ValueError(f"it ended by {short(finish)}")
    if len(ids) > max_tokens or (not ids and finish != "abort"):
        raise ValueError(f"{len(ids)} tokens where 1 to {max_tokens} were asked for")
    counts = {len(ids), len(reply.get("output_ids", ids)), meta.get("completion_tokens", len(ids))}
    if len(counts) > 1 or list(reply.get("output_ids", ids)) != ids:
        raise ValueError(f"log-probs of {len(ids)} tokens, and other tokens or another number of them")
    for token, logprob in pairs:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(f"token {short(token)} of a vocabulary of {vocab_size}")
        if type(logprob) not in (int, float) or not LOWEST <= logprob <= ROUNDING:
            raise ValueError(f"log-prob {short(logprob)} of token {token}")
    return Generated(ids, logprobs, token_versions(meta, len(ids), label, versions), finish)


def _check_request(meta: Mapping[str, Any], body: Json) -> None:
    """Refuse a reply to another request; what was aborted in the queue comes without `prompt_tokens`.

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
            raise ValueError(f"wrote with weights {short(version)}, which this run did not send")
        if (type(start), type(end)) != (int, int) or not len(result) == start <= end <= count:
            raise ValueError(f"versions {short(spans)} of {count} tokens")
        result += [versions[version]] * (end - start)
    oldest = versions.get(label, 0)
    if len(result) != count or result != sorted(result):
        raise ValueError(f"versions {short(spans)} of {count} tokens")
    if min(result, default=oldest) < oldest:
        raise ValueError(f"wrote with weights of version {min(result)} after {label!r} was sent")
    return result
