"""What a server says that it wrote, checked in full before anything is learned from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl_llm.errors import UserError

ENDS = ("stop", "length", "abort")
ROUNDING = 1e-4  # nats above 0 that a log-prob of a certain token may be


class Answer(NamedTuple):
    """Tokens of one answer to /generate."""

    ids: list[int]
    logprobs: list[float]  # nats, at most 0
    versions: list[int]  # the policy version that wrote each
    finish: str  # one of ENDS; "abort" = broken off


def read(said: Any, label: str, versions: Mapping[str, int], vocab_size: int, most: int) -> Answer:
    """The answer, if all of it can be true.

    Args:
        said: the JSON.
        label: of the weights that the server was last seen to hold when it was asked; "" = not known.
        versions: label of weights -> policy version, of all that this run ever sent.
        most: tokens that were asked for.

    Raises:
        ValueError, TypeError, LookupError: it cannot; the server that said it is not to be trusted.
    """
    meta = said["meta_info"]
    finish = meta["finish_reason"]["type"]
    pairs = [(token, logprob) for logprob, token, *_ in meta["output_token_logprobs"]]
    ids, logprobs = [token for token, _ in pairs], [logprob for _, logprob in pairs]
    if finish not in ENDS:
        raise UserError(f"it ended by {finish!r}")
    if len(ids) > most or (not ids and finish != "abort"):
        raise UserError(f"{len(ids)} tokens where 1 to {most} were asked for")
    counts = {len(ids), len(said.get("output_ids", ids)), meta.get("completion_tokens", len(ids))}
    if len(counts) > 1 or list(said.get("output_ids", ids)) != ids:
        raise UserError(f"log-probs of {len(ids)} tokens, and other tokens or another number of them")
    for token, logprob in pairs:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise UserError(f"token {token!r} of a vocabulary of {vocab_size}")
        if not -math.inf < logprob <= ROUNDING:
            raise UserError(f"log-prob {logprob!r} of token {token}")
    return Answer(ids, logprobs, token_versions(meta, len(ids), label, versions), finish)


def token_versions(meta: Mapping, count: int, label: str, versions: Mapping[str, int]) -> list[int]:
    """The policy version that wrote each of `count` tokens.

    Raises:
        ValueError: weights that this run did not send, or older ones than the server had been given.
    """
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": count}]
    if unknown := {span["version"] for span in spans} - versions.keys():
        raise UserError(f"wrote with weights {sorted(map(str, unknown))}, which this run did not send")
    if sum(span["end"] - span["start"] for span in spans) != count:
        raise UserError(f"versions {spans} of {count} tokens")
    found = [versions[span["version"]] for span in spans for _ in range(span["start"], span["end"])]
    oldest = versions.get(label, 0)
    if min(found, default=oldest) < oldest:
        raise UserError(f"wrote with weights of version {min(found)} after {label!r} was sent")
    return found
