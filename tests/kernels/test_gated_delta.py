"""The gated delta rule against transformers on torch, a sequence at a time, and its chunks against steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import with_slow

from jaxrl_kernels.gated_delta import bench
from jaxrl_kernels.gated_delta.reference import SAVED, delta_step, exact_step, gated_delta, recurrent_delta

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")

HK, HV, K, V = 2, 4, 8, 6
CHUNKS = (16, 64)
PACKED = [(1, 1, 37), (2, 2, 1), (3, 3, 90), (0, 0, 5)]
GROUP = [(1, 3, 45), (1, 1, 30), (2, 2, 17), (3, 3, 50), (4, 4, 20), (0, 0, 3)]
TREE = [
    *[(1, 5, 20), (1, 2, 9), (1, 1, 8), (2, 2, 7), (3, 5, 11), (3, 4, 2), (3, 3, 5), (4, 4, 1), (5, 5, 40)],
    *[(6, 8, 3), (6, 6, 18), (7, 8, 4), (7, 7, 16), (8, 8, 13)],
]
TURNS = [(1, 4, 12), (1, 3, 30), (1, 2, 1), (1, 1, 9), (2, 2, 25), (3, 3, 14), (4, 4, 33)]
"""Rows as (segment, last, number of tokens)."""


def make_row(parts):
    """Return segments and last, [1, T]."""
    counts = [count for *_, count in parts]
    return tuple(np.repeat([part[i] for part in parts], counts).astype(np.int32)[None] for i in range(2))


def make_tokens(shape, seed=0, beta=1.0):
    """Return q, k, v, g, beta of `shape` [B, T]; beta from 0 to `beta`."""
    rng = np.random.default_rng(seed)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k, v = (rng.normal(size=(*shape, *dims)) for dims in ((HK, K), (HK, K), (HV, V)))
    g, weight = -np.exp(rng.normal(size=(*shape, HV)) - 2), rng.uniform(0, beta, (*shape, HV))
    return tuple(x.astype(np.float32) for x in (unit(q) * K**-0.5, unit(k), v, g, weight))


@functools.partial(jax.jit, static_argnames=("function", "settings"))
def run(function, tokens, segments, last=None, *, initial=None, weights=(0, 0), settings=()):
    """Return (out, final) and the gradients of sum(weights * (out, final)) for the tokens and `initial`."""

    def total(tokens, initial):
        outputs = function(*tokens, segments=segments, last=last, initial=initial, **dict(settings))
        return sum(jnp.sum(w * x) for w, x in zip(weights, outputs, strict=True)), outputs

    (_, outputs), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(tokens, initial)
    return outputs, (*gradients[0], gradients[1])


def run_torch(function, tokens, weights, initial=None):
    """Return the same for one sequence a row from a function of transformers, which scales q itself."""
    leaves = [torch.tensor(x, requires_grad=True) for x in tokens]
    start = None if initial is None else torch.tensor(initial, requires_grad=True)
    q, *rest = leaves
    outputs = function(q * K**0.5, *rest, initial_state=start, output_final_state=True)
    sum((torch.tensor(w) * x).sum() for w, x in zip(weights, outputs, strict=True)).backward()
    gradients = [x.grad.numpy() for x in leaves]
    return [x.detach().numpy() for x in outputs], (*gradients, None if start is None else start.grad.numpy())


def run_separately(tokens, segments, last, weights):
    """Return out and the gradients of sum(weights * out) of a row, one path at a time."""
    out, gradients = np.zeros_like(weights), [np.zeros_like(x) for x in tokens]
    for segment in range(1, segments.max() + 1):
        columns = np.flatnonzero((segments[0] <= segment) & (segment <= last[0]))
        own = (segments[:, columns] == segment)[..., None, None]
        alone = [x[:, columns] for x in tokens]
        outputs = run_torch(
            hf.torch_recurrent_gated_delta_rule, alone, (own * weights[:, columns], np.float32(0))
        )
        out[:, columns] += np.where(own, outputs[0][0], 0)
        for total, part in zip(gradients, outputs[1][:5], strict=True):
            total[:, columns] += part
    return out, gradients


def assert_close(actual, expected, tolerance=1e-5):
    """Compare trees of arrays with an error relative to the largest number of each, at least 1."""
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1))


def random_like(*xs):
    rng = np.random.default_rng(1)
    return tuple(rng.normal(size=x.shape).astype(np.float32) for x in xs)


@pytest.mark.parametrize("chunk", [1, *CHUNKS])
@pytest.mark.parametrize("name", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
def test_sequences_equal_transformers(name, chunk):
    """Out, final state and the gradients of all inputs; 100 tokens are not a multiple of a chunk."""
    tokens, segments = make_tokens((2, 100)), np.ones((2, 100), np.int32)
    initial = np.random.default_rng(2).normal(size=(2, HV, K, V)).astype(np.float32)
    weights = random_like(tokens[2], initial)
    expected = run_torch(getattr(hf, name), tokens, weights, initial)
    ours = run(
        gated_delta, tokens, segments, None, initial=initial, weights=weights, settings=(("chunk", chunk),)
    )
    assert_close(ours, expected)


@pytest.mark.parametrize("chunk", with_slow([*CHUNKS, None], {64}))
@pytest.mark.parametrize("parts", [PACKED, GROUP, TREE, TURNS], ids=["packed", "group", "tree", "turns"])
def test_rows_equal_their_sequences(parts, chunk):
    """Packed rows and trees of segments, out and gradients; None = token by token."""
    segments, last = make_row(parts)
    tokens = make_tokens(segments.shape)
    weights = random_like(tokens[2])[0]
    out, gradients = run_separately(tokens, segments, last, weights)
    settings = (("levels", 4), *((("chunk", chunk),) if chunk else ()))
    function = gated_delta if chunk else recurrent_delta
    prefixes = None if (segments == last).all() else last
    ours = run(function, tokens, segments, prefixes, initial=None, weights=(weights, 0), settings=settings)
    assert_close(ours[0][0], out)
    assert_close(ours[1][:5], gradients)


def test_rows_of_a_batch_have_separate_trees():
    rows = [make_row([*parts, (0, 0, 168 - sum(count for *_, count in parts))]) for parts in (GROUP, TURNS)]
    segments, last = (np.concatenate(x) for x in zip(*rows, strict=True))
    tokens = make_tokens(segments.shape)
    together, _ = run(gated_delta, tokens, segments, last, settings=(("levels", 4),))
    for i in range(2):
        own = [x[i : i + 1] for x in tokens]
        alone, _ = run(gated_delta, own, segments[i : i + 1], last[i : i + 1], settings=(("levels", 4),))
        assert_close([x[i : i + 1] for x in together], alone, 1e-6)


def test_what_the_backward_pass_needs_can_be_kept():
    """A policy that keeps SAVED scans the chunks twice, forward and back, and not forward again."""
    *tokens, segments = *make_tokens((1, 40)), jnp.ones((1, 40), int)

    def scans(policy):
        rule = lambda *tokens: gated_delta(*tokens, segments=segments)[0].sum()
        return str(jax.make_jaxpr(jax.grad(jax.checkpoint(rule, policy=policy)))(*tokens)).count(" scan[")

    keep = jax.checkpoint_policies.save_only_these_names(SAVED)
    assert (scans(keep), scans(jax.checkpoint_policies.nothing_saveable)) == (2, 3)


def test_too_few_levels_are_nan():
    """TREE has paths of three levels: no token that reads a lost state gets a wrong number."""
    segments, last = make_row(TREE)
    tokens = make_tokens(segments.shape)
    expected = run(gated_delta, tokens, segments, last, settings=(("levels", 3), ("chunk", 16)))[0][0]
    out = np.asarray(run(gated_delta, tokens, segments, last, settings=(("levels", 2), ("chunk", 16)))[0][0])
    lost = np.isnan(out)
    assert lost.any()
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(out[~lost], np.asarray(expected)[~lost], atol=1e-6)


@pytest.mark.parametrize(
    "before, after", [(13, 0), pytest.param(70, 0, marks=pytest.mark.slow), (0, 40), (5, 9)]
)
def test_padding_changes_nothing(before, after):
    """Left padding of a prefill and trailing padding, whatever its numbers: out 0, the final state kept."""
    length = 50
    tokens = make_tokens((1, before + length + after))
    segments = make_row([(0, 0, before), (1, 1, length), (0, 0, after)])[0]
    initial, weights = random_like(np.zeros((1, HV, K, V)), tokens[2])
    final_weights = random_like(initial)[0]
    inner = lambda x: x[:, before : before + length]
    given = {"initial": initial, "settings": (("chunk", 16),)}
    own = [inner(x) for x in tokens]
    alone = run(gated_delta, own, inner(segments), weights=(inner(weights), final_weights), **given)
    padded = run(gated_delta, tokens, segments, weights=(weights, final_weights), **given)
    assert_close((inner(padded[0][0]), padded[0][1]), alone[0], 2e-6)
    assert_close([inner(x) for x in padded[1][:5]] + [padded[1][5]], alone[1], 2e-6)
    for x in (padded[0][0], *padded[1][:5]):
        assert not np.delete(np.asarray(x), np.s_[before : before + length], axis=1).any()


@pytest.mark.slow
def test_rows_in_parts_equal_the_row():
    """The final state of a part, of any length, is the initial state of the next: prefill by parts."""
    tokens, segments = make_tokens((2, 90)), np.ones((2, 90), np.int32)
    expected, _ = run(gated_delta, tokens, segments)
    state, outs = None, []
    for part in (np.s_[:, :33], np.s_[:, 33:34], np.s_[:, 34:]):
        (out, state), _ = run(gated_delta, [x[part] for x in tokens], segments[part], None, initial=state)
        outs.append(out)
    assert_close((np.concatenate(outs, axis=1), state), expected)


@pytest.mark.parametrize("beta", [0.99, 1.9])
@pytest.mark.parametrize("chunk", with_slow(CHUNKS, {64}))
def test_alike_keys(chunk, beta):
    """Repeated text has equal keys, for which powers of A overflow. Against the recurrence in float64."""
    q, k, v, g, _ = make_tokens((1, 128))
    k = k[:, :1] + 0.01 * k
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = g * 0.01, np.full_like(g, beta)
    state, outs = np.zeros((HV, K, V)), []
    for t in range(128):
        keys, queries = (np.repeat(x[0, t].astype(np.float64), HV // HK, axis=0) for x in (k, q))
        state = np.exp(g[0, t].astype(np.float64))[:, None, None] * state
        u = beta[0, t][:, None] * (v[0, t] - np.einsum("hkv,hk->hv", state, keys))
        state = state + keys[:, :, None] * u[:, None]
        outs.append(np.einsum("hkv,hk->hv", state, queries))
    weights = (np.ones_like(v), 0)
    tokens, segments = (q, k, v, g, beta), np.ones((1, 128), np.int32)
    (out, final), gradients = run(
        gated_delta, tokens, segments, weights=weights, settings=(("chunk", chunk),)
    )
    assert_close((out[0], final[0]), (np.stack(outs), state), 1e-4)
    expected = run(recurrent_delta, tokens, segments, weights=weights)[1]
    assert_close(gradients[:5], expected[:5], 1e-4)


def test_strong_decays_keep_their_bits():
    """Sums of g to -800 in a chunk: differences of them lose the digits of small sums."""
    q, k, v, g, beta = make_tokens((1, 64))
    g[:, :32] = -25
    segments = np.ones((1, 64), np.int32)
    ours = run(gated_delta, (q, k, v, g, beta), segments, weights=(np.ones_like(v), 0))
    expected = run(recurrent_delta, (q, k, v, g, beta), segments, weights=(np.ones_like(v), 0))
    assert_close(ours[0], expected[0], 5e-7)
    assert_close(ours[1][:5], expected[1][:5], 2e-6)


def test_states_that_die_have_finite_gradients():
    q, k, v, g, beta = make_tokens((1, 64))
    g[:, ::7] = -1e4
    ours = run(gated_delta, (q, k, v, g, beta), np.ones((1, 64), np.int32), weights=(np.ones_like(v), 0))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(ours))


def test_steps_equal_the_recurrence_bit_by_bit():
    """Decoding by `exact_step` in any number of slots has the bits of `recurrent_delta`, the strict form."""
    tokens, segments = make_tokens((5, 20)), np.ones((5, 20), np.int32)
    expected, chunked = run(recurrent_delta, tokens, segments)[0], run(gated_delta, tokens, segments)[0]
    for slots in (1, 5):
        state, step = jnp.zeros((slots, HV, K, V)), jax.jit(exact_step)
        for t in range(20):
            out, state = step(state, *(x[:slots, t] for x in tokens))
            np.testing.assert_array_equal(out, expected[0][:slots, t])
        np.testing.assert_array_equal(state, expected[1][:slots])
    assert_close((out, state), (chunked[0][:, -1], chunked[1]))
    first = (jnp.asarray(x[:, 0]) for x in tokens)
    assert_close(delta_step(jnp.zeros((5, HV, K, V)), *first)[0], expected[0][:, 0])


@pytest.mark.slow
def test_bfloat16_is_rounded_once():
    """Inputs of the activation type, computed in float32; out has their type, the state stays float32."""
    q, k, v, g, beta = make_tokens((1, 70))
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    g, beta, segments = jnp.asarray(g), jnp.asarray(beta), jnp.ones((1, 70), jnp.int32)
    out, final = gated_delta(q, k, v, g, beta, segments=segments)
    wide, state = gated_delta(*(x.astype(jnp.float32) for x in (q, k, v)), g, beta, segments=segments)
    assert (out.dtype, final.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(out, wide.astype(jnp.bfloat16))
    np.testing.assert_array_equal(final, state)


@pytest.mark.slow
def test_bench_measures_ours_and_names_what_the_peer_lacks(monkeypatch):
    shape = bench.DeltaShape(1, 24, HK, HV, key_dim=K, value_dim=V, dtype="float32")
    inputs = shape.inputs()
    np.testing.assert_allclose(np.linalg.norm(inputs["q"], axis=-1), K**-0.5, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(inputs["k"], axis=-1), 1.0, rtol=1e-5)
    assert inputs["g"].max() < 0 and inputs["beta"].min() > 0 and inputs["beta"].max() < 1
    # Both passes against the definition, a token at a time.
    *tokens, d_out = map(jnp.asarray, inputs.values())
    segments = jnp.ones((1, 24), jnp.int32)
    definition = lambda *x: recurrent_delta(*x, segments=segments)[0]
    out, gradients = jax.jit(lambda x, d: (definition(*x), jax.vjp(definition, *x)[1](d)))(tokens, d_out)
    forward, both = bench.our_passes(shape)
    np.testing.assert_allclose(forward(*tokens, d_out), out, atol=1e-5)
    for ours, gradient in zip(both(*tokens, d_out), gradients, strict=True):
        np.testing.assert_allclose(ours, gradient, atol=1e-4)
    find_spec = bench.importlib.util.find_spec
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: name != "fla" and find_spec(name))
    row, peer = bench.compare_delta(shape, repeat=1)
    assert row["implementation"] == "ours" and row["forward_s"] > 0 and row["both_s"] > 0
    assert "fla not installed" in peer
