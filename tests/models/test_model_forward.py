"""One forward: packed or apart, deep or shallow, kept or recomputed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import random_params

from jaxrl_kernels import dispatch
from jaxrl_llm import models
from jaxrl_llm.errors import UserError
from jaxrl_llm.learn.finite import add_gradients
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.models.experts.router import SELECTION_BIAS, reads_float32
from jaxrl_llm.models.global_heads import GlobalHeads
from jaxrl_llm.models.kernels import describe_kernels
from jaxrl_llm.models.mixer_config import ConvConfig, DeltaConfig, IndexConfig, MambaConfig, MLAConfig
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

CONFIG = models.TransformerConfig(
    vocab_size=64,
    hidden_size=32,
    mlp_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=16,
    initializer_range=0.3,
)
WINDOWED = dataclasses.replace(CONFIG, sliding_window=5, window_layers=(False, True))
DYNAMIC = dataclasses.replace(CONFIG, rope=models.RopeConfig(scaling="dynamic", factor=2.0, theta=100.0))
MIXED = dataclasses.replace(
    WINDOWED,
    norms="both",
    norm_offset=1.0,
    embedding_multiplier=32**0.5,
    local_rope=models.RopeConfig(theta=100.0),
    rope=models.RopeConfig(original_max_position=4, query_growth=0.4),
    rope_layers=(False, True),
)
HYBRID = dataclasses.replace(
    CONFIG,
    num_layers=4,
    layer_kinds=("delta", "attention") * 2,
    attention_gate=True,
    delta=DeltaConfig(2, 4, 8, 8, conv_width=3),
)
SEPARATE = dataclasses.replace(
    HYBRID,
    norms="after",
    initializer_range=0.1,  # rounding of states that turn round is 2e-5 with larger weights
    delta=DeltaConfig(2, 4, 8, 8, projections="separate", negative_eigenvalues=True),
)
SHORT_CONV = dataclasses.replace(
    CONFIG,
    num_layers=4,
    layer_kinds=("conv", "attention") * 2,
    conv=ConvConfig(conv_bias=True),
)
GEMMA4 = dataclasses.replace(
    MIXED,
    rope_layers=None,
    rope=models.RopeConfig(scaling="proportional", partial_rotary=0.25),
    global_heads=GlobalHeads(1, 16, keys_as_values=True),
    value_norm=True,
    layer_scalar=True,
    moe=MoEConfig(4, 2, 16, 48, shared_gate=False, branches=True),
)
GEMMA4_SMALL = dataclasses.replace(
    GEMMA4,
    num_layers=3,
    window_layers=(True, False, True),
    shared_kv_layers=1,
    wide_shared_mlp=True,
    per_layer_inputs=6,
    moe=None,
)
MAMBA = dataclasses.replace(
    CONFIG,
    num_layers=5,
    layer_kinds=("mamba", "mlp", "attention", "mamba", "experts"),
    one_branch=True,
    mamba=MambaConfig(4, 8, 6, 2, conv_width=3),
    moe=MoEConfig(4, 2, 16, latent_size=12),
    activation="relu2",
    mlp_gate=False,
    rope_layers=(False,) * 5,
)
CONFIGS = pytest.mark.parametrize(
    "config",
    [
        pytest.param(CONFIG, id="full"),
        pytest.param(WINDOWED, id="window in one layer", marks=pytest.mark.slow),
        pytest.param(DYNAMIC, id="dynamic rope", marks=pytest.mark.slow),
        pytest.param(MIXED, id="mixed layers"),
        pytest.param(GEMMA4, id="heads of two sizes", marks=pytest.mark.slow),
        pytest.param(GEMMA4_SMALL, id="shared keys, per-layer inputs"),
        pytest.param(HYBRID, id="delta rule"),
        pytest.param(SHORT_CONV, id="short convolution"),
        pytest.param(MAMBA, id="mamba"),
    ],
)
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


init = functools.cache(random_params)


@quick
def hidden_of(params, tokens, positions, segments):
    return params(tokens, positions, segments)


def trajectories():
    """Three, of 9, 21 and 5 tokens; the second is longer than max_position."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 64, n) for n in (9, 21, 5)]


