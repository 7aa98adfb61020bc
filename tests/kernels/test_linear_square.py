import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_kernels.linear_logprob.square import linear_square


@pytest.mark.parametrize("chunk", [3, 7, 128])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_it_is_that_of_the_whole_softmax(chunk, softcap):
    hidden, head = (
        jax.random.normal(jax.random.key(0), (2, 7, 8)),
        jax.random.normal(jax.random.key(1), (11, 8)),
    )
    logits = hidden @ head.T
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    wanted = jnp.sum(jax.nn.softmax(logits / 0.7) ** 2, axis=-1)
    got = linear_square(hidden, head, temperature=0.7, softcap=softcap, chunk=chunk)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_by_hand():
    """Logits (0, ln 3): p = (1/4, 3/4), p^2 sums to 10/16."""
    got = linear_square(jnp.ones((1, 1, 1)), jnp.array([[0.0], [np.log(3.0)]]))
    np.testing.assert_allclose(got, 0.625, rtol=1e-6)
