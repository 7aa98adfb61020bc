"""Values of each token in samples.jsonl: those of the update, and texts that join to the response."""

import numpy as np
import pytest

from jaxrl_llm.builders.describe import per_token, token_texts
from jaxrl_llm.data.packing import from_trajectory
from jaxrl_llm.structs import Trajectory


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def decode(self, ids, **_):
        return bytes(ids).decode(errors="replace")


class Words:
    """A tokenizer that removes the space before the first word, as SentencePiece does."""

    def decode(self, ids, **_):
        return "".join((" one", " two", "\n", " three")[i] for i in ids).removeprefix(" ")


@pytest.mark.parametrize(
    ("tokenizer", "ids", "texts"),
    [
        (Bytes(), list(b"3+4"), ["3", "+", "4"]),
        (Bytes(), [], []),
        (Bytes(), list("a\N{SNOWMAN}b".encode()), ["a", "", "", "\N{SNOWMAN}", "b"]),
        (Bytes(), list("\N{GRINNING FACE}".encode()), ["", "", "", "\N{GRINNING FACE}"]),
        (Bytes(), list("\N{SNOWMAN}".encode())[:2], ["", "\ufffd"]),  # cut off within a character
        (Words(), [0, 1, 2, 3, 1], ["one", " two", "\n", " three", " two"]),
    ],
)
def test_texts_of_tokens_join_to_the_response(tokenizer, ids, texts):
    assert token_texts(tokenizer, ids) == texts
    assert "".join(texts) == tokenizer.decode(ids)


def test_invalid_bytes_do_not_swallow_the_tokens_after_them():
    texts = token_texts(Bytes(), [0xFF, *b"abcdef"])
    assert "".join(texts).endswith("abcdef") and texts[-1] == "f"


def conversation() -> Trajectory:
    """Two prompt tokens; a response of "ab", an observation "?", and "c"."""
    return Trajectory(
        prompt_ids=np.array([1, 2]), response_ids=np.array(list(b"ab?c")), versions=np.zeros(4),
        logprobs=np.array([-1.00001, -2.0, -9.0, -0.123456], np.float32),
        mask=np.array([1, 1, 0, 1], np.int8),
        prompt_index=0, response_index=0, finish="stop", text="ab?c", reward=1.0,
    )  # fmt: skip


def trained_item(advantages):
    item = from_trajectory(conversation())
    on_response = lambda x: np.array([0, 0, *x], np.float32)
    item.signals["advantages"] = on_response(advantages)
    item.signals["logprobs"] = on_response([-1.0, -2.5, 0.0, -0.123456])
    item.signals["old_logprobs"] = on_response([-1.5, -2.0, 0.0, -0.1])
    return item


def test_values_are_those_of_the_update_and_observations_have_none():
    rows = per_token(conversation(), trained_item([0.5, 0.5, 0.5, -0.25]), Bytes(), "logprobs", limit=100)
    assert rows == {
        "text": ["a", "b", "?", "c"],
        "trained": [1, 1, 0, 1],
        "rollout_logprobs": [-1.0, -2.0, None, -0.1235],
        "advantages": [0.5, 0.5, None, -0.25],
        "logprobs": [-1.0, -2.5, None, -0.1235],
        "mismatch": [pytest.approx(1.001e-5, rel=1e-3), -0.5, None, 0.0],  # before rounding
    }
    assert per_token(conversation(), trained_item([1, 1, 1, 1]), Bytes(), "old_logprobs", limit=2) == {
        "text": ["a", "b"],
        "trained": 1,  # equal numbers are one
        "rollout_logprobs": [-1.0, -2.0],
        "advantages": 1.0,
        "logprobs": [-1.5, -2.0],
        "mismatch": [-0.5, 0.0],
    }


def test_what_was_not_trained_on_has_the_numbers_that_exist():
    masked = trained_item([1, 1, 1, 1])
    masked.mask = np.zeros_like(masked.mask)  # its reward failed
    before_update = from_trajectory(conversation())  # of the critic's warm-up: no policy log-probs
    for item in (None, masked, before_update):
        row = per_token(conversation(), item, Bytes(), "logprobs", limit=100)
        assert row["trained"] == 0 and row["rollout_logprobs"] == [-1.0, -2.0, None, -0.1235]
        assert not {"advantages", "logprobs", "mismatch"} & row.keys()