def packed(length=40):
    """All three in one row, then padding."""
    tokens, positions, segments = row = np.zeros((3, 1, length), np.int32)
    start = 0
    for number, ids in enumerate(trajectories(), 1):
        end = start + len(ids)
        tokens[0, start:end] = ids
        positions[0, start:end] = np.arange(len(ids))
        segments[0, start:end] = number
        start = end
    return row


@CONFIGS
def test_packed_row_equals_separate_rows(config):
    params = init(config)
    together = hidden_of(params, *packed())[0]
    assert np.isfinite(together).all()
    lengths = [len(ids) for ids in trajectories()]
    tokens, positions, segments = np.zeros((3, 3, max(lengths)), np.int32)
    for row, ids in enumerate(trajectories()):
        tokens[row, : len(ids)], positions[row, : len(ids)] = ids, np.arange(len(ids))
        segments[row, : len(ids)] = 1
    apart = hidden_of(params, tokens, positions, segments)
    joined = np.concatenate([row[:length] for row, length in zip(apart, lengths, strict=True)])
    # Rounding differs by processor and JAX: 2.1e-5 and 7e-5 were seen in float32, and 0 in float64.
    atol = {GEMMA4: 4e-5, GEMMA4_SMALL: 2e-4}.get(config, 2e-5)
    np.testing.assert_allclose(together[: len(joined)], joined, atol=atol)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(GEMMA4_SMALL, id="shared keys, per-layer inputs"),
        pytest.param(GEMMA4, id="heads of two sizes", marks=pytest.mark.slow),
        pytest.param(HYBRID, id="delta rule", marks=pytest.mark.slow),
        pytest.param(MAMBA, id="mamba", marks=pytest.mark.slow),
    ],
)
def test_weights_of_reads_float32_are_not_rounded(config):
    """A change of 2^-9 is lost by rounding to bfloat16. Rollouts and optimizers go by the same list."""
    params = jax.tree.map(lambda w: jnp.asarray(w, jnp.bfloat16).astype(jnp.float32), init(config))
    leaves, tree = jax.tree.flatten(params)
    forward = quick(lambda params: params(*map(jnp.asarray, packed()), dtype="bfloat16"))
    plain = forward(params)
    names = [name for name, _ in models.named_leaves(params)]
    read = {name: i for i, name in enumerate(names) if reads_float32(name) and SELECTION_BIAS not in name}
    assert any("norm" in name for name in read)
    for name, i in read.items():
        changed = [leaf * (1 + 2.0**-9) if n == i else leaf for n, leaf in enumerate(leaves)]
        assert (forward(jax.tree.unflatten(tree, changed)) != plain).any(), name


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(SHORT_CONV, id="short convolution"),
        pytest.param(HYBRID, id="delta rule", marks=pytest.mark.slow),
        pytest.param(SEPARATE, id="delta rule, betas up to 2", marks=pytest.mark.slow),
        pytest.param(MAMBA, id="mamba", marks=pytest.mark.slow),
    ],
)
def test_a_packed_row_has_the_gradient_of_separate_rows(config):
    """Of all weights, for random gradients of the hidden states: nothing passes a border or is lost there."""
    row = packed()
    seeds = np.random.default_rng(1).normal(size=(1, 40, 32)) * (row[2] > 0)[..., None]
    gradient = quick(jax.grad(lambda params, seeds, *row: (params(*row) * seeds).sum()))
    together = gradient(init(config), seeds, *row)
    apart = [gradient(init(config), seeds * (row[2] == number)[..., None], *row) for number in (1, 2, 3)]
    alone = []
    for number, ids in enumerate(trajectories(), 1):
        own = np.zeros((3, 1, 40), np.int32)
        own[:, 0, : len(ids)] = ids, np.arange(len(ids)), np.ones(len(ids))
        own_seeds = np.zeros_like(seeds)
        own_seeds[:, : len(ids)] = seeds[:, row[2][0] == number]
        alone.append(gradient(init(config), own_seeds, *own))
    assert_trees_close = lambda a, b: jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max()), a, b
    )
    assert_trees_close(together, jax.tree.map(lambda *xs: sum(xs), *alone))
    for one, other in zip(apart, alone, strict=True):
        assert_trees_close(one, other)


