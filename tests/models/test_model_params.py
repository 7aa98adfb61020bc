"""The weights as a pytree: names, axes, shardings, types."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from tiny_models import random_params

from jaxrl_llm import models
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import ROLLOUT, TRAIN

CONFIG = models.TransformerConfig(
    vocab_size=64, hidden_size=32, mlp_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8
)


def init(config, shardings=None):
    run = jax.jit(
        models.init,
        static_argnums=0,
        out_shardings=shardings,
        compiler_options={"xla_backend_optimization_level": 0},
    )
    return run(config, jax.random.key(0))


def test_names_and_shapes():
    found = {name: leaf.shape for name, leaf in models.named_leaves(models.abstract(CONFIG))}
    assert found == {
        "embed": (64, 32),
        "layers.attention_norm": (3, 32),
        "layers.down": (3, 48, 32),
        "layers.gate": (3, 32, 48),
        "layers.k": (3, 32, 2, 8),
        "layers.k_norm": (3, 8),
        "layers.mlp_norm": (3, 32),
        "layers.o": (3, 4, 8, 32),
        "layers.q": (3, 32, 4, 8),
        "layers.q_norm": (3, 8),
        "layers.up": (3, 32, 48),
        "layers.v": (3, 32, 2, 8),
        "norm": (32,),
    }


def test_fields_that_add_weights():
    changes = {
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "qk_norm": False,
        "tie_embeddings": False,
    }
    config = dataclasses.replace(CONFIG, **changes)
    names = {n for n, _ in models.named_leaves(models.abstract(config))}
    base = {n for n, _ in models.named_leaves(models.abstract(CONFIG))}
    biases = {f"layers.{n}_bias" for n in ("q", "k", "v", "o", "gate", "up", "down")}
    assert names - base == biases | {"lm_head"}
    assert base - names == {"layers.q_norm", "layers.k_norm"}


def test_abstract_is_init_without_numbers():
    shapes, params = models.abstract(CONFIG), init(CONFIG)
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(shapes)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(params)
    ]
    for (_, named), leaf in zip(models.named_leaves(params), jax.tree.leaves(params), strict=True):
        assert named is leaf


def test_init_statistics():
    """normal(0, 0.02); what writes into the residual stream is 1 / sqrt(2 L) of that; norms are 1."""
    config = dataclasses.replace(CONFIG, vocab_size=600, mlp_size=300, num_layers=8)
    leaves = dict(models.named_leaves(init(config)))
    for name, std in [("embed", 0.02), ("layers.q", 0.02), ("layers.gate", 0.02), ("layers.down", 0.005)]:
        np.testing.assert_allclose(leaves[name].std(), std, rtol=0.02)
    assert (leaves["layers.q_norm"] == 1).all() and (leaves["norm"] == 1).all()
    assert jnp.abs(leaves["layers.q"][0] - leaves["layers.q"][1]).max() > 0.01  # a key a layer
    assert jnp.abs(leaves["layers.k"] - leaves["layers.v"]).max() > 0.01


def test_logical_axes_name_every_dim():
    params = models.abstract(CONFIG)
    axes = models.logical_axes(params)
    assert axes["layers.q"] == ("layers", "embed", "heads", "head_dim")
    assert axes["layers.down"] == ("layers", "mlp", "embed")
    assert axes["embed"] == ("vocab", "table_embed")
    for name, leaf in models.named_leaves(params):
        assert len(axes[name]) == leaf.ndim
        assert set(axes[name]) <= set(TRAIN)


def test_init_makes_each_device_only_its_shard():
    """And the numbers do not depend on the sharding."""
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    shardings = models.shardings(CONFIG, mesh, TRAIN)
    params = init(CONFIG, shardings)
    assert jax.tree.structure(shardings) == jax.tree.structure(params)
    leaves = dict(models.named_leaves(params))
    assert leaves["layers.q"].addressable_shards[0].data.shape == (3, 8, 2, 8)
    assert leaves["embed"].addressable_shards[0].data.shape == (32, 8)
    assert leaves["layers.q_norm"].sharding.is_fully_replicated
    unsharded = init(CONFIG)
    for (name, one), other in zip(models.named_leaves(params), jax.tree.leaves(unsharded), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-8, err_msg=name)


EMBED = ("fsdp", "sequence", "expert")


def test_a_dim_that_does_not_divide_is_replicated():
    mesh = make_mesh(MeshConfig(fsdp=1, tensor=8))
    shardings = dict(models.named_leaves(models.shardings(CONFIG, mesh, TRAIN)))
    assert tuple(shardings["layers.gate"].spec) == ("stage", EMBED, "tensor")
    assert tuple(shardings["layers.k"].spec) == ("stage", EMBED, None, None)  # 2 heads on 8


def test_rollout_rules_replicate_weights_over_fsdp():
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    shardings = dict(models.named_leaves(models.shardings(CONFIG, mesh, ROLLOUT)))
    assert tuple(shardings["layers.q"].spec) == (None, None, "tensor", None)


def test_cast_keeps_structure_and_float32_norms():
    params = jax.tree.map(jnp.asarray, random_params(CONFIG))
    half = models.cast_weights(params, jnp.bfloat16)
    types = {name: str(x.dtype) for name, x in models.named_leaves(half)}
    assert {name for name, dtype in types.items() if dtype == "float32"} == {
        name for name in types if "norm" in name
    }
    assert jax.tree.structure(half) == jax.tree.structure(params)
    assert models.logical_axes(half) == models.logical_axes(params)


def test_no_weight_is_weakly_typed():
    """Such a weight has another type to jit than its copy in a checkpoint, so that programs compile twice."""
    leaves = jax.tree.leaves(models.abstract(models.TransformerConfig(norms="both", value_head=True)))
    assert not any(leaf.weak_type for leaf in leaves)
