"""Chunked divergences by hand, against another system's, and the NumPy oracle with its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kernel_oracles import assert_close

from jaxrl_kernels.linear_divergence.chunked import linear_divergence

FAST = {"xla_backend_optimization_level": 0}  # of compilation
B, T, V = 2, 7, 23
LN = np.log


def from_logits(student, teacher, **settings):
    """The divergence of two sets of logits: hidden states are the logits, heads the identity."""
    eye = jnp.eye(student.shape[-1])
    return linear_divergence(student, eye, teacher, eye, **settings)


def inputs(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = (B, T, 5), (V, 5), (B, T, 8), (V, 8)
    student, head, teacher, teacher_head = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    return student, head, 2 * teacher, teacher_head


def oracle(hs, ws, ht, wt, *, beta=0.0, temperature=1.0, top_k=0, student_softcap=None, teacher_softcap=None):
    """(divergence, its gradient by the student's products hidden head^T), float64."""

    def softmax(hidden, head, cap):
        products = hidden.astype(np.float64) @ head.astype(np.float64).T
        logits = cap * np.tanh(products / cap) if cap else products
        weights = np.exp((logits - logits.max(-1, keepdims=True)) / temperature)
        return weights / weights.sum(-1, keepdims=True), 1 - (logits / cap) ** 2 if cap else 1.0

    (q, slope), (p, _) = softmax(hs, ws, student_softcap), softmax(ht, wt, teacher_softcap)
    outcome = np.broadcast_to(np.arange(V), p.shape)  # of each token; those outside the top k share one
    if top_k:
        rank = np.argsort(np.argsort(-p, axis=-1), axis=-1)
        outcome = np.minimum(rank, top_k)
    member = outcome[..., None] == np.arange(V)
    p, q_of = np.einsum("btv,btvo->bto", p, member), np.einsum("btv,btvo->bto", q, member)
    with np.errstate(divide="ignore", invalid="ignore"):
        m = beta * p + (1 - beta) * q_of
        kl = lambda a, b: np.where(a > 0, a * np.log(a / b), 0).sum(-1)
        if beta == 0:
            value, by_q = kl(p, q_of), -p / q_of
        elif beta == 1:
            value, by_q = kl(q_of, p), np.log(q_of / p) + 1
        else:
            value = beta * kl(p, m) + (1 - beta) * kl(q_of, m)
            by_q = (1 - beta) * (np.log(q_of / m) + 1 - (beta * p + (1 - beta) * q_of) / m)
    by_q = np.einsum("bto,btvo->btv", np.nan_to_num(by_q), member)
    return value, q * (by_q - (q * by_q).sum(-1, keepdims=True)) * slope / temperature


SETTINGS = [
    ({"beta": 0.0}, 2),
    ({"beta": 0.3, "temperature": 1.7}, 100),
    ({"beta": 1.0, "top_k": 4, "temperature": 0.8}, 3),
    ({"beta": 0.3, "top_k": 4}, 7),
    ({"beta": 0.0, "student_softcap": 3.0, "teacher_softcap": 2.0, "top_k": 22}, 1),
]


@pytest.mark.parametrize(("settings", "chunk"), SETTINGS)
def test_values_and_gradients_equal_the_oracle(settings, chunk):
    """The gradient reaches the student's hidden states and head, not the teacher's."""
    weights = np.linspace(-1, 1, B * T).reshape(B, T).astype(np.float32)

    def total(*arrays):
        each = linear_divergence(*arrays, **settings, chunk=chunk)
        return jnp.sum(weights * each), each

    run = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True), compiler_options=FAST)
    gradients, values = run(*inputs())
    student, head, *_ = inputs()
    wanted, d_products = oracle(*inputs(), **settings)
    d_products *= weights[..., None]
    assert_close(values, wanted)
    assert_close(gradients[0], d_products @ head)
    assert_close(gradients[1], np.einsum("btv,btd->vd", d_products, student))
    assert not np.any(gradients[2]) and not np.any(gradients[3])


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
    # tokens that tie with the k-th are kept, too
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


def test_equal_distributions_have_divergence_0_and_pooling_never_adds():
    student, head, teacher, teacher_head = inputs()
    run = jax.jit(functools.partial(linear_divergence, beta=0.5, top_k=5), compiler_options=FAST)
    assert_close(run(student, head, student, head), np.zeros((B, T)))
    pooled, (whole, _) = run(student, head, teacher, teacher_head), oracle(*inputs(), beta=0.5)
    assert (pooled <= whole + 1e-6).all() and (pooled >= -1e-6).all()


@pytest.mark.parametrize(("beta", "top_k"), [(0.0, 0), (0.5, 2), (1.0, 2)])
def test_extreme_logits_give_finite_values_and_gradients(beta, top_k):
    """Certain teachers and students, right and wrong, and a teacher with equal logits for all tokens."""
    sure = 500 * np.eye(4, dtype=np.float32)[None]
    teacher = np.concatenate([sure, np.zeros((1, 4, 4), np.float32)], 1)
    student = np.concatenate([sure[:, :2], sure[:, 1::-1], sure], 1)
    total = lambda x: from_logits(x, teacher, beta=beta, top_k=top_k).sum()
    value, gradient = jax.jit(jax.value_and_grad(total), compiler_options=FAST)(student)
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_heads_padded_differently_use_the_rows_that_both_have():
    student, head, teacher, teacher_head = inputs()
    padded = np.concatenate([teacher_head, np.ones((9, 8), np.float32)])
    assert_close(linear_divergence(student, head, teacher, padded), oracle(*inputs())[0])


def test_bfloat16_inputs_give_float32():
    got = linear_divergence(*inputs(jnp.bfloat16), beta=0.5, chunk=3)
    assert got.dtype == jnp.float32
    assert_close(got, oracle(*inputs(jnp.bfloat16), beta=0.5)[0], jnp.bfloat16)


def test_rows_sharded_over_devices_change_nothing():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    shardings = (rows, replicated, rows, replicated)
    arrays = [jax.device_put(x, s) for x, s in zip(inputs(), shardings, strict=True)]
    with jax.set_mesh(mesh):
        got = linear_divergence(*arrays, beta=0.5, top_k=3, chunk=2)
    assert_close(got, oracle(*inputs(), beta=0.5, top_k=3)[0])


def test_impossible_settings_are_refused():
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
