"""Lines of a reward worker: none gives a false score, or raises other errors than InvalidWorkerReplyError."""

import json
import math
import random

import pytest

from jaxrl_llm.outcome import Outcome
from jaxrl_llm.rewards.config import RewardConfig
from jaxrl_llm.rewards.load import ServiceError, parse_scores
from jaxrl_llm.rewards.messages import (
    MAX_LINE,
    Broken,
    Chunk,
    Failed,
    InvalidWorkerReplyError,
    Loaded,
    Scored,
    encode_reply,
    parse_reply,
)
from jaxrl_llm.rewards.sample import RewardResult

CONFIG = RewardConfig(name="exact", weight=2.0, shaping=(("format", -0.5),))
GOOD = RewardResult(1.75, Outcome.CORRECT, "", 0.25, components=(1.0, 0.5))
BAD = RewardResult(math.nan, Outcome.FAILED, "ValueError: \u00e9", 0.0, components=(), error="ValueError")
NEW = Chunk("exact", [0, 1], id=7)
ONE = Chunk("exact", [0, 1], id=7, loaded=True)
BOTH = Chunk("exact", [0, 1], id=7, loaded=True, batched=True)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Loaded(True), NEW),
        (Broken("rewards.py:1: SyntaxError"), NEW),
        (Failed("KeyError", "KeyError: 'a'"), ONE),
        (Scored((GOOD,)), ONE),
        (Scored((GOOD, GOOD)), BOTH),
        (Loaded(False, 64), NEW),
        (Failed("", "took longer than 1 s", offset=1), ONE),
        (Scored((GOOD,), offset=1), ONE),
    ],
)
def test_a_reply_is_read_as_it_was_written(reply, expected):
    assert parse_reply(encode_reply(7, reply), expected, CONFIG) == reply


def test_a_failed_result_has_no_score():
    (result,) = parse_reply(encode_reply(7, Scored((BAD,))), ONE, CONFIG).results
    assert math.isnan(result.score) and result.reason == BAD.reason and result.error == "ValueError"


def scored(score=1.75, outcome=0, reason="", error="", *, seconds=0.25, components=(1.0, 0.5), **body):
    result = [score, outcome, reason, error, seconds, list(components)]
    return json.dumps({"id": 7, "kind": "scored", "results": [result], "offset": 0, **body}).encode()


@pytest.mark.parametrize(
    "line",
    [
        scored(score=True),
        scored(score="1"),
        scored(score=math.nan),
        scored(score=math.inf),
        scored(score=10**4000),
        scored(score=2.6e6),  # weights 2 and -0.5 of scores up to 1e6 make 2.5e6 at most
        scored(score=None),
        scored(outcome=4),
        scored(outcome=True),
        scored(outcome=0.0),
        scored(outcome=3),  # failed, with a score
        scored(outcome=[]),
        scored(reason=7),
        scored(seconds=math.nan),
        scored(seconds="x"),
        scored(components=(1.0,)),
        scored(components=(1.0, math.nan)),
        scored(components=(1.0, 1e7)),
        scored(components=(1.0, None)),
        scored(results=[]),
        scored(results=[[1.75, 0, "", "", 0.25, [1.0, 0.5]]] * 2),
        scored(results={"0": 1}),
        scored(results=[[[[]]]]),
        scored(offset=2),
        scored(offset=-1),
        scored(offset=True),
        scored(offset=None),
        scored(id=8),
        scored(id=7.0),
        scored(id=True),
        scored(kind="loaded", batched=True, concurrency=1),  # a second time
        scored(kind="broken", text=""),
        scored(kind="stop"),
        b"",
        b"null",
        b"[1, 2]",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"id": 7, "kind": "scored", "results": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b"9" * 5000,
        b'{"id": 7, "pad": "' + b"x" * (10 << 20) + b'"}',
    ],
    ids=lambda line: line[:60].decode(errors="replace"),
)  # fmt: skip
def test_nonsense_is_refused(line):
    with pytest.raises(InvalidWorkerReplyError):
        parse_reply(line, ONE, CONFIG)
    with pytest.raises(InvalidWorkerReplyError, match="no request"):
        parse_reply(line, None, CONFIG)


