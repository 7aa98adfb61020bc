"""Model FLOPs of a step, by hand, and for the algorithms that score or train more than the policy."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm import algos
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.experience.flops import step_flops
from jaxrl_llm.experience.rollouts import RolloutSource
from jaxrl_llm.learn.reference import LogprobCache
from jaxrl_llm.learn.stage import Experience
from jaxrl_llm.models import LoraConfig, TransformerConfig
from jaxrl_llm.models.flops import adapter_weights, sequence_flops, training_flops
from jaxrl_llm.models.lora import with_lora
from jaxrl_llm.models.mixer_config import IndexConfig, MLAConfig
from jaxrl_llm.rollout.native.asynchronous import AsynchronousEngine
from jaxrl_llm.rollout.native.engine import NativeEngine

MODEL = TransformerConfig(
    vocab_size=10, hidden_size=4, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=3, mlp_size=5
)
WEIGHTS = 2 * (4 * 6 + 2 * 4 * 3 + 6 * 4 + 3 * 4 * 5)
"""q, k and v, o, and the three matrices of the MLP, of two layers: 264. The logits take 4 x 10 more."""


def test_forward_and_backward_of_a_sequence_by_hand():
    keys = 2 * (1 + 2 + 3 + 4 + 5)  # of both layers
    forward = 2 * 5 * WEIGHTS + 4 * 2 * 3 * keys + 2 * 5 * 40
    assert sequence_flops(MODEL, [5]) == forward == 3760
    assert sequence_flops(MODEL, [5, 5]) == 2 * forward and sequence_flops(MODEL, []) == 0
    assert sequence_flops(MODEL, [5], logits=False) == forward - 400
    assert training_flops(MODEL, [5]) == 3 * forward  # 6 N a token, and attention
    windowed = replace(MODEL, sliding_window=2, window_layers=(True, False))
    assert sequence_flops(windowed, [5]) == forward - 4 * 2 * 3 * (1 + 2 + 3)


def test_adapters_train_without_gradients_of_frozen_weights():
    """Rank 3 on q and v: A 4 x 3 and B 3 x 6, A 4 x 3 and B 3 x 3, in two layers: 102 weights."""
    model = with_lora(MODEL, LoraConfig(rank=3, targets=("q_proj", "v_proj")))
    adapters = 2 * (4 * 3 + 3 * 6 + 4 * 3 + 3 * 3)
    attention = 4 * 2 * 3 * 30
    assert sequence_flops(model, [5]) == 2 * 5 * (WEIGHTS + adapters) + attention + 400
    assert training_flops(model, [5]) == 5 * (4 * WEIGHTS + 6 * adapters + 4 * 40) + 3 * attention


def test_adapters_of_latent_attention_by_hand():
    """Rank 1, inputs + outputs: q_a 6, q_b 2 + 8, kv_a 4 + 5, kv_b 3 + 6, o 2 + 4, each of the MLP 9."""
    sizes = dict(mla=MLAConfig(kv_rank=3, q_rank=2, nope_dim=2, rope_dim=2, value_dim=1), qk_norm=False)
    model = with_lora(replace(MODEL, num_kv_heads=2, head_dim=4, **sizes), LoraConfig(rank=1))
    assert adapter_weights(model) == 2 * (6 + 10 + 9 + 9 + 6 + 3 * 9) == 134


def test_an_indexer_by_hand():
    """Two index heads of 2: q 2 x 4, k 4 x 2 and weights 4 x 2 in the one layer with an indexer; each of the
    5 queries scores its 1 to 5 keys by 2 x 2 products, and at most 2 are read, by all 2 heads. Backward has
    no indexer."""
    sizes = dict(mla=MLAConfig(kv_rank=3, q_rank=2, nope_dim=2, rope_dim=2, value_dim=1), qk_norm=False)
    dense = replace(MODEL, num_kv_heads=2, head_dim=4, **sizes)
    model = replace(dense, index=IndexConfig(2, 2, 2), index_layers=(True, False))
    indexer = 2 * (5 * (2 * 4 + 4 * 2 + 4 * 2) + 2 * 2 * (1 + 2 + 3 + 4 + 5))
    unread = 2 * 2 * 2 * (4 + 1) * ((3 - 2) + (4 - 2) + (5 - 2))
    assert sequence_flops(model, [5]) == sequence_flops(dense, [5]) - unread + indexer
    assert training_flops(model, [5]) == 3 * (sequence_flops(dense, [5]) - unread) + indexer
    assert sequence_flops(model, [2, 1]) == sequence_flops(dense, [2, 1])  # each query reads all its keys


def stage(algo, old="policy", model=MODEL, **fields):
    settings = SimpleNamespace(old_logprobs_source=old, replay=None, balance_coef=0.0)
    policy = SimpleNamespace(
        model=model, config=settings, scorer=SimpleNamespace(shared_tokens=lambda items: [])
    )
    requires = algos.requirements(algo)
    fields = {"critic": None, "updates_critic": True, "critic_warmup": 0, "teachers": ()} | fields
    cache = LogprobCache()
    cache.computed = [3]
    return SimpleNamespace(policy=policy, requires=requires, reference_cache=cache, **fields)


def rollout_source(responses=2, engine=NativeEngine, reward_models=()):
    source = object.__new__(RolloutSource)
    source.responses, source.engine = responses, object.__new__(engine)
    source.rewarder = SimpleNamespace(reward_models=reward_models)
    return source


def experience(num_prompts=1):
    """Two responses of 3 and 4 tokens to a prompt of 2."""
    prompts = [SimpleNamespace(ids=np.zeros(2))] * num_prompts
    trajectories = [SimpleNamespace(prompt_ids=np.zeros(2), num_tokens=n, prompt_index=0) for n in (5, 6)]
    items = [PackItem(np.zeros(n, np.int32), np.ones(n)) for n in (5, 6)]
    return Experience(items, {}, 11, prompts, trajectories=trajectories)


FORWARD = sequence_flops(MODEL, [5, 6])
UPDATE = 3 * FORWARD
GENERATED = FORWARD - sequence_flops(MODEL, [2, 2]) + sequence_flops(MODEL, [2], logits=False)


def flops_of(stage, experience, epochs=1, step=0):
    needs_reference = stage.requires.ref_logprobs and not stage.teachers
    reference = SimpleNamespace(config=MODEL) if needs_reference else None
    return step_flops(stage, experience, [experience.items] * epochs, step, reference=reference)


def test_grpo():
    config = algos.grpo.Config(kl_coef=0.0)
    own = stage(config, source=rollout_source())
    assert flops_of(own, experience()) == GENERATED + UPDATE
    own = stage(replace(config, kl_coef=0.1), "recompute", source=rollout_source())
    assert flops_of(own, experience(), epochs=2) == GENERATED + 2 * FORWARD + 2 * UPDATE
    own = stage(config, source=rollout_source(engine=AsynchronousEngine))
    assert flops_of(own, experience()) == GENERATED + UPDATE
    own = stage(config, source=rollout_source(engine=object))  # SGLang servers, on devices of theirs
    assert flops_of(own, experience()) == UPDATE


def test_responses_that_dynamic_sampling_dropped_count_as_those_that_it_kept():
    own = stage(algos.dapo.Config(), source=rollout_source())
    assert flops_of(own, experience(num_prompts=3)) == pytest.approx(3 * GENERATED + UPDATE)


def test_reward_models_and_critic():
    small = replace(MODEL, num_layers=1)
    step = SimpleNamespace(config=SimpleNamespace(share_prefixes=False))
    reward = SimpleNamespace(params=SimpleNamespace(config=small), scorer=step)
    critic = SimpleNamespace(model=MODEL)
    source = rollout_source(reward_models=[reward])
    own = stage(replace(algos.ppo.Config(), kl_coef=0.0), critic=critic, critic_warmup=1, source=source)
    values = sequence_flops(MODEL, [5, 6], logits=False)
    scored = GENERATED + sequence_flops(small, [5, 6], logits=False) + values
    assert flops_of(own, experience(), step=0) == scored + 3 * values
    assert flops_of(own, experience(), step=1) == scored + 3 * values + UPDATE


def test_datasets_and_teachers():
    rows = experience()
    assert flops_of(stage(algos.sft.Config(), source=None), rows) == UPDATE
    cached = sequence_flops(MODEL, [3])  # the reference's log-probs of the other row are known
    assert flops_of(stage(algos.dpo.Config(), source=None), rows) == UPDATE + cached
    teacher = SimpleNamespace(config=replace(MODEL, num_layers=1))
    own = stage(algos.gkd.Config(teachers=("x",)), source=rollout_source(), teachers=(teacher,))
    assert flops_of(own, rows) == GENERATED + UPDATE + sequence_flops(teacher.config, [5, 6])


def test_a_shared_prompt_counts_once():
    """By policy, reference and reward model: a row has the first token of the prompt once for both."""
    step = SimpleNamespace(config=SimpleNamespace(share_prefixes=True))
    reward = SimpleNamespace(params=SimpleNamespace(config=MODEL), scorer=step)
    own = stage(replace(algos.grpo.Config(), kl_coef=0.1), source=rollout_source(reward_models=[reward]))
    own.policy.scorer.shared_tokens = lambda items: [1]
    forward = FORWARD - sequence_flops(MODEL, [1])
    scores = sequence_flops(MODEL, [5, 6], logits=False) - sequence_flops(MODEL, [2], logits=False)
    assert flops_of(own, experience()) == GENERATED + scores + forward + 3 * forward
