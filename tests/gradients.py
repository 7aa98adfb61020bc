"""Gradients of whole updates, and the bound to which two ways to compute them agree."""

import jax
import numpy as np
import optax
import pytest

from jaxrl_llm import models
from jaxrl_llm.models.lora import split_params

SUM = optax.sgd(1e-3, momentum=1.0)
"""Its momentum is the sum of the gradients, without the rounding of weights that they are added to."""


def gradients_of(state):
    """Return the momentum of `SUM` by the names of the trained weights."""
    names = [name for name, x in models.named_leaves(split_params(state.params)[0]) if x is not None]
    return dict(zip(names, jax.device_get(jax.tree.leaves(state.opt_state[0].trace)), strict=True))


def assert_same(got, wanted, rel=1e-5):
    """Compare (metrics, gradients), each metric by itself."""
    (metrics, gradients), (metrics_0, gradients_0) = got, wanted
    near = {name: pytest.approx(x, rel=rel, abs=rel / 10) for name, x in metrics_0.items()}
    different = {name: (metrics.get(name), x) for name, x in near.items() if metrics.get(name) != x}
    assert not different and metrics.keys() == near.keys(), different
    assert_same_gradients(gradients, gradients_0, rel)


def assert_same_gradients(gradients, expected, rel=1e-5, zeros=()):
    """Compare each gradient relative to its largest value, which is 0 for `zeros` and indexers alone."""
    assert gradients.keys() == expected.keys()
    for name, x in expected.items():
        largest = np.abs(x).max()
        assert (largest > 1e-6) == (name not in zeros and ".index_" not in name), name
        np.testing.assert_allclose(gradients[name], x, rtol=0, atol=rel * largest, err_msg=name)
