"""The short convolution along paths, by hand and against torch, one path at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import with_slow

from jaxrl_llm.models.paths import Paths, causal_conv, conv_state, conv_window, convolve, find_paths

torch = pytest.importorskip("torch")

CHANNELS = 5
PACKED = [(1, 1, 7), (2, 2, 1), (3, 3, 2), (4, 4, 12), (0, 0, 3)]
TREE = [
    (1, 4, 5),
    (1, 1, 3),
    (2, 4, 1),
    (2, 3, 1),
    (2, 2, 4),
    (3, 3, 2),
    (4, 4, 6),
    (5, 6, 1),
    (5, 5, 2),
    (6, 6, 3),
]
"""Rows as (segment, last, number of tokens)."""


def make_row(parts):
    """Return segments, last and positions [1, T], and the columns of the path of each token."""
    segments, last = (np.repeat([part[i] for part in parts], [part[2] for part in parts]) for i in range(2))
    before = lambda t: (segments[: t + 1] <= segments[t]) & (segments[t] <= last[: t + 1]) & (segments[t] > 0)
    paths = [np.flatnonzero(before(t)) for t in range(len(segments))]
    positions = np.array([max(len(path) - 1, 0) for path in paths])
    return *(x[None].astype(np.int32) for x in (segments, last, positions)), paths


def random_inputs(length, width, rows=1):
    rng = np.random.default_rng(width)
    shapes = (rows, length, CHANNELS), (CHANNELS, width), (CHANNELS,)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


@functools.partial(jax.jit, static_argnums=3)
def jit_paths(segments, last, positions, width):
    return find_paths(segments, last, positions=positions, width=width)


def test_a_path_by_hand():
    """Prompt 0 1 2, responses 3 4 and 5, then another sequence 6 7, and padding."""
    segments, last, positions, _ = make_row([(1, 2, 3), (1, 1, 2), (2, 2, 1), (3, 3, 2), (0, 0, 1)])
    exists, columns = jit_paths(segments, last, positions, 3)
    expected = [[], [0], [1, 0], [2, 1], [3, 2], [2, 1], [], [6], []]
    found = [list(np.asarray(columns)[0, t][np.asarray(exists)[0, t]]) for t in range(9)]
    assert found == expected


def test_rows_without_prefixes_need_no_columns():
    segments, _, positions, _ = make_row(PACKED)
    exists, columns = jit_paths(segments, None, positions, 4)
    assert columns is None
    np.testing.assert_array_equal(exists[0].sum(-1)[:10], [0, 1, 2, 3, 3, 3, 3, 0, 0, 1])


@pytest.mark.parametrize("width", with_slow([2, 3, 4], {3}))
@pytest.mark.parametrize("parts, share", [(PACKED, False), (PACKED, True), (TREE, True)])
def test_rows_equal_torch_on_each_path(parts, share, width):
    """Outputs and the gradients of x, weight and bias against conv1d of the path of each segment's end."""
    segments, last, positions, paths = make_row(parts)
    x, weight, bias = random_inputs(segments.shape[1], width)
    cotangent = np.random.default_rng(9).normal(size=x.shape).astype(np.float32) * (segments > 0)[..., None]

    def total(x, weight, bias):
        found = jit_paths(segments, last if share else None, positions, width)
        out = causal_conv(x, weight, found, bias)
        windows = convolve(conv_window(x, found), weight, bias)
        out = jnp.where(jnp.arange(segments.shape[1])[None, :, None] % 2, out, windows)  # both ways
        return jnp.sum(out * cotangent), out

    (_, out), gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(x, weight, bias)
    leaves = [torch.tensor(a, requires_grad=True) for a in (x, weight, bias)]
    loss = 0
    for segment in range(1, segments.max() + 1):
        own = np.flatnonzero(segments[0] == segment)
        columns = paths[own[-1]]
        inputs = torch.nn.functional.pad(leaves[0][0, columns].T[None], (width - 1, 0))
        expected = torch.nn.functional.conv1d(inputs, leaves[1][:, None], leaves[2], groups=CHANNELS)[0].T
        expected = expected[np.isin(columns, own)]
        np.testing.assert_allclose(out[0, own], expected.detach(), atol=1e-6)
        loss = loss + (expected * torch.tensor(cotangent[0, own])).sum()
    loss.backward()
    for ours, leaf in zip(gradients, leaves, strict=True):
        np.testing.assert_allclose(ours, leaf.grad, atol=1e-5)


def test_steps_equal_the_row():
    """Decoding from zeros, and from the state of a left-padded prompt shorter and longer than the width."""
    width, lengths, steps = 4, np.array([2, 9]), 5
    x, weight, bias = random_inputs(9 + steps, width, rows=2)
    rows = jnp.ones(x.shape[:2], jnp.int32)
    sequences = np.stack([np.roll(row, n - 9, axis=0) for row, n in zip(x, lengths, strict=True)])
    where = find_paths(rows, None, positions=jnp.cumsum(rows, axis=1) - 1, width=width)
    expected = causal_conv(jnp.asarray(sequences), jnp.asarray(weight), where, jnp.asarray(bias))

    positions = np.arange(9) - (9 - lengths)[:, None]
    segments, positions = (positions >= 0).astype(np.int32), np.maximum(positions, 0)
    paths = jit_paths(segments, None, positions, width)
    prompt = jnp.asarray(x[:, :9])
    states = {"prompt": (conv_state(prompt, paths), lengths), "zeros": (jnp.zeros((2, 3, CHANNELS)), [0, 0])}
    for name, (state, start) in states.items():
        for t in range(steps):
            new = jnp.asarray([sequences[i, start[i] + t] for i in range(2)])
            window = jnp.concatenate([state, new[:, None]], axis=1)
            out, state = convolve(window, jnp.asarray(weight), jnp.asarray(bias)), window[:, 1:]
            for i in range(2):
                np.testing.assert_allclose(out[i], expected[i, start[i] + t], atol=1e-6, err_msg=name)


def test_a_row_shorter_than_the_width():
    x, weight, _ = random_inputs(2, 4)
    paths = Paths(jnp.asarray([[[False] * 3, [True, False, False]]]), None)
    out = causal_conv(jnp.asarray(x), jnp.asarray(weight), paths)
    np.testing.assert_allclose(out[0, 1], x[0, 1] * weight[:, 3] + x[0, 0] * weight[:, 2], atol=1e-6)


def test_bfloat16_is_summed_in_float32():
    x, weight, _ = (jnp.asarray(a, jnp.bfloat16) for a in random_inputs(8, 4))
    paths = Paths(jnp.arange(8)[None, :, None] >= jnp.arange(1, 4), None)
    out = causal_conv(x, weight, paths)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, causal_conv(x.astype(jnp.float32), weight.astype(jnp.float32), paths))
