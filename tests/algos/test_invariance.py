"""No split, packing, padding or order changes an on-line algorithm's loss, its gradient or its metrics."""

from dataclasses import replace

import chex
import numpy as np
import pytest
from sequences import run

from jaxrl_llm.algos import ALGOS, raft, requirements
from jaxrl_llm.algos.config import Correction, PolicyConfig

ON_LINE = sorted(n for n, a in ALGOS.items() if a is raft or isinstance(a.config, PolicyConfig))
OF_ITS_MICROBATCH = {"clip_cov", "kl_cov"}  # their covariances are centred on the tokens at hand
LENGTHS = [3, 5, 2, 4]
APART = [[[0], [1]], [[2], [3]]]  # two micro-batches of two rows
PACKED = [[[3, 1, 0, 2]]]  # one row


def per_token(seed=0):
    """Arrays of each sequence; log-probs near each other, so that some ratios are clipped, some are not."""
    random = np.random.default_rng(seed)
    policy = [-random.uniform(0.5, 2.0, n) for n in LENGTHS]
    near = lambda: [p + random.normal(0, 0.2, len(p)) for p in policy]
    others = dict(
        old_logprobs=near(),
        rollout_logprobs=near(),
        ref_logprobs=near(),
        entropy=[np.ones(n) for n in LENGTHS],
    )
    return policy, others | dict(advantages=[1.0, -1.0, 0.5, -0.7])


def everything_on(config):
    """KL, entropy and corrections at every level as well."""
    if not isinstance(config, PolicyConfig):
        return config
    correction = Correction(
        "sequence",
        cap=1.1,
        floor=0.9,
        reject=(("token_k2", 0.0, 0.05), ("seq_mean_k1", 0.8, 1.3), ("seq_max_k3", 0.0, 0.1)),
    )
    return replace(config, kl_coef=0.3, kl_in="loss", entropy_coef=0.1, correction=correction)


@pytest.mark.parametrize("name", ON_LINE)
def test_layout_changes_nothing(name):
    """NaN lies wherever no trained token does."""
    algorithm = ALGOS[name]
    config = everything_on(algorithm.config)
    if requirements(config).critic:
        config = replace(config, advantage="grpo")
    policy, others = per_token()
    apart = [[*APART[0], *APART[1]]] if name in OF_ITS_MICROBATCH else APART
    one = run(algorithm, config, policy, apart, **others)
    other = run(algorithm, config, policy, PACKED, **others)
    chex.assert_tree_all_finite(one)
    chex.assert_trees_all_close(one, other, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(one[2], other[2], rtol=1e-6, atol=1e-6)
    assert any(np.abs(gradient).max() > 1e-4 for gradient in one[2])
