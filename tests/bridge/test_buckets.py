"""Buckets of weights: the bytes of an exported folder, from any layout, a few tensors at a time."""

import dataclasses
import functools
import io
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distributed import run_processes
from safetensors.numpy import load_file

from jaxrl_llm import models
from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.bridge.transports.http_weights import pickle_bucket
from jaxrl_llm.hf import export
from jaxrl_llm.hf.names import hf_tensors
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN

MODEL = TransformerConfig(
    vocab_size=128, hidden_size=32, mlp_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
    tie_embeddings=False,
)  # fmt: skip
BIASED = dataclasses.replace(
    MODEL, family="qwen2", qk_norm=False, qkv_bias=True, tie_embeddings=True, value_head=True
)
BAICHUAN = dataclasses.replace(MODEL, family="baichuan", num_kv_heads=4, qk_norm=False)
EXPERTS = dataclasses.replace(MODEL, family="qwen3_moe", num_layers=2, moe=MoEConfig(16, 2, expert_size=24))


@functools.cache
def sharded(config):
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2) if config.moe else MeshConfig(fsdp=4, tensor=2))
    made = models.init(config, jax.random.key(0))
    return jax.device_put(made, models.shardings(config, mesh, TRAIN))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        pytest.param(MODEL, "float32", marks=pytest.mark.slow),
        (EXPERTS, "bfloat16"),
        pytest.param(BIASED, "float32", marks=pytest.mark.slow),
        (BAICHUAN, "bfloat16"),
    ],
    ids=["plain", "experts", "tied", "baichuan"],
)
def test_buckets_of_sharded_weights_hold_the_bytes_of_the_exported_folder(config, dtype, tmp_path):
    params = sharded(config)
    assert any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(params))
    source = WeightSource(config, dtype, limit=20_000)
    parts = list(source.parts(params))
    assert len(parts) > 2 and [p.last for p in parts] == [False] * (len(parts) - 1) + [True]
    assert all(p.num_bytes <= 20_000 or len(p.content.tensors) == 1 for p in parts)
    assert sum(p.num_bytes for p in parts) == source.num_bytes
    plain = models.without_value_head(params)
    export.save_model(plain, plain.config, tmp_path / "hf", dtype=dtype)
    expected = load_file(tmp_path / "hf/model.safetensors")
    found = {t.name: a for p in parts for t, a in zip(p.content.tensors, p.content.arrays, strict=True)}
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.dtype == expected[name].dtype and array.tobytes() == expected[name].tobytes(), name


@pytest.fixture
def started(monkeypatch):
    """Arrays that are copied to the host, one a dispatch."""
    started, array = [], type(jnp.zeros(1))
    copy = array.copy_to_host_async
    monkeypatch.setattr(array, "copy_to_host_async", lambda self: started.append(self) or copy(self))
    return started


def test_the_experts_of_a_layer_are_gathered_at_once_and_cut_on_the_host(started, tmp_path):
    """Each of 2 layers has 3 stacks of 16 experts and 9 other tensors; 3 are outside: 117 in 27 arrays."""
    params, num_stacks = sharded(EXPERTS), 2 * (9 + 3) + 3
    source = WeightSource(EXPERTS, "float32", limit=1 << 30)
    (part,) = source.parts(params)
    assert len(part.content.tensors) == 2 * (9 + 3 * 16) + 3 and len(started) == num_stacks
    started.clear()
    export.save_model(params, EXPERTS, tmp_path / "hf", dtype="float32")
    assert len(started) == num_stacks
    started.clear()
    parts = list(WeightSource(EXPERTS, "float32", limit=40_000).parts(params))
    assert len(started) - num_stacks < len(parts)  # a stack is cut only where a bucket ends


def test_the_next_bucket_is_on_its_way_and_no_other(started):
    """Never the whole model: at most one bucket is gathered ahead of the one in use."""
    source = WeightSource(MODEL, "float32", limit=20_000)
    counts = [len(group) for group in source.groups]
    for i, _ in enumerate(source.parts(sharded(MODEL))):
        assert len(started) == sum(counts[: i + 2])


