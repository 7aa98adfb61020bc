"""Partial responses in checkpoints."""

import io

import numpy as np

from jaxrl_llm.data.packing import PackItem, from_trajectory, pack, unpack
from jaxrl_llm.rollout.engine import PartialResponse, Request
from jaxrl_llm.rollout.partial import pack_responses, trajectory_of, unpack_responses


def test_unfinished_responses_survive_being_packed():
    a = PartialResponse([5, 6], [-0.5, -1.5], [3, 4])
    b = PartialResponse()
    c = PartialResponse([7, 8, 9, 10], [-2.0, 0.0, 0.0, -1.0], [3] * 4, "length", observed=[(1, 2), (2, 3)])
    batches = {4: [[a, b]], 6: [[c], [b, c]]}
    stored = {n: [[vars(one) for one in each] for each in lists] for n, lists in batches.items()}
    found = unpack_responses(pack_responses(batches))
    assert {n: [[vars(one) for one in each] for each in lists] for n, lists in found.items()} == stored


def test_routes_are_kept_and_unknown_for_the_last_token():
    """A prompt of two tokens; one expert of 300 in each of two layers. A response without any has none."""
    routes = [np.array([[i], [299 - i]], np.uint16) for i in range(3)]
    request = Request(np.array([1, 2]), 0, 1, 9)
    one = PartialResponse([5, 6], [-0.5, -1.5], [3, 4], routes=routes, request=request)
    other = PartialResponse([7], [-1.0], [3])
    [[found, none]] = unpack_responses(pack_responses({4: [[one, other]]}))[4]
    np.testing.assert_array_equal(found.routes, routes)
    assert none.routes == [] and found.routes[0].dtype == np.uint16
    trajectory = trajectory_of(one, None)
    np.testing.assert_array_equal(trajectory.routes, [*routes, [[65535], [65535]]])
    item = from_trajectory(trajectory)
    short = PackItem(np.array([9]), np.ones(1), {"rollout_logprobs": np.zeros(1)})
    [batch] = pack([item, short], 6, 1, replay=True)
    expected = [0, 1, 2, 65535, 65535, 65535]  # the next trajectory has none, then padding
    np.testing.assert_array_equal(batch.routes[0, :, 0, 0], expected)
    [again, _] = unpack([batch.routes], [item, short], 6, on_targets=False)
    np.testing.assert_array_equal(again, trajectory.routes)
    assert pack([item], 6, 1)[0].routes is None


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