SHARED = dataclasses.replace(CONFIG, attention_sinks=True, attention_softcap=5.0)
LATENT = dataclasses.replace(CONFIG, num_kv_heads=4, head_dim=12, mla=MLAConfig(16, 20, 8, 4, value_dim=6))


INDEXED = dataclasses.replace(LATENT, index=IndexConfig(4, 2, 9), index_layers=(True, False) * 8)


@pytest.mark.parametrize(
    "config", [SHARED, LATENT, INDEXED], ids=["softcap and sinks", "latent attention", "indexer"]
)
def test_shared_prefixes_give_what_rows_of_their_own_give(config):
    """Segments 2 and 5 continue 1, 3 and 4 continue 2, and 7 continues 6."""
    lengths, starts, last = [6, 5, 4, 3, 5, 4, 3], [0, 6, 11, 11, 6, 0, 4], [5, 4, 3, 4, 5, 7, 7]
    texts = np.split(np.random.default_rng(0).integers(0, 64, sum(lengths)), np.cumsum(lengths)[:-1])
    row = np.zeros((4, 1, 36), np.int32)  # and much padding
    numbers = np.repeat(range(1, 8), lengths), np.repeat(last, lengths)
    positions = [start + np.arange(n) for start, n in zip(starts, lengths, strict=True)]
    row[:, 0, : sum(lengths)] = np.stack([np.concatenate(texts), np.concatenate(positions), *numbers])
    params = init(config)
    together = quick(lambda params, last, *row: params(*row, last=last))(params, row[3], *row[:3])[0]

    paths = [(0, 1, 2), (0, 1, 3), (0, 4), (5, 6)]
    tokens, segments = np.zeros((2, len(paths), 15), np.int32)
    for number, path in enumerate(paths):
        own = np.concatenate([texts[i] for i in path])
        tokens[number, : len(own)], segments[number, : len(own)] = own, 1
    apart = hidden_of(params, tokens, np.broadcast_to(np.arange(15, dtype=np.int32), tokens.shape), segments)
    parts = np.split(np.asarray(together), np.cumsum(lengths))
    for path, alone in zip(paths, apart, strict=True):
        shared = np.concatenate([parts[i] for i in path])
        np.testing.assert_allclose(shared, alone[: len(shared)], atol=1e-5)


def test_dynamic_rope_reads_whole_trajectories_and_shares_no_prefixes():
    tokens, positions, segments = (jnp.asarray(x) for x in packed())
    with pytest.raises(ValueError, match="dynamic RoPE takes no shared prefixes"):
        models.abstract(DYNAMIC)(tokens, positions, segments, last=segments)


def test_padding_and_later_tokens_have_no_influence():
    params = init(CONFIG)
    tokens, positions, segments = packed()
    changed = lambda start, end: np.where((start <= np.arange(40)) & (np.arange(40) < end), 7, tokens)
    before = np.asarray(hidden_of(params, tokens, positions, segments))
    padded = changed(35, 40)
    np.testing.assert_array_equal(before[:, :35], hidden_of(params, padded, positions, segments)[:, :35])
    after = np.asarray(hidden_of(params, changed(20, 30), positions, segments))
    np.testing.assert_array_equal(before[:, :20], after[:, :20])
    np.testing.assert_array_equal(before[:, 30:35], after[:, 30:35])  # another trajectory
    assert np.abs(before[:, 20:30] - after[:, 20:30]).max() > 0.1


@functools.cache
def gradient(remat):
    run = quick(jax.grad(lambda params, *row: (params(*row, remat=remat) ** 2).sum()))
    return jax.tree.map(np.asarray, run(init(WINDOWED), *packed()))