def test_replies_out_of_order_are_refused():
    for line in (scored(), encode_reply(7, Failed("", ""))):
        with pytest.raises(InvalidWorkerReplyError):
            parse_reply(line, NEW, CONFIG)
        with pytest.raises(InvalidWorkerReplyError):
            parse_reply(line, Chunk("exact", [], id=7, loaded=True), CONFIG)


def test_text_of_a_worker_can_be_printed():
    line = encode_reply(7, Failed("E\ud800", "a\x1b[2J\x00\ud800" + "x" * 1000))
    reply = parse_reply(line, ONE, CONFIG)
    assert reply.error == "E\\ud800" and reply.reason.startswith("a\\x1b[2J\\x00\\ud800x")
    assert len(reply.reason) < 400 and reply.reason.encode()


VALUES = [None, True, -1, 0, 3, 4, 7, 1e308, -0.0, 10**30, 1e7, "", "x", "\ud800", [], {}, [[]], math.nan]
LINES = [encode_reply(7, reply) for reply in (Loaded(False), Broken("b"), Failed("E", "r"), Scored((GOOD,)))]
LINES += [encode_reply(7, Scored((GOOD, BAD)))]


def mutate(rng, value, depth=0):
    """The JSON value with one part of it replaced, doubled or taken away."""
    if isinstance(value, dict | list) and value and depth < 4 and rng.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = rng.choice(list(keys))
        kind = rng.random()
        changed = value.copy()
        if kind < 0.1:
            del changed[key]
        elif kind < 0.15 and isinstance(value, list):
            changed.append(value[key])
        else:
            changed[key] = mutate(rng, value[key], depth + 1)
        return changed
    return rng.choice(VALUES)


def test_thousands_of_mutated_lines_are_refused_or_are_sound():
    rng, accepted = random.Random(0), 0
    for _ in range(6000):
        line = rng.choice(LINES).rstrip()
        if rng.random() < 0.6:
            line = json.dumps(mutate(rng, json.loads(line))).encode()
        else:
            at = rng.randrange(len(line))
            line = (
                line[:at]
                + bytes(rng.choices(range(256), k=rng.randint(0, 3)))
                + line[at + rng.randint(0, 3) :]
            )
        expected = rng.choice([NEW, ONE, BOTH])
        try:
            reply = parse_reply(line, expected, CONFIG)
        except InvalidWorkerReplyError:
            continue
        accepted += 1
        if isinstance(reply, Scored):
            assert len(reply.results) == (2 if expected is BOTH else 1)
            for result in reply.results:
                assert type(result.outcome) is Outcome and 0 <= result.seconds <= 1e9
                assert result.valid == (result.outcome is not Outcome.FAILED)
                assert not result.valid or (abs(result.score) <= 2.5e6 and len(result.components) == 2)
                assert result.reason.encode() is not None
    assert accepted > 100


def test_replies_of_a_service_are_read_the_same_way():
    assert parse_scores("u", b'{"scores": [1, null]}', 2) == [1, None]
    deep, big = b"[" * 100_000, b" " * (1 << 24) + b"[1]"
    for body in (
        b"<html>",
        deep,
        b"[NaN]",
        b'{"scores": [1]}',
        b'{"scores": {"0": 1}}',
        b"\xff",
        big,
        b"9" * 5000,
    ):
        with pytest.raises(ServiceError):
            parse_scores("u", body, 1 if b"N" in body or body is big else 2)
    rng = random.Random(0)
    for _ in range(2000):
        body = json.dumps({"scores": mutate(rng, [1.0, None])}).encode()
        try:
            assert len(parse_scores("u", body, 2)) == 2
        except ServiceError as error:
            assert str(error).startswith("u: ")


def test_the_largest_honest_reply_fits():
    long = RewardResult(
        math.nan, Outcome.FAILED, "\U0001f600" * 400, 1.0, components=(), error="\U0001f600" * 400
    )
    assert len(encode_reply(7, Scored((long,) * 64))) < MAX_LINE