def test_on_the_devices_every_one_has_whole_tensors():
    params = sharded(EXPERTS)
    host = list(WeightSource(EXPERTS, "float32", 50_000).parts(params))
    for here, there in zip(host, WeightSource(EXPERTS, "float32", 50_000).parts(params, True), strict=True):
        for array, copies in zip(here.content.arrays, there.content.arrays, strict=True):
            assert len(copies.addressable_shards) == 8 and copies.is_fully_replicated
            assert (np.asarray(copies.addressable_shards[5].data) == array).all()


def test_names_that_a_model_lacks_or_that_are_not_sent_are_said():
    source = WeightSource(MODEL, "float32", 1 << 20)
    wanted = {tensor.name: tensor.shape for tensor in hf_tensors(MODEL)}
    source.check_names(wanted, "it")
    wanted["model.norm.bias"] = wanted.pop("model.norm.weight")
    wanted["lm_head.weight"] = (128, 33)
    message = (
        "match it: 1 missing: model.norm.bias; 1 unknown: model.norm.weight; 1 of another shape: lm_head"
    )
    with pytest.raises(ValueError, match=message):
        source.check_names(wanted, "it")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_reads_the_pickle_that_is_written_without_it(dtype):
    torch = pytest.importorskip("torch")
    bucket = next(WeightSource(MODEL, dtype, 1 << 20).parts(sharded(MODEL))).content
    named = []

    class Listing(pickle.Unpickler):
        def find_class(self, module, name):
            named.append(f"{module}.{name}")
            return super().find_class(module, name)

    read = Listing(io.BytesIO(pickle_bucket(bucket))).load()
    assert [name for name, _ in read] == [tensor.name for tensor in bucket.tensors]
    for (_, tensor), array in zip(read, bucket.arrays, strict=True):
        assert tensor.dtype == getattr(torch, dtype) and tuple(tensor.shape) == array.shape
        assert (tensor.float().numpy() == array.astype(np.float32)).all()
    assert len({tensor.untyped_storage().data_ptr() for _, tensor in read}) == 1
    assert set(named) == {
        "torch.storage._load_from_bytes", "torch._utils._rebuild_tensor_v2", "collections.OrderedDict"
    }  # fmt: skip
    assert len(pickle_bucket(bucket)) < sum(array.nbytes for array in bucket.arrays) + 10_000


TWO_PROCESSES = """
import sys
import numpy as np
from jaxrl_llm import models
from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.hf.export import save_model
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN

config = TransformerConfig(
    family="qwen3_moe", vocab_size=64, hidden_size=16, mlp_size=24, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=4, moe=MoEConfig(4, 2, expert_size=8),
)
layout = models.shardings(config, make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2)), TRAIN)
params = jax.jit(models.init, static_argnums=0, out_shardings=layout)(config, jax.random.key(0))
assert not jax.tree.leaves(params)[0].is_fully_addressable
save_model(params, config, sys.argv[1], dtype="float32")
parts = list(WeightSource(config, "float32", 5_000).parts(params))
if jax.process_index() == 0:
    from safetensors.numpy import load_file
    stored = load_file(sys.argv[1] + "/model.safetensors")
    found = {t.name: a for p in parts for t, a in zip(p.content.tensors, p.content.arrays)}
    reference = models.init(config, jax.random.key(0))
    from hf_tensors import tensors_of
    expected = tensors_of(config, reference)
    assert found.keys() == stored.keys() == expected.keys()
    for name in expected:
        assert (found[name] == stored[name]).all(), name
        np.testing.assert_allclose(found[name], expected[name], atol=1e-6)
print(len(parts), [p.content is None for p in parts].count(True))
"""


@pytest.mark.slow
def test_two_processes_gather_and_the_first_one_sends(tmp_path):
    first, second = run_processes(TWO_PROCESSES, 2, [str(tmp_path / "hf")])
    count = int(first.split()[0])
    assert count > 3 and first.split() == [str(count), "0"] and second.split() == [str(count)] * 2
