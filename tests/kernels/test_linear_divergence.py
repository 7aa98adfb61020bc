"""Chunked divergences against hand numbers, another system's, and the dense definition with its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_kernels.linear_divergence.chunked import linear_divergence

B, T, V = 2, 7, 23
LN = np.log


def from_logits(student, teacher, **settings):
    """The divergence of two sets of logits: hidden states are the logits, heads the identity."""
    eye = jnp.eye(student.shape[-1])
    return linear_divergence(student, eye, teacher, eye, **settings)


def inputs(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    return (
        jax.random.normal(keys[0], (B, T, 5), dtype),
        jax.random.normal(keys[1], (V, 5), dtype),
        2 * jax.random.normal(keys[2], (B, T, 8), dtype),
        jax.random.normal(keys[3], (V, 8), dtype),
    )


def softmax(hidden, head, temperature, softcap):
    logits = jnp.einsum("btd,vd->btv", hidden.astype(jnp.float32), head.astype(jnp.float32))
    if softcap:
        logits = softcap * jnp.tanh(logits / softcap)
    return jax.nn.softmax(logits / temperature)


def kl(p, q):
    return jnp.sum(p * jnp.log(p / q), axis=-1)


def lumped(p, order, k):
    """p of the first k of `order` and the sum of the others, in float32."""
    sorted_p = jnp.take_along_axis(p, order, -1)
    return jnp.concatenate([sorted_p[..., :k], sorted_p[..., k:].sum(-1, keepdims=True)], -1)


def dense(hs, ws, ht, wt, beta=0.0, temperature=1.0, top_k=0, student_softcap=None, teacher_softcap=None):
    q, p = softmax(hs, ws, temperature, student_softcap), softmax(ht, wt, temperature, teacher_softcap)
    if top_k:
        order = jnp.argsort(-p, axis=-1)
        p, q = lumped(p, order, top_k), lumped(q, order, top_k)
    if beta == 0:
        return kl(p, q)
    if beta == 1:
        return kl(q, p)
    mixture = beta * p + (1 - beta) * q
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


@pytest.mark.parametrize(
    ("settings", "chunk"),
    [
        ({"beta": 0.0}, 2),
        ({"beta": 0.3, "temperature": 1.7}, 100),
        ({"beta": 1.0, "top_k": 4, "temperature": 0.8}, 3),
        ({"beta": 0.3, "top_k": 4}, 7),
        ({"beta": 0.0, "student_softcap": 3.0, "teacher_softcap": 2.0, "top_k": 22}, 1),
    ],
)
def test_values_and_gradients_equal_the_dense_ones(settings, chunk):
    weights = jnp.linspace(-1, 1, B * T).reshape(B, T)

    def run(fn, **extra):
        def total(*arrays):
            each = fn(*arrays, **settings, **extra)
            return jnp.sum(weights * each), each

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(*inputs())

    got, wanted = run(linear_divergence, chunk=chunk), run(dense)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_no_gradient_reaches_the_teacher():
    gradients = jax.grad(lambda *a: linear_divergence(*a, beta=0.4).sum(), argnums=(2, 3))(*inputs())
    assert all(not np.any(g) for g in gradients)


def test_by_hand():
    """Teacher 1/2, 1/4, 1/4 and student 1/4, 1/4, 1/2."""
    p, q = jnp.log(jnp.array([[[0.5, 0.25, 0.25]]])), jnp.log(jnp.array([[[0.25, 0.25, 0.5]]]))
    value = lambda **settings: float(from_logits(q, p, **settings)[0, 0])
    assert value(beta=0.0) == pytest.approx(0.25 * LN(2), abs=1e-6)
    assert value(beta=1.0) == pytest.approx(0.25 * LN(2), abs=1e-6)
    # the mixture of equal parts is 3/8, 1/4, 3/8
    assert value(beta=0.5) == pytest.approx(0.5 * LN(4 / 3) + 0.25 * LN(2 / 3), abs=1e-6)
    # the likeliest token against all others: 1/2, 1/2 and 1/4, 3/4
    assert value(top_k=1) == pytest.approx(0.5 * LN(2) + 0.5 * LN(2 / 3), abs=1e-6)
    # tokens that tie with the k-th are told apart too
    assert value(top_k=2) == pytest.approx(value(), abs=1e-6)
    # half the temperature squares the odds: 4/6, 1/6, 1/6 and 1/6, 1/6, 4/6
    assert value(temperature=0.5) == pytest.approx(0.5 * LN(4), abs=1e-6)
    # the gradient of the forward KL in the student's logits is q - p
    gradient = jax.grad(lambda x: from_logits(x, p).sum())(q)
    np.testing.assert_allclose(gradient[0, 0], [-0.25, 0.0, 0.25], atol=1e-6)


def test_equals_another_system():
    """TRL 1.16 GKDTrainer.generalized_jsd_loss, a position at a time, on these logits."""
    student = jnp.array([[[0.1, 0.7, -0.4, 1.2, 0.0], [2.0, -1.0, 0.3, 0.3, 0.5]]])
    teacher = jnp.array([[[0.5, 0.2, -1.0, 2.0, 0.3], [1.0, -0.5, 0.8, -0.2, 0.1]]])
    for beta, temperature, expected in [
        (0.0, 1.0, [0.1230464, 0.1940386]),
        (0.0, 2.0, [0.0362904, 0.0474610]),
        (0.1, 1.0, [0.0111760, 0.0170157]),
        (0.5, 1.0, [0.0326246, 0.0438995]),
        (0.5, 2.0, [0.0092296, 0.0115857]),
        (0.9, 1.0, [0.0126903, 0.0151689]),
        (1.0, 1.0, [0.1446785, 0.1674938]),
    ]:
        got = from_logits(student, teacher, beta=beta, temperature=temperature)
        np.testing.assert_allclose(got[0], expected, atol=1e-6)


def test_the_same_distributions_are_nothing_apart_and_lumping_never_adds():
    student, head, teacher, teacher_head = inputs()
    for beta in (0.0, 0.5):
        np.testing.assert_allclose(linear_divergence(student, head, student, head, beta=beta), 0.0, atol=1e-6)
        whole = linear_divergence(student, head, teacher, teacher_head, beta=beta)
        part = linear_divergence(student, head, teacher, teacher_head, beta=beta, top_k=5)
        assert (part <= whole + 1e-6).all() and (part >= -1e-6).all()


@pytest.mark.parametrize(("beta", "top_k"), [(0.0, 0), (0.5, 2), (1.0, 2)])
def test_extreme_logits_give_finite_values_and_gradients(beta, top_k):
    """Certain teachers and students, right and wrong, and a teacher for whom all tokens tie."""
    sure = 500 * jnp.eye(4)[None]
    teacher = jnp.concatenate([sure, jnp.zeros((1, 4, 4))], 1)
    student = jnp.concatenate([sure[:, :2], sure[:, 1::-1], sure], 1)
    value, gradient = jax.value_and_grad(lambda x: from_logits(x, teacher, beta=beta, top_k=top_k).sum())(
        student
    )
    assert jnp.isfinite(value) and jnp.isfinite(gradient).all()


def test_heads_padded_differently_share_the_rows_that_both_have():
    student, head, teacher, teacher_head = inputs()
    padded = jnp.concatenate([teacher_head, jnp.ones((9, 8))])
    wanted = linear_divergence(student, head, teacher, teacher_head)
    np.testing.assert_array_equal(linear_divergence(student, head, teacher, padded), wanted)


def test_bfloat16_inputs_give_float32():
    got = linear_divergence(*inputs(jnp.bfloat16), beta=0.5, chunk=3)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, dense(*inputs(jnp.bfloat16), beta=0.5), atol=5e-2)


def test_rows_divided_among_devices_change_nothing():
    arrays = inputs()
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    placed = [jax.device_put(x, s) for x, s in zip(arrays, (rows, whole, rows, whole), strict=True)]
    with jax.set_mesh(mesh):
        got = linear_divergence(*placed, beta=0.5, top_k=3, chunk=2)
    np.testing.assert_allclose(got, linear_divergence(*arrays, beta=0.5, top_k=3), rtol=1e-5, atol=1e-6)


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1\], got 1.5"):
        linear_divergence(*inputs(), beta=1.5)
    with pytest.raises(ValueError, match="temperature must be more than 0"):
        linear_divergence(*inputs(), temperature=0.0)


def test_memory_is_one_chunk_of_logits_of_each_model():
    """No array of the compiled step, nor all its temporaries, is as large as [B, T, V]."""
    rows, length, vocab = 2, 512, 4096
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    shapes = (shape(rows, length, 16), shape(vocab, 16), shape(rows, length, 16), shape(vocab, 16))
    step = jax.grad(lambda *a: linear_divergence(*a, beta=0.5, top_k=8, chunk=32).sum(), argnums=(0, 1))
    memory = jax.jit(step).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < rows * length * vocab * 4
