"""Replies to /generate: read in full, or refused."""

import copy
import functools
import math
import random

import pytest

from jaxrl_llm.bridge.servers import parsing_reply
from jaxrl_llm.errors import InvalidReplyError
from jaxrl_llm.rollout.sglang import validate


def test_older_weights_than_a_server_was_given_are_refused():
    said = {
        "weight_versions": [
            {"version": "1-1", "start": 0, "end": 2},
            {"version": "2-2", "start": 2, "end": 3},
        ]
    }
    versions = {"1-1": 1, "2-2": 2}
    assert validate.token_versions(said, 3, "1-1", versions) == [1, 1, 2]
    with pytest.raises(ValueError, match="wrote with weights of version 1 after '2-2' was sent"):
        validate.token_versions(said, 3, "2-2", versions)


@pytest.mark.parametrize(
    "spans",
    [
        [("1-1", 0, 2), ("2-2", 1, 3)],
        [("1-1", 1, 3)],
        [("1-1", 0, 2)],
        [("2-2", 0, 1), ("1-1", 1, 3)],
        [("1-1", 0, 10**12), ("1-1", 10**12, 3)],
        [("1-1", False, 3)],
    ],
    ids=["overlap", "late", "short", "backwards", "endless", "no number"],
)
def test_spans_that_are_not_the_tokens_one_after_the_other_are_refused(spans):
    said = {"weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in spans]}
    with pytest.raises(ValueError, match="of 3 tokens"):
        validate.token_versions(said, 3, "", {"1-1": 1, "2-2": 2})


BODY = {"rid": "r", "input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
JUNK = (None, True, -1, 0, 3, 7, 0.5, -0.5, 1e308, math.nan, 10**400, "", "a", [], [[]], {}, {"type": "stop"})


def test_no_reply_is_read_as_what_it_is_not():
    """3,000 replies with one to three values replaced, dropped or doubled: valid, or refused."""
    rng = random.Random(0)
    reply = {
        "output_ids": [5, 6, 7],
        "meta_info": {
            "id": "r",
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "finish_reason": {"type": "stop", "matched": 7},
            "output_token_logprobs": [[-0.5, 5, None], [-1.0, 6, None], [-2.0, 7, None]],
            "weight_version": "2-2",
            "weight_versions": [
                {"version": "1-1", "start": 0, "end": 1},
                {"version": "2-2", "start": 1, "end": 3},
            ],
        },
    }
    read = functools.partial(validate.read_generated, versions={"1-1": 1, "2-2": 2}, vocab_size=9)
    assert read(reply, BODY, "") == ([5, 6, 7], [-0.5, -1.0, -2.0], [1, 2, 2], "stop")
    refused = 0
    for _ in range(3000):
        broken = copy.deepcopy(reply)
        for _ in range(rng.randint(1, 3)):
            mutate(broken, rng)
        try:
            with parsing_reply("a server"):
                ids, logprobs, versions, _ = read(broken, BODY, "")
        except InvalidReplyError:
            refused += 1
            continue
        assert 0 < len(ids) == len(logprobs) == len(versions) <= 4 or not ids
        assert all(type(token) is int and 0 <= token < 9 for token in ids)
        assert all(-104 <= logprob <= 1e-4 for logprob in logprobs) and set(versions) <= {1, 2}
    assert refused > 1000


def mutate(value, rng):
    """Replace, drop or double something inside."""
    while isinstance(value, (dict, list)) and value:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if isinstance(value[key], (dict, list)) and value[key] and rng.random() < 0.8:
            value = value[key]
            continue
        match rng.randrange(3):
            case 0:
                value[key] = rng.choice(JUNK)
            case 1:
                del value[key]
            case 2 if isinstance(value, list):
                value.append(value[key])
        return
