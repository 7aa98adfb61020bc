"""Strict mode: log-probs of the rollout equal those of scoring and training, to the last bit."""

import dataclasses
import functools
import json
from concurrent.futures import Future

import jax
import numpy as np
import optax
import pytest
from family_cases import BASE, CASES, SPECIAL
from tiny_models import random_params

from jaxrl_llm import models
from jaxrl_llm.algos import grpo
from jaxrl_llm.config import DataConfig, ModelConfig, TrainConfig
from jaxrl_llm.data.packing import from_trajectory
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import TransformerConfig, lora
from jaxrl_llm.models.attention import for_length
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.models.global_heads import GlobalHeads
from jaxrl_llm.models.kernels import prefix_sharing
from jaxrl_llm.models.mixer_config import ConvConfig, DeltaConfig, IndexConfig, MambaConfig, MLAConfig
from jaxrl_llm.recipe.rule import apply_rules
from jaxrl_llm.recipe.rules_recipe import RECIPE
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import Reply, Request
from jaxrl_llm.rollout.native import kept as kept_turns
from jaxrl_llm.rollout.native.engine import NativeEngine, RolloutConfig
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.structs import Episode
from jaxrl_llm.train import main

QWEN = models.TransformerConfig(
    vocab_size=100, hidden_size=32, mlp_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    initializer_range=0.2, max_position=128,
)  # fmt: skip
OTHERS = dataclasses.replace(
    QWEN, sliding_window=7, window_layers=(True, False), qkv_bias=True, qk_norm=False, tie_embeddings=False,
    attention_softcap=2.0, attention_sinks=True, logit_softcap=3.0, num_heads=3, num_kv_heads=3,
)  # fmt: skip
LATENTS = dataclasses.replace(
    QWEN, num_kv_heads=4, head_dim=12, qk_norm=False, mla=MLAConfig(16, 20, 8, 4, 6), moe=MoEConfig(
        4, 2, 24, 24, shared_gate=False, score="sigmoid", groups=2, selection_bias=True, dense_layers=1
    ),
)  # fmt: skip
INDEXED = dataclasses.replace(
    LATENTS, num_layers=3, index=IndexConfig(5, 2, 9), index_layers=(True, False, True)
)
GPT_OSS = dataclasses.replace(
    QWEN, sliding_window=7, window_layers=(True, False), qkv_bias=True, out_bias=True, qk_norm=False,
    attention_sinks=True, moe=MoEConfig(6, 2, 24, score="softmax_of_chosen", bias=True, swiglu_limit=1.0),
)  # fmt: skip
GEMMA = dataclasses.replace(
    QWEN, sliding_window=7, window_layers=(True, False), norms="both", norm_offset=1.0,
    embedding_multiplier=32**0.5, local_rope=models.RopeConfig(theta=100.0),
)  # fmt: skip
GEMMA4 = dataclasses.replace(
    GEMMA, global_heads=GlobalHeads(1, 16, keys_as_values=True), value_norm=True, layer_scalar=True,
    rope=models.RopeConfig(scaling="proportional", partial_rotary=0.25),
    moe=MoEConfig(4, 2, 24, 48, added_to_sum=0.0, shared_gate=False, branches=True),
)  # fmt: skip
GEMMA4_SMALL = dataclasses.replace(
    GEMMA4, num_layers=3, window_layers=(True, False, True), shared_kv_layers=1, moe=None,
    wide_shared_mlp=True, per_layer_inputs=6,
)  # fmt: skip
HYBRID = dataclasses.replace(
    QWEN, num_layers=4, layer_kinds=("delta", "delta", "attention", "delta"), attention_gate=True,
    delta=DeltaConfig(2, 4, 8, 8),
)  # fmt: skip
TWO_LAYERS = dataclasses.replace(HYBRID, num_layers=2, layer_kinds=("delta", "attention"))
INDEXED_TWO_LAYERS = dataclasses.replace(INDEXED, num_layers=2, index_layers=(True, False))
NEGATIVE = dataclasses.replace(
    TWO_LAYERS,
    norms="after",
    delta=DeltaConfig(2, 4, 8, 8, projections="separate", negative_eigenvalues=True),
)
LFM2 = dataclasses.replace(
    QWEN, num_layers=3, layer_kinds=("conv", "attention", "conv"), conv=ConvConfig(),
    moe=MoEConfig(4, 2, 24, score="sigmoid", selection_bias=True, dense_layers=1),
)  # fmt: skip
MAMBA = dataclasses.replace(
    QWEN, num_layers=4, layer_kinds=("mamba", "mlp", "attention", "experts"), one_branch=True,
    mamba=MambaConfig(4, 8, 8, 2), activation="relu2", mlp_gate=False,
    moe=MoEConfig(4, 2, 24, 16, score="sigmoid", selection_bias=True, shared_gate=False, latent_size=12),
)  # fmt: skip
NO_ROPE = dataclasses.replace(
    QWEN, norms="after", qk_norm_over_heads=True, rope_layers=(False, True),
    rope=models.RopeConfig(original_max_position=8, query_growth=0.4),
)  # fmt: skip
ALIBI = dataclasses.replace(
    QWEN, alibi=True, rope_layers=(False, False), normalize_head=True, tie_embeddings=False
)
SHARED_PROJECTIONS = dataclasses.replace(TWO_LAYERS, delta=DeltaConfig(2, 4, 8, 8, projections="qkvz"))


