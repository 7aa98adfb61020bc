"""Requests that no engine can serve are refused before any work, with the place and the fix."""

import dataclasses
import math

import numpy as np
import pytest

from jaxrl_llm.data.tiny_tokenizer import make_tokenizer
from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.models import RopeConfig, TransformerConfig
from jaxrl_llm.rollout.checks import check_requests, check_sampling
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import Request

MODEL = TransformerConfig(
    vocab_size=64, hidden_size=8, mlp_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8,
    max_position=128,
)  # fmt: skip
FINE = Request(np.array([5, 0, 63]), 10, 2, 125)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": np.zeros(0, np.int32)}, "prompt 10: it has no tokens; a prompt needs at least one"),
        ({"prompt_ids": np.array([5, 64])}, "prompt 10: token id 64 is outside the model's vocabulary of 64"),
        ({"prompt_ids": np.array([5, -1])}, "prompt 10: token id -1 is outside the model's vocabulary"),
        ({"prompt_ids": np.array([5.0])}, "prompt 10: token ids are a list of integers, not float64"),
        ({"prompt_ids": np.array([[5]])}, "prompt 10: token ids are a list of integers, not int64 of shape"),
        ({"max_tokens": 0}, "prompt 10: num_responses=2 and max_tokens=0: both must be at least 1."),
        ({"num_responses": 0}, "prompt 10: num_responses=0 and max_tokens=125: both must be at least 1."),
        (
            {"max_tokens": 126},
            "prompt 10: 3 prompt tokens + max_tokens=126 exceed the model's 128 positions; shorten one",
        ),
    ],
)
def test_an_impossible_request_names_its_prompt(change, message):
    check_requests([FINE], SamplingConfig(), MODEL, None)
    with pytest.raises(UserError) as refused:
        check_requests([FINE, FINE._replace(**change)], SamplingConfig(), MODEL, None)
    assert str(refused.value).startswith(message)


def test_dynamic_rope_ends_at_max_position_and_says_what_does_not():
    dynamic = dataclasses.replace(MODEL, rope=RopeConfig(scaling="dynamic", factor=4.0))
    with pytest.raises(UserError, match=r"model's 128 positions; shorten .*set rope scaling to .yarn."):
        check_requests([FINE._replace(max_tokens=126)], SamplingConfig(), dynamic, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "sampling.temperature is -1.0: it must be at least 0 and at most 100"),
        ({"temperature": math.inf}, "sampling.temperature is inf: it must be at least 0 and at most 100"),
        ({"temperature": 1e-40}, "sampling.temperature is 1e-40: it must be 0 (greedy) or at least 0.01."),
        ({"top_p": 0.0}, "sampling.top_p is 0.0: it must be above 0 and at most 1"),
        ({"top_p": math.nan}, "sampling.top_p is nan"),
        ({"top_k": -1}, "sampling.top_k is -1: it must be at least 0"),
        ({"min_p": 1.5}, "sampling.min_p is 1.5: it must be at least 0 and at most 1."),
        ({"stop": ("x", "")}, "sampling.stop has a string of 0 characters: each must have 1 to 1000."),
        ({"stop": ("x" * 1001,)}, "sampling.stop has a string of 1001 characters"),
        ({"stop": ("x",) * 257}, "sampling.stop has 257 entries: at most 256 are allowed."),
        ({"stop_tokens": (3, -1)}, "sampling.stop_tokens is -1: it must be at least 0"),
        (
            {"stop_tokens": (3, 64)},
            "sampling.stop_tokens has 64: the model's vocabulary has 64 tokens, 0 to 63.",
        ),
    ],
)
def test_impossible_sampling_names_the_field(settings, message):
    with pytest.raises(ConfigError) as refused:
        check_sampling(SamplingConfig(**settings), MODEL, make_tokenizer())
    assert str(refused.value).startswith(message)


def test_stop_strings_need_a_tokenizer():
    check_sampling(SamplingConfig(stop=("x",)), MODEL, make_tokenizer())
    with pytest.raises(ConfigError, match=r"sampling.stop needs a tokenizer"):
        check_sampling(SamplingConfig(stop=("x",)), MODEL, None)
