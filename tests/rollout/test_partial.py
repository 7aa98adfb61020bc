"""Partial responses in checkpoints."""

import io

import numpy as np

from jaxrl_llm.rollout.engine import PartialResponse
from jaxrl_llm.rollout.partial import pack_responses, unpack_responses


def test_unfinished_responses_survive_being_packed():
    a = PartialResponse([5, 6], [-0.5, -1.5], [3, 4])
    b = PartialResponse()
    c = PartialResponse([7, 8, 9, 10], [-2.0, 0.0, 0.0, -1.0], [3] * 4, "length", [(1, 2), (2, 3)])
    batches = {4: [[a, b]], 6: [[c], [b, c]]}
    stored = {n: [[vars(one) for one in each] for each in lists] for n, lists in batches.items()}
    found = unpack_responses(pack_responses(batches))
    assert {n: [[vars(one) for one in each] for each in lists] for n, lists in found.items()} == stored


def test_rollouts_of_an_earlier_checkpoint_are_still_read():
    """The file as it was first written, array by array."""
    file = io.BytesIO()
    np.savez(
        file,
        batch=np.array([4, 4, 6], np.int64), list=np.array([0, 0, 1], np.int32),
        length=np.array([2, 0, 3], np.int32), finish=np.array(["", "", "stop"], "U8"),
        observed=np.array([[2, 1, 2]], np.int32), ids=np.array([5, 6, 7, 8, 9], np.int32),
        logprobs=np.array([-0.5, -1.5, -2, 0, -1], np.float32), versions=np.array([3, 4, 3, 3, 3], np.int32),
    )  # fmt: skip
    found = unpack_responses(file.getvalue())
    assert [[len(each) for each in lists] for lists in found.values()] == [[2], [0, 1]]
    assert (found[4][0][0].ids, found[4][0][0].versions, found[4][0][0].finish) == ([5, 6], [3, 4], "")
    last = found[6][1][0]
    assert (last.ids, last.logprobs, last.finish, last.observed) == ([7, 8, 9], [-2, 0, -1], "stop", [(1, 2)])
