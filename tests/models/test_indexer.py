"""The sparse indexer: which keys are chosen, ties, blocks of queries, and keys in caches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from family_cases import BASE, CASES, INDEXED
from hf_oracle import TOLERANCE, agree_in_greedy_text, hf_logits, our_logits
from random_weights import random_params

from jaxrl_llm import models
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.learn.optim import decayed
from jaxrl_llm.models import indexer
from jaxrl_llm.models.decode import init_ring_cache
from jaxrl_llm.models.indexer import (
    IndexInputs,
    choose_keys,
    index_scores,
    pack_keys,
    select_keys,
    unpack_keys,
)
from jaxrl_llm.models.paged import init_paged_cache
from tests.models.test_families import oracle, ours, some_tokens

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
CONFIG = read_config({"model_type": "glm_moe_dsa", **BASE, **INDEXED, "index_n_heads": 2})


def chosen(scores, seen, topk):
    """Columns that one query chooses."""
    found = select_keys(
        jnp.asarray(scores, jnp.float32)[None, None], jnp.asarray(seen, bool)[None, None], topk
    )
    return np.flatnonzero(found).tolist()


def test_scores_by_hand():
    """Heads (1, 0) and (0, 1) of weights 2 and -1: 2 relu(k0) - relu(k1)."""
    q, keys = jnp.eye(2)[None, None], jnp.array([[[3.0, 1.0], [-3.0, 4.0], [-1.0, -1.0]]])
    np.testing.assert_array_equal(index_scores(q, jnp.array([[[2.0, -1.0]]]), keys), [[[5, -4, 0]]])


@pytest.mark.parametrize(
    ("scores", "seen", "topk", "expected"),
    [
        ([1, 5, 3, 4], [1, 1, 1, 1], 2, [1, 3]),
        ([1, 5, 3, 4], [1, 0, 1, 1], 2, [2, 3]),  # another segment, or a later token
        ([0, 7, 0, 0], [1, 1, 1, 1], 3, [0, 1, 2]),  # of equal ones the first
        ([2, 2, 2, 9], [0, 1, 1, 1], 2, [1, 3]),
        ([-1, -5, -1, -3], [1, 1, 1, 0], 2, [0, 2]),
        ([1, 2, 3, 4], [1, 1, 0, 0], 3, [0, 1]),  # fewer than topk
        ([1, 2, 3, 4], [0, 0, 0, 0], 3, []),  # padding
        ([0.0, -0.0, 0.0, 1.0], [1, 1, 1, 1], 3, [0, 1, 3]),
        ([3, 1, 2, 0], [1, 1, 1, 0], 9, [0, 1, 2]),
    ],
)
def test_the_highest_seen_scores_are_chosen(scores, seen, topk, expected):
    assert chosen(scores, seen, topk) == expected


def test_of_equal_scores_a_ring_chooses_the_oldest():
    """The oldest of six keys is in column 4: columns by age are 4, 5, 0, 1, 2, 3. All scores are equal."""
    config = dataclasses.replace(CONFIG, index=dataclasses.replace(CONFIG.index, topk=3))
    index = IndexInputs(jnp.zeros((1, 1, 2, 16)), jnp.ones((1, 6, 16)), jnp.ones((1, 1, 2)))
    seen = jnp.array([1, 1, 1, 1, 0, 1], bool)[None, None]  # column 4 is empty
    assert np.flatnonzero(choose_keys(config, index, seen, 4)).tolist() == [0, 1, 5]


@pytest.mark.parametrize("heads", [1, 3])
def test_index_keys_come_back_from_the_cache(heads):
    x, keys = jnp.arange(2 * 5 * heads * 4.0).reshape(2, 5, heads, 4), jnp.ones((2, 5, 16))
    packed = pack_keys(CONFIG, x, IndexInputs(None, keys, None))
    assert packed.shape == (2, 5, heads, 4 + -(-16 // heads))
    for found, expected in zip(unpack_keys(CONFIG, packed), (x, keys), strict=True):
        np.testing.assert_array_equal(found, expected)


def stable_topk(scores, count, dim=-1):
    """torch's `topk` with a rule for equal scores, which torch does not have: the first ones."""
    order = torch.sort(scores, dim=dim, descending=True, stable=True)
    return torch.return_types.topk((order.values[..., :count], order.indices[..., :count]))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["deepseek-v3.2", "glm-5, shared"])
def test_ties_are_those_of_transformers_with_a_stable_sort(case, monkeypatch):
    """With two index heads a quarter of the scores are exactly 0."""
    family, changes = CASES[case]
    monkeypatch.setitem(CASES, "few heads", (family, {**changes, "index_n_heads": 2}))
    model, tokens = oracle("few heads"), some_tokens()
    unstable = hf_logits(model, tokens)
    monkeypatch.setattr(torch.Tensor, "topk", stable_topk)
    theirs, params = hf_logits(model, tokens), ours(model)
    assert np.abs(theirs - unstable).max() > 0.01  # the rule matters
    np.testing.assert_allclose(our_logits(params, tokens), theirs, atol=TOLERANCE, rtol=0)
    agree_in_greedy_text(model, params, some_tokens(rows=8, length=12), new=24)