@pytest.mark.parametrize("remat", ["dots", "attention", "full"])
def test_remat_changes_no_gradient(remat):
    for one, other in zip(jax.tree.leaves(gradient("none")), jax.tree.leaves(gradient(remat)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(one).max())


def test_layer_inputs_in_host_memory_change_no_bit_of_the_gradient():
    for one, other in zip(
        jax.tree.leaves(gradient("full")), jax.tree.leaves(gradient("offload")), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    loss = lambda params, *row: params(*row, remat="offload").sum()
    jaxpr = jax.make_jaxpr(jax.grad(loss))(models.abstract(CONFIG), *packed())
    stacks = [v.aval for e in equations(jaxpr.jaxpr) for v in e.outvars if "<host>" in str(v.aval)]
    shape = (*packed()[0].shape, CONFIG.hidden_size)
    assert {x.shape for x in stacks} == {shape, (CONFIG.num_layers, *shape)}


@pytest.mark.parametrize("config", [CONFIG, WINDOWED], ids=["full", "windows"])
def test_the_gradient_program_does_not_grow_with_depth(config):
    """As many equations for 32 layers as for 16."""

    def size(num_layers):
        windows = None if config.window_layers is None else (False, True) * (num_layers // 2)
        deep = dataclasses.replace(config, num_layers=num_layers, window_layers=windows)
        loss = lambda p, *row: p(*row, remat="dots").sum()
        jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(models.abstract(deep), *packed())
        return sum(1 for _ in equations(jaxpr.jaxpr))

    assert size(16) == size(32)


def test_layers_of_a_pattern_are_read_from_their_stack_and_not_copied():
    """A forward pass holds the weights of one repetition at most (of four), the gradients of a second
    micro-batch besides their buffer, too; the same program with slices of the stack held all."""
    kinds, delta = ("delta", "delta", "attention") * 4, DeltaConfig(2, 4, 8, 8, 4)
    hybrid = dataclasses.replace(CONFIG, num_layers=12, layer_kinds=kinds, delta=delta, mlp_size=4096)
    weights = models.abstract(hybrid)
    stacked = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weights))

    def add(weights, sums, *row):
        loss, backward = jax.vjp(lambda p: p(*row, remat="full").sum(), weights)
        return add_gradients(backward, loss, weights, sums, loss_scale=None)

    def temporary(function, *args):
        return jax.jit(function).lower(*args, *packed()).compile().memory_analysis().temp_size_in_bytes

    assert temporary(lambda p, *row: p(*row), weights) < 0.4 * stacked
    assert temporary(add, weights, weights) < 0.7 * stacked


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize(
    ("kind", "dtype", "line"),
    [
        (
            "cpu",
            "float32",
            "attention blockwise, log-probs chunked (cpu: plain JAX, there are no kernels for it)",
        ),
        (
            "NVIDIA H100 80GB HBM3",
            "bfloat16",
            "attention pallas_gpu, log-probs pallas_gpu (NVIDIA H100 80GB HBM3: Pallas kernels for Hopper)",
        ),
        (
            "NVIDIA H100 80GB HBM3",
            "float32",
            "attention blockwise, log-probs chunked (wgmma multiplies bfloat16 and float16, not float32)",
        ),
    ],
)
def test_the_line_on_kernels_names_them_and_the_reason(kind, dtype, line, monkeypatch):
    platform = "cpu" if kind == "cpu" else "gpu"
    monkeypatch.setattr(dispatch, "device", lambda: (platform, kind))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    assert describe_kernels(models.TransformerConfig(), dtype, mesh) == line
    assert "--strict" in describe_kernels(models.TransformerConfig(), dtype, mesh, strict=True)
    experts = describe_kernels(models.TransformerConfig(moe=MoEConfig()), dtype, mesh)
    assert f", experts {'tiled' if dtype == 'float32' else 'pallas_gpu'} (" in experts


def test_the_line_on_kernels_names_the_delta_rule(monkeypatch):
    monkeypatch.setattr(dispatch, "device", lambda: ("tpu", "TPU v5p"))
    config = models.TransformerConfig(layer_kinds=("delta", "attention") * 14, delta=DeltaConfig())
    line = describe_kernels(config, "bfloat16", make_mesh(MeshConfig(), jax.devices()[:1]))
    assert line.endswith("delta rule pallas_tpu (TPU v5p: Pallas kernels for TPU)")


def test_a_bad_kernels_setting_is_the_users_error(monkeypatch):
    monkeypatch.setenv("JAXRL_KERNELS", "triton")
    with pytest.raises(UserError, match='JAXRL_KERNELS=triton: must be "auto", "jax"'):
        describe_kernels(models.TransformerConfig(), "float32", make_mesh(MeshConfig(), jax.devices()[:1]))
