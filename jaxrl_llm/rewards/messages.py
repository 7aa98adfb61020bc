"""Messages between the trainer and a reward worker.

To the worker: pickles over a private socket. From the worker, which runs the user's code: lines of JSON,
which `parse_reply` validates. A request is answered by one "loaded" or "broken", then by one "scored" or
"failed" per sample (for a batched reward: for all samples at once), in any order if several samples are
scored concurrently.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.config import MAX_CHUNK, MAX_SCORE, RewardConfig
from jaxrl_llm.rewards.sample import RewardResult, RewardSample

MAX_LINE = 1 << 20  # bytes of a reply; one to 64 samples takes a quarter of that at most
MAX_REASON = 300  # characters of an error message
MAX_BROKEN = 4000  # characters of the message of a reward that cannot be loaded


class InvalidWorkerReplyError(ValueError):
    """A line that no healthy worker writes."""


@dataclass(frozen=True)
class Setup:
    """First message to a worker."""

    config: RewardConfig
    function: bytes  # of load.pickle_function; b"" = none


@dataclass(frozen=True)
class ScoreRequest:
    """Samples to score with one reward; no samples = load it only."""

    id: int
    name: str  # of a reward, as `load.load_reward` takes it
    samples: Sequence[RewardSample]


@dataclass
class Chunk:
    """Samples sent to a worker in one request, as the trainer records it; scored ones are removed."""

    name: str  # of the reward
    indices: list[int]  # of the samples without a result
    id: int = 0  # of the request that it was last sent with
    loaded: bool = False  # the reward is loaded
    batched: bool = False  # the reward takes them as one list
    concurrency: int = 1  # of them that are scored at once
    is_retry: bool = False


@dataclass(frozen=True)
class Loaded:
    """The reward is loaded."""

    batched: bool
    concurrency: int = 1  # samples that the worker scores at once, starting them in order


@dataclass(frozen=True)
class Broken:
    """The reward cannot be loaded."""

    text: str


@dataclass(frozen=True)
class Failed:
    """A call of the reward raised."""

    error: str  # type of the exception; "" = it took too long
    reason: str
    offset: int = 0  # index among the samples without a reply


@dataclass(frozen=True)
class Scored:
    """Results of one call, in order."""

    results: tuple[RewardResult, ...]
    offset: int = 0  # index of the first sample among the samples without a reply


Reply = Loaded | Broken | Failed | Scored


def encode_reply(request_id: int, reply: Reply) -> bytes:
    """Return a reply as a line of JSON."""
    body: dict[str, Any] = {"id": request_id, "kind": type(reply).__name__.lower()}
    match reply:
        case Loaded(batched, concurrency):
            body |= {"batched": batched, "concurrency": concurrency}
        case Broken(text):
            body["text"] = text[-MAX_BROKEN:]
        case Failed(error, reason, offset):
            body |= {"error": error[:MAX_REASON], "reason": reason[:MAX_REASON], "offset": offset}
        case Scored(results, offset):
            body |= {"results": [_encode_result(result) for result in results], "offset": offset}
    return json.dumps(body).encode() + b"\n"


def _encode_result(result: RewardResult) -> list[Any]:
    score = result.score if result.valid else None
    reason, error = result.reason[:MAX_REASON], result.error[:MAX_REASON]
    return [score, int(result.outcome), reason, error, result.seconds, list(result.components)]


def parse_reply(line: bytes, expected: Chunk | None, config: RewardConfig) -> Reply:
    """Parse a line from a worker.

    Args:
        expected: the request that the line must answer; None = no request is open.

    Raises:
        InvalidWorkerReplyError: the line is not a valid reply to the request.
    """
    if expected is None:
        raise InvalidWorkerReplyError("a reply to no request")
    if len(line) > MAX_LINE:
        raise InvalidWorkerReplyError(f"a reply of more than {MAX_LINE >> 20} MiB")
    try:
        body = strict_json(line)
    except (ValueError, RecursionError):
        raise InvalidWorkerReplyError("a reply that is not JSON") from None
    # The reply must belong to the request, and its kind must fit the request's state.
    if not isinstance(body, dict) or type(body.get("id")) is not int or body["id"] != expected.id:
        raise InvalidWorkerReplyError("a reply to another request")
    match body:
        case {"kind": "loaded", "batched": bool(batched), "concurrency": int(count)} if not expected.loaded:
            if not 1 <= count <= MAX_CHUNK:
                raise InvalidWorkerReplyError(f"a reply of {count} samples at once")
            return Loaded(batched, int(count))
        case {"kind": "broken", "text": str(text)} if not expected.loaded:
            return Broken(clean_text(text, MAX_BROKEN))
        case {"kind": "failed", "error": str(error), "reason": str(reason)} if _scoring(expected):
            return Failed(clean_text(error), clean_text(reason), _offset(body, expected))
        case {"kind": "scored", "results": list(results)} if _scoring(expected):
            count = len(expected.indices) if expected.batched else 1
            if len(results) != count:
                raise InvalidWorkerReplyError(f"a reply with {len(results)} results instead of {count}")
            parsed = tuple(_parse_result(result, config) for result in results)
            return Scored(parsed, _offset(body, expected))
    raise InvalidWorkerReplyError("a reply of no known kind, or out of order")


def _offset(body: dict[str, Any], expected: Chunk) -> int:
    offset = body.get("offset")
    if type(offset) is not int or not 0 <= offset < (1 if expected.batched else len(expected.indices)):
        raise InvalidWorkerReplyError("a reply for a sample that was not sent")
    return offset


def _scoring(expected: Chunk) -> bool:
    return expected.loaded and len(expected.indices) > 0


def _parse_result(raw: Any, config: RewardConfig) -> RewardResult:
    """Return [score, outcome, reason, error, seconds, components] as a result."""
    if not isinstance(raw, list) or len(raw) != 6:
        raise InvalidWorkerReplyError("a result that is not a list of six")
    score, outcome, reason, error, seconds, components = raw
    if type(outcome) is not int or outcome not in list(Outcome):
        raise InvalidWorkerReplyError("a result without an outcome")
    if not isinstance(reason, str) or not isinstance(error, str) or not isinstance(components, list):
        raise InvalidWorkerReplyError("a result with wrong types")
    if len(components) != (0 if score is None else len(config.weights)):
        raise InvalidWorkerReplyError(f"a result with {len(components)} components")
    values = tuple(_number(value, MAX_SCORE) for value in components)
    largest = sum(map(abs, config.weights)) * MAX_SCORE
    total = math.nan if score is None else _number(score, largest)
    if (score is None) != (outcome == Outcome.FAILED):
        raise InvalidWorkerReplyError("a result that failed with a score, or has none and did not fail")
    spent = _number(seconds, 1e9)
    return RewardResult(
        total,
        Outcome(outcome),
        clean_text(reason),
        max(spent, 0.0),
        components=values,
        error=clean_text(error),
    )


def _number(value: Any, largest: float) -> float:
    """Return a finite number of at most `largest` in size; bools are refused."""
    if type(value) not in (int, float) or not abs(value) <= largest * (1 + 1e-9):
        raise InvalidWorkerReplyError("a number that is out of range, or is none")
    return float(value)


def clean_text(text: str, limit: int = MAX_REASON) -> str:
    """Return text that can be printed and written as UTF-8: no control characters, no lone surrogates."""
    text = text[:limit]
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def strict_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError for NaN and infinities, too."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