def of_family(case):
    """A model of tests/family_cases.py with the vocabulary of the prompts here."""
    family, changes = CASES[case]
    config = read_config({"model_type": family, **BASE, **SPECIAL, **changes})
    return dataclasses.replace(for_length(config, 64), vocab_size=100, initializer_range=0.2)


ADAPTED = lora.with_lora(dataclasses.replace(QWEN, attention_sinks=True), models.LoraConfig(rank=4))
ADAPTED_LATENTS = lora.with_lora(LATENTS, models.LoraConfig(rank=4))
ADAPTED_GPT_OSS = lora.with_lora(GPT_OSS, models.LoraConfig(rank=4))
QUANTIZED_LATENTS = lora.with_lora(LATENTS, models.LoraConfig(rank=4, quantize="nf4"))
QUANTIZED = lora.with_lora(QWEN, models.LoraConfig(rank=4, quantize="nf4"))
TEMPERATURE = 0.7


def one_device():
    return make_mesh(MeshConfig(), jax.devices()[:1])


@functools.cache
def generated(config, dtype, slots=2, chunk=8, *, max_new_tokens=8):
    """Two responses each to prompts of 1 to 30 tokens, of equal length: they leave both slots together, so
    that one number of slots is compiled."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 100, n).astype(np.int32) for n in (5, 1, 30)]
    requests = [Request(prompt, i, 2, max_new_tokens + 3 * i) for i, prompt in enumerate(prompts)]
    rollout = RolloutConfig(slots=slots, dtype=dtype, chunk=chunk)
    engine = NativeEngine(rollout, config, one_device(), strict=True)
    engine.publish(random_params(config), version=0)
    return engine.generate(requests, SamplingConfig(temperature=TEMPERATURE), jax.random.key(1))


def learner(config, dtype, remat="full", strict=True, *, row_tokens=64, share=True):
    step = StepConfig(
        row_tokens, 2, dtype, remat, strict=strict, temperature=TEMPERATURE, share_prefixes=share
    )
    return Learner(grpo.Config(kl_coef=0.0), config, optax.sgd(1.0), step, mesh=one_device())


@functools.cache
def one_update(config, dtype, strict=True, share=True):
    """(metrics, gradient) with advantages 1, -1, 1, ..."""
    built = learner(config, dtype, strict=strict, share=share)
    items = [from_trajectory(t) for t in generated(config, dtype)]
    for i, item in enumerate(items):
        item.signals["advantages"] = np.full(len(item.tokens), 1.0 - 2.0 * (i % 2), np.float32)
    before = random_params(config)
    params = jax.device_put(jax.tree.map(np.array, before))
    with jax.set_mesh(built.mesh):
        state, metrics = built.update(built.init_state(params), [items])
    change = jax.tree.map(lambda a, b: a - np.array(b), before, state.params)
    return jax.device_get(metrics), change


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (QWEN, "float32"),
        pytest.param(QWEN, "bfloat16", marks=pytest.mark.slow),
        pytest.param(OTHERS, "float32", marks=pytest.mark.slow),
        pytest.param(GPT_OSS, "bfloat16", marks=pytest.mark.slow),
        pytest.param(GEMMA4, "float32", marks=pytest.mark.slow),
        pytest.param(GEMMA4_SMALL, "float32", marks=pytest.mark.slow),
        pytest.param(GEMMA4_SMALL, "bfloat16", marks=pytest.mark.slow),
        pytest.param(HYBRID, "float32", marks=pytest.mark.slow),
        pytest.param(NEGATIVE, "bfloat16", marks=pytest.mark.slow),
        pytest.param(NEGATIVE, "float32", marks=pytest.mark.slow),
        pytest.param(SHARED_PROJECTIONS, "float32", marks=pytest.mark.slow),
        pytest.param(SHARED_PROJECTIONS, "bfloat16", marks=pytest.mark.slow),
        pytest.param(LFM2, "float32", marks=pytest.mark.slow),
        pytest.param(MAMBA, "float32", marks=pytest.mark.slow),
        pytest.param(MAMBA, "bfloat16", marks=pytest.mark.slow),
        pytest.param(LFM2, "bfloat16", marks=pytest.mark.slow),
        pytest.param(GEMMA, "float32", marks=pytest.mark.slow),
        pytest.param(GEMMA, "bfloat16", marks=pytest.mark.slow),
        pytest.param(GEMMA4, "bfloat16", marks=pytest.mark.slow),
        pytest.param(NO_ROPE, "bfloat16", marks=pytest.mark.slow),
        pytest.param(ALIBI, "bfloat16", marks=pytest.mark.slow),
        pytest.param(LATENTS, "float32", marks=pytest.mark.slow),
        pytest.param(INDEXED, "float32", marks=pytest.mark.slow),
        pytest.param(INDEXED, "bfloat16", marks=pytest.mark.slow),
        pytest.param(ADAPTED, "float32", marks=pytest.mark.slow),
        pytest.param(ADAPTED, "bfloat16", marks=pytest.mark.slow),
        pytest.param(ADAPTED_LATENTS, "float32", marks=pytest.mark.slow),
        pytest.param(ADAPTED_LATENTS, "bfloat16", marks=pytest.mark.slow),
        pytest.param(QUANTIZED, "bfloat16", marks=pytest.mark.slow),
        pytest.param(ADAPTED_GPT_OSS, "float32", marks=pytest.mark.slow),
        pytest.param(QUANTIZED_LATENTS, "bfloat16", marks=pytest.mark.slow),
    ],
    ids=[
        "qwen3",
        "qwen3 bfloat16",
        "windows, caps, sinks, biases",
        "gpt-oss bfloat16",
        "heads of two sizes",
        "shared keys, per-layer inputs",
        "shared keys, per-layer inputs bfloat16",
        "delta rule",
        "delta rule, betas up to 2, bfloat16",
        "delta rule, betas up to 2",
        "delta rule, projections of key heads",
        "delta rule, projections of key heads bfloat16",
        "short convolution",
        "mamba",
        "mamba bfloat16",
        "short convolution bfloat16",
        "four norms, two ropes",
        "four norms, two ropes bfloat16",
        "heads of two sizes bfloat16",
        "norms after, a layer without rope bfloat16",
        "alibi, normalised head bfloat16",
        "latents",
        "indexer",
        "indexer bfloat16",
        "adapters",
        "adapters bfloat16",
        "adapters of latents",
        "adapters of latents bfloat16",
        "nf4 bfloat16",
        "adapters of gpt-oss",
        "latents and experts in nf4 bfloat16",
    ],
)
def test_scored_and_trained_log_probs_are_those_of_the_rollout(config, dtype):
    """Rows of several trajectories in another order, scored without and trained with rematerialisation."""
    items = [from_trajectory(t) for t in generated(config, dtype)]
    ordered = [items[i] for i in np.random.default_rng(2).permutation(len(items))]
    scores = learner(config, dtype, remat="none").scorer.start(random_params(config), ordered)()
    for item, scored in zip(ordered, scores, strict=True):
        on = item.mask > 0
        np.testing.assert_array_equal(scored["logprobs"][on], item.signals["rollout_logprobs"][on])
    metrics, _ = one_update(config, dtype)
    assert metrics["mismatch/max_abs"] == 0.0 and metrics["mismatch/mean_abs"] == 0.0
    assert metrics["packing/shared_fraction"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *("granite", "granite-4", "phi-4-mini", "mistral4", "minimax-m2", "ministral3, grown queries"),
        *("glm-4.7", "smollm3, odd", "olmo3, yarn"),
    ],
)
def test_families_are_strict(case):
    """Of which the models above lack a part: multipliers, longrope, other routers, queries that grow."""
    test_scored_and_trained_log_probs_are_those_of_the_rollout(of_family(case), "bfloat16")


def test_prompts_that_rows_repeat_have_the_same_bits():
    items = [from_trajectory(t) for t in generated(QWEN, "float32")]
    shared, alone = (learner(QWEN, "float32", "none", share=on) for on in (True, False))
    assert shared.scorer.shared_tokens(items) and not alone.scorer.shared_tokens(items)
    for one, other in zip(
        *(x.scorer.start(random_params(QWEN), items)() for x in (shared, alone)), strict=True
    ):
        np.testing.assert_array_equal(one["logprobs"], other["logprobs"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [QWEN, HYBRID, LFM2, MAMBA, INDEXED], ids=["qwen3", "delta", "conv", "mamba", "index"]
)
def test_text_and_log_probs_do_not_depend_on_the_other_slots(config):
    few, many = generated(config, "float32"), generated(config, "float32", slots=12, chunk=5)
    for one, other in zip(few, many, strict=True):
        np.testing.assert_array_equal(one.response_ids, other.response_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


class Echo:
    """Replies to the first two turns with twenty tokens."""

    patience = 10.0

    def reply(self, prompt_index, response_index, conversation, ids, *, start):
        future, turn = Future(), (conversation or 0) + 1
        future.set_result(Reply(list(range(2, 22)), turn == 3, Episode(), turn))
        return future


class Rewrites(Echo):
    """Drops the first turn and all but five tokens of the prompt, then all but seventeen tokens."""

    def reply(self, prompt_index, response_index, conversation, ids, *, start):
        future = super().reply(prompt_index, response_index, conversation, ids, start=start)
        reply, again = future.result(), Future()
        again.set_result(reply._replace(keep={1: 5, 2: 17}.get(reply.conversation)))
        return again


def make_engine(config, dtype, **settings):
    rollout = RolloutConfig(slots=4, dtype=dtype, chunk=8, **settings)
    engine = NativeEngine(rollout, config, one_device(), strict=True, routes=bool(config.moe))
    engine.publish(random_params(config), version=0)
    return engine


@functools.cache
def conversations(config, dtype, dialogue=Echo, **settings):
    return converse(make_engine(config, dtype, **settings), dialogue())


def converse(engine, dialogue=None):
    """Return four conversations of up to three turns, and the metrics of the call."""
    prompts = [np.arange(2, 2 + n, dtype=np.int32) for n in (5, 40)]
    requests = [Request(prompt, i, 2, 64) for i, prompt in enumerate(prompts)]
    sampling = SamplingConfig(temperature=TEMPERATURE, stop_tokens=tuple(range(1, 100, 6)))
    return engine.generate(requests, sampling, jax.random.key(1), dialogue or Echo()), engine.metrics


of_each_kind = pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (QWEN, "float32"),
        pytest.param(OTHERS, "float32", marks=pytest.mark.slow),
        pytest.param(GPT_OSS, "bfloat16", marks=pytest.mark.slow),
        pytest.param(LATENTS, "float32", marks=pytest.mark.slow),
        pytest.param(INDEXED_TWO_LAYERS, "float32", marks=pytest.mark.slow),
        pytest.param(TWO_LAYERS, "float32", marks=pytest.mark.slow),
        pytest.param(MAMBA, "bfloat16", marks=pytest.mark.slow),
    ],
    ids=[
        *("qwen3", "windows, caps, sinks, biases", "gpt-oss bfloat16", "latents", "indexer"),
        *("delta rule", "mamba bfloat16"),
    ],
)


def assert_same_responses(ours, others):
    """Tokens, log-probs and routes, bit for bit."""
    for one, other in zip(ours, others, strict=True):
        np.testing.assert_array_equal(one.response_ids, other.response_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        np.testing.assert_array_equal(one.routes, other.routes)


@pytest.mark.slow
@of_each_kind
def test_kept_pages_hold_the_bits_that_reading_again_would_give(config, dtype, monkeypatch):
    """The ring reads every conversation again for each turn; all are what the trainer scores.

    On a CPU auto is a ring that keeps turns in pages."""
    monkeypatch.setattr(kept_turns, "MIN_PREFILL_FLOPS", 0)
    (again, _), (kept, metrics), (from_ring, others) = (
        conversations(config, dtype, cache=cache, page=16) for cache in ("ring", "paged", "auto")
    )
    assert_same_responses(from_ring, again)
    assert others["rollout/prefill_tokens"] == metrics["rollout/prefill_tokens"]
    assert metrics["rollout/reused_tokens"] > 0 and any((t.mask == 0).sum() == 40 for t in kept)
    assert_same_responses(kept, again)
    assert all((t.routes is None) == (config.moe is None) for t in kept)
    assert_scored_alike(config, dtype, kept)


def assert_scored_alike(config, dtype, trajectories):
    """The trainer's log-probs are the rollout's, bit for bit."""
    items, share = [from_trajectory(t) for t in trajectories], prefix_sharing(config, dtype, one_device())
    scorer = learner(config, dtype, remat="none", row_tokens=128, share=share).scorer
    scores = scorer.start(random_params(config), items)()
    for item, scored in zip(items, scores, strict=True):
        on = item.mask > 0
        np.testing.assert_array_equal(scored["logprobs"][on], item.signals["rollout_logprobs"][on])


@pytest.mark.slow
@pytest.mark.parametrize("config", [QWEN, TWO_LAYERS], ids=["qwen3", "delta rule"])
def test_pages_that_a_fork_has_cut_hold_the_bits_that_reading_again_would_give(config, monkeypatch):
    """A state is not cut: a recurrent model reads rewritten histories from their start."""
    monkeypatch.setattr(kept_turns, "MIN_PREFILL_FLOPS", 0)
    caches = ("ring", "paged", "auto")
    (again, _), *others = (conversations(config, "float32", Rewrites, cache=c, page=16) for c in caches)
    assert any(len(t.forks) == 2 for t in again)
    for kept, metrics in others:
        assert_same_responses(kept, again)
        assert config is TWO_LAYERS or metrics["rollout/reused_tokens"] > 0
    assert_scored_alike(config, "float32", again)


@pytest.mark.slow
@of_each_kind
def test_drafts_change_no_bit(config, dtype):
    """Neither those of the first call, mostly wrong, nor those of the second, which knows the responses."""
    plain, _ = conversations(config, dtype, cache="paged", page=16)
    engine, accepted = make_engine(config, dtype, page=16, draft_tokens=3), []
    for _ in range(2):
        drafted, metrics = converse(engine)
        accepted.append(metrics["rollout/draft_accepted"])
        assert_same_responses(drafted, plain)
        assert [(t.finish, t.episode) for t in drafted] == [(t.finish, t.episode) for t in plain]
    assert accepted[0] < 0.3 < accepted[1]


def test_gradients_are_those_of_the_plain_model():
    _, strict = one_update(QWEN, "float32")
    metrics, plain = one_update(QWEN, "float32", strict=False, share=False)
    assert 0 < metrics["mismatch/max_abs"] < 1e-4
    for one, other in zip(jax.tree.leaves(strict), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * np.abs(other).max() + 1e-9)


FILTERS = (
    "--rollout.sampling.top_k",
    "20",
    "--rollout.sampling.top_p",
    "0.9",
    "--rollout.sampling.min_p",
    "0.02",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", [(), (*FILTERS, "--rollout.sampling.kept_sets", "true")], ids=["", "kept sets"]
)
def test_a_whole_run_has_no_mismatch(sampling, tmp_path):
    """Two updates a step on rows of several trajectories; the old log-probs are scored, not the update's.

    The rollout has another device than the policy.
    """
    code = main([
        *("--config", "grpo_tiny.py", "--run_dir", str(tmp_path), "--strict", "true", "--steps", "2"),
        *("--prompts_per_step", "4", "--responses_per_prompt", "4", "--minibatches_per_step", "2"),
        *("--warm_start.steps", "1", "--eval.every", "0", "--log.progress", "none", "--reward.workers", "1"),
        *("--rollout.slots", "8", "--tokens_per_device", "144", "--log.tensorboard", "false"),
        *("--devices", "0:1", "--rollout.devices", "1:2", *sampling),
    ])  # fmt: skip
    assert code == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][-2:]
    assert [line["mismatch/max_abs"] for line in lines] == [0.0, 0.0]
    assert all(line["entropy"] > 0 for line in lines)


@pytest.mark.parametrize(
    ("settings", "dtype", "devices", "message"),
    [
        (
            {"engine": "sglang", "launch": 1},
            "float32",
            1,
            "--strict and --rollout.engine sglang exclude each other: servers",
        ),
        (
            {"dtype": "float32"},
            "bfloat16",
            1,
            "--strict: --rollout.dtype is float32, --model.dtype is bfloat16",
        ),
        (
            {"cache_dtype": "bfloat16"},
            "float32",
            1,
            "--strict: --rollout.cache_dtype is bfloat16, --model.dty",
        ),
        ({"weight_noise": 0.1}, "float32", 1, "--strict and --rollout.weight_noise exclude each other"),
        ({}, "float32", 4, "--strict works on one device, and the mesh has 4"),
    ],
)
def test_settings_that_strict_mode_excludes_are_refused(settings, dtype, devices, message):
    def problems(devices, **settings):
        model = ModelConfig(architecture=TransformerConfig(), tokenizer="tiny", dtype=dtype)
        mesh, data = MeshConfig(fsdp=devices), DataConfig(path="a.jsonl")
        rollout = RolloutConfig(**settings)
        asked = apply_rules(
            RECIPE, TrainConfig(strict=True, model=model, rollout=rollout, mesh=mesh, data=data)
        )
        return [line for _, lines in asked for line in lines]

    assert not problems(1, dtype=dtype)
    assert problems(devices, **settings)[0].startswith(message)
