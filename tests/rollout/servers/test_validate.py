"""Replies to /generate: read in full, or refused."""

import base64
import copy
import functools
import math
import random

import numpy as np
import pytest

from jaxrl_llm.bridge.servers import parsing_reply
from jaxrl_llm.errors import InvalidReplyError, RefusedError
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.rollout.servers import validate


def test_older_weights_than_a_server_was_given_are_refused():
    said = {
        "weight_versions": [
            {"version": "1-1", "start": 0, "end": 2},
            {"version": "2-2", "start": 2, "end": 3},
        ]
    }
    versions = {"1-1": 1, "2-2": 2}
    assert validate.token_versions(said, 3, "1-1", versions) == [1, 1, 2]
    with pytest.raises(ValueError, match="generated with weights of version 1 after '2-2' was sent"):
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


ROUTED = TransformerConfig(num_layers=3, moe=MoEConfig(8, 2, dense_layers=1))
ROUTED_BODY = {"input_ids": [1, 2], "return_routed_experts": True, "routed_experts_start_len": 1}


def routed(experts):
    return {"routed_experts": base64.b64encode(np.asarray(experts, "<i4").tobytes()).decode()}


def test_experts_that_tokens_chose_are_read():
    """2 + 3 tokens, the first known, the last not read yet: 3 tokens x 3 layers, the first of them dense."""
    sent = [[[0, 0], [7, 2], [1, 5]], [[0, 0], [3, 4], [6, 0]], [[9, 9], [5, 6], [2, 1]]]
    read = [[[2, 7], [1, 5]], [[3, 4], [0, 6]], [[5, 6], [1, 2]]]
    assert validate.routed_experts(routed(sent), ROUTED_BODY, 3, ROUTED).tolist() == read
    assert validate.max_reply_bytes(BODY | ROUTED_BODY) - validate.max_reply_bytes(BODY) == 6 * 2**14


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (routed(np.zeros((3, 2, 2))), "48 bytes of experts, where .3, 3, 2. tokens, layers and choices"),
        (routed([[[0, 0], [0, 8], [0, 1]]] * 3), "experts 0 to 8 of 8"),
        (routed([[[0, 0], [1, 2], [-1, 1]]] * 3), "experts -1 to 2 of 8"),
        (routed([[[0, 0], [1, 2], [3, 3]]] * 3), "an expert that a token chose twice"),
        ({"routed_experts": "%%"}, "base64"),
        ({}, "no experts: a server without --enable-return-routed-experts"),
    ],
    ids=["short", "beyond", "negative", "twice", "text", "none"],
)
def test_other_experts_are_refused(meta, message):
    with pytest.raises(ValueError, match=message):
        validate.routed_experts(meta, ROUTED_BODY, 3, ROUTED)


BODY = {"rid": "r", "input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}


def test_a_response_that_was_broken_off_may_come_without_experts():
    """They come with the next part of it; a finished one needs them."""
    meta = {"finish_reason": {"type": "abort"}, "output_token_logprobs": [], "weight_version": "1-1"}
    body = BODY | ROUTED_BODY
    read = functools.partial(validate.read_generated, label="", versions={"1-1": 1}, model=ROUTED)
    for more in ({}, {"routed_experts": None}, routed([])):
        assert len(read({"meta_info": meta | more}, body).routes) == 0
    meta = meta | {"output_token_logprobs": [[-0.5, 5, None]]}
    assert read({"meta_info": meta}, body).routes == ()
    assert len(read({"meta_info": meta | routed([[[0, 0], [1, 2], [3, 4]]])}, body).routes) == 1
    with pytest.raises(ValueError, match="no experts"):
        read({"meta_info": meta | {"finish_reason": {"type": "stop"}}}, body)


def test_a_response_that_ends_for_length_before_the_length_is_refused():
    """SGLang cuts what was asked for to what fits its context; the server is healthy, so another may do."""
    meta = {"finish_reason": {"type": "length"}, "weight_version": "1-1"}
    read = functools.partial(validate.read_generated, label="", versions={"1-1": 1}, model=ROUTED)
    tokens = lambda count: meta | {"output_token_logprobs": [[-0.5, 5, None]] * count}
    assert read({"meta_info": tokens(4)}, BODY).finish == "length"
    with pytest.raises(RefusedError, match=r"after 3 of 4 tokens, with 3 before them: .* --context-length"):
        read({"meta_info": tokens(3)}, BODY)
    with pytest.raises(ValueError, match="log-probs of 3 tokens, and other tokens"):  # a fault of the server
        read({"meta_info": tokens(3), "output_ids": [5] * 4}, BODY)


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
    model = TransformerConfig(vocab_size=9)
    read = functools.partial(validate.read_generated, versions={"1-1": 1, "2-2": 2}, model=model)
    assert read(reply, BODY, "") == ([5, 6, 7], [-0.5, -1.0, -2.0], [1, 2, 2], "stop", ())
    refused = 0
    for _ in range(3000):
        broken = copy.deepcopy(reply)
        for _ in range(rng.randint(1, 3)):
            mutate(broken, rng)
        try:
            with parsing_reply("a server"):
                ids, logprobs, versions, *_ = read(broken, BODY, "")
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