def test_the_choice_matters_only_beyond_topk_tokens():
    """The first 7 tokens read all earlier tokens, later ones do not."""
    params, tokens = ours(oracle("deepseek-v3.2")), jnp.asarray(some_tokens())
    index = dataclasses.replace(params.config.index, topk=100)
    wide = models.abstract(dataclasses.replace(params.config, index=index))
    wide = jax.tree.unflatten(jax.tree.structure(wide), jax.tree.leaves(params))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    few, many = (jax.jit(lambda p: p(tokens, positions))(p) for p in (params, wide))
    difference = np.abs(np.asarray(few - many)).max(axis=(0, 2))
    assert difference[:7].max() < 1e-5 and (difference[8:] > 1e-3).all()


@pytest.mark.slow
def test_blocks_of_queries_change_no_value_and_no_gradient(monkeypatch):
    """37 queries in blocks of 8."""
    params, tokens = random_params(CONFIG), jnp.asarray(some_tokens())
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    weights = np.random.default_rng(1).normal(size=(*tokens.shape, BASE["hidden_size"]))
    run = lambda: jax.jit(jax.value_and_grad(lambda p: jnp.sum(p(tokens, positions) * weights)))(params)
    expected = run()
    monkeypatch.setattr(indexer, "MAX_SCORES", 1)
    assert indexer.block_of_queries(CONFIG, 37) == 8
    for found, x in zip(*map(jax.tree.leaves, (run(), expected)), strict=True):
        np.testing.assert_allclose(found, x, atol=1e-5 * max(np.abs(x).max(), 1e-6))


def test_an_indexer_has_no_gradient_and_no_decay():
    params, tokens = random_params(CONFIG), jnp.asarray(some_tokens())
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(p(tokens, positions) ** 3)))(params)
    parts = ("q", "k", "k_norm", "k_norm_bias", "weights")
    frozen = {name: not np.any(x) for name, x in models.named_leaves(gradient)}
    assert {name for name, zero in frozen.items() if zero and name != "lm_head"} == {
        "layers.router_bias",
        *(f"{stack}.index_{part}" for stack in ("layers", "dense_layers") for part in parts),
    }
    decays = zip(models.named_leaves(params), jax.tree.leaves(decayed(params)), strict=True)
    assert not any(on for (name, _), on in decays if "index_" in name)


def test_caches_count_index_keys():
    """16 numbers a token and layer beside the latents; in strict mode as parts of 4 heads."""
    config, plain = CONFIG, dataclasses.replace(CONFIG, index=None)
    size = lambda cache: sum(x.nbytes for x in jax.tree.leaves((cache.k, cache.v)))
    ring = [jax.eval_shape(lambda c=c: init_ring_cache(c, 3, 10, jnp.bfloat16)) for c in (config, plain)]
    numbers = 4 * 3 * 10 * 16
    assert sum(x.size for x in ring[0].k) - sum(x.size for x in ring[1].k) == numbers
    pages = [init_paged_cache(c, 5, 2, jnp.bfloat16) for c in (config, plain)]
    assert size(pages[0]) - size(pages[1]) == 2 * 4 * 10 * 16
    strict = [init_ring_cache(c, 3, 10, jnp.float32, strict=True) for c in (config, plain)]
    assert size(strict[0]) - size(strict[1]) == 2 * 4 * numbers  # values are as wide as keys


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"indexer_rope_interleave": False},
            "indexer_rope_interleave=False is not supported; supported: true",
        ),
        ({"rope_interleave": False}, "rope_interleave=False is not supported"),
        (
            {"indexer_types": ["shared"] + ["full"] * 3},
            "indexer_types=.* must be a list of 4 .* the first full",
        ),
        ({"indexer_types": ["full"]}, "indexer_types=.* must be a list of 4"),
        ({"indexer_types": ["full", 3, "full", "full"]}, "indexer_types=.* must be a list of 4"),
        ({"index_topk_pattern": "FSSX"}, "indexer_types=.* must be a list of 4"),
        ({"index_topk_pattern": 7}, "indexer_types=7 must be a list of 4"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types=.* is not supported"),
        ({"index_kpool": 4}, "index_kpool=4 is not supported"),
        ({"index_topk": 0}, "index_topk=0 must be"),
        ({"q_lora_rank": None}, "index is set: it needs mla with a q_rank"),
    ],
)
def test_what_an_indexer_lacks_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        read_config({"model_type": "glm_moe_dsa", **BASE, **INDEXED, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"index_topk_pattern": "FSSF"}, (True, False, False, True)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (True, False, True, False)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 2}, (True, True, False, True)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (True, True, True, False)),
        ({"index_topk_freq": 0}, None),
    ],
)
def test_layers_that_reuse_a_choice_are_those_of_transformers(changes, expected):
    raw = {**BASE, **INDEXED, **changes}
    theirs = [kind == "full" for kind in transformers.GlmMoeDsaConfig(**raw).indexer_types]
    assert read_config({"model_type": "glm_moe_dsa", **raw}).index_layers == expected
    assert theirs == list(expected or (True,) * 4)
