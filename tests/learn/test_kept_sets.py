"""Log-probs over kept sets: drawn, scored and trained over the tokens that the rollout's filters kept."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_models import random_params

from jaxrl_llm import models
from jaxrl_llm.algos import grpo
from jaxrl_llm.data.packing import PackItem, from_trajectory, pack
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.update import StepConfig, model_outputs
from jaxrl_llm.ranges import problems
from jaxrl_llm.rollout.config import RolloutConfig, SamplingConfig
from jaxrl_llm.rollout.engine import PartialResponse, Request
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.partial import pack_responses, trajectory_of, unpack_responses
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import put_rows

MODEL = models.TransformerConfig(
    vocab_size=100, hidden_size=32, mlp_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
    initializer_range=0.2, max_position=128,
)  # fmt: skip
CAPPED = dataclasses.replace(MODEL, tie_embeddings=False, logit_softcap=3.0)
SAMPLING = SamplingConfig(temperature=0.7, top_k=12, top_p=0.8, min_p=0.02, kept_sets=True)


def learner(strict=False, model=MODEL, mesh=None, chunk=16):
    mesh = make_mesh(mesh or MeshConfig(), jax.devices() if mesh else jax.devices()[:1])
    step = StepConfig(
        64, 2, strict=strict, temperature=0.7, share_prefixes=True, chunk=chunk, num_kept=SAMPLING.num_kept
    )
    return Learner(grpo.Config(kl_coef=0.0), model, optax.sgd(1.0), step, mesh=mesh)


@functools.cache
def generated(strict, **settings):
    prompts = [np.arange(2, 2 + n, dtype=np.int32) for n in (5, 1, 9)]
    requests = [Request(prompt, i, 2, 8) for i, prompt in enumerate(prompts)]
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    engine = NativeEngine(RolloutConfig(slots=2, chunk=8, **settings), MODEL, mesh, strict=strict)
    engine.publish(random_params(MODEL), version=0)
    return engine.generate(requests, SAMPLING, jax.random.key(1))


hidden_of = jax.jit(lambda params, *rows: params(*rows))


def full_logits(model, params, tokens):
    """Logits of each token's prediction, float64, at temperature 0.7."""
    rows = jnp.asarray(np.pad(tokens, (0, 24 - len(tokens))))[None], jnp.arange(24)[None]
    products = np.asarray(hidden_of(params, *rows)[0], np.float64) @ np.asarray(params.head, np.float64).T
    cap = model.logit_softcap
    return (cap * np.tanh(products / cap) if cap else products) / 0.7


def kept_by_hand(logits):
    p = np.exp(logits - logits.max())
    p[np.argsort(-p)[12:]] = 0
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= 0.8 * p.sum()]] = 0
    return set(np.flatnonzero(p >= 0.02).tolist())


@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"cache": "paged", "page": 8, "draft_tokens": 3}, marks=pytest.mark.slow)],
    ids=["", "drafts"],
)
def test_rollout_reports_sets_and_log_probs_over_them(settings):
    params = jax.tree.map(jnp.asarray, random_params(MODEL))
    sizes = set()
    for t in generated(False, **settings):
        logits = full_logits(MODEL, params, np.concatenate([t.prompt_ids, t.response_ids]))
        assert t.kept.shape == (8, 12) and t.kept.dtype == np.int32
        for i, (token, kept) in enumerate(zip(t.response_ids, t.kept, strict=True)):
            own = logits[len(t.prompt_ids) - 1 + i]
            ids = kept[kept >= 0]
            assert set(ids.tolist()) == kept_by_hand(own) and token in ids
            assert t.logprobs[i] == pytest.approx(own[token] - np.log(np.exp(own[ids]).sum()), abs=2e-5)
            sizes.add(len(ids))
    assert len(sizes) > 2 and max(sizes) <= 12


@pytest.mark.parametrize("strict", [False, True])
def test_the_ratio_is_one_on_policy(strict):
    """In strict mode to the last bit; a full softmax would differ by the mass that was dropped."""
    items = [from_trajectory(t) for t in generated(strict)]
    for item, scored in zip(items, learner(strict).scorer.start(random_params(MODEL), items)(), strict=True):
        on = item.mask > 0
        difference = np.abs(scored["logprobs"][on] - item.signals["rollout_logprobs"][on]).max()
        assert difference == 0.0 if strict else difference < 1e-5
    bare = Learner(
        grpo.Config(kl_coef=0.0),
        MODEL,
        optax.sgd(1.0),
        StepConfig(64, 2, temperature=0.7),
        mesh=learner().mesh,
    )
    full = bare.scorer.start(random_params(MODEL), items[:1])()[0]["logprobs"]
    assert (full[items[0].mask > 0] < items[0].signals["rollout_logprobs"][items[0].mask > 0] - 0.02).all()


def explicit(model, params, tokens, kept):
    """Log-probs over the sets from all logits, [t - 1]; 0 where there is no set."""
    rows = jnp.asarray(tokens)[None], jnp.arange(len(tokens))[None]
    logits = params(*rows)[0, :-1] @ params.head.T
    cap = model.logit_softcap
    logits = (cap * jnp.tanh(logits / cap) if cap else logits) / 0.7
    member = (kept[1:, :, None] == np.arange(100)).any(axis=1)
    masked = jnp.where(member, logits, -1e30)
    logprobs = jax.nn.log_softmax(masked, axis=-1)[np.arange(len(tokens) - 1), tokens[1:]]
    return jnp.where(member.any(axis=1), logprobs, 0.0)


@pytest.mark.parametrize(
    "model, mesh",
    [
        (MODEL, None),
        pytest.param(CAPPED, None, marks=pytest.mark.slow),
        pytest.param(MODEL, MeshConfig(fsdp=4, tensor=2), marks=pytest.mark.slow),
        pytest.param(CAPPED, MeshConfig(fsdp=4, tensor=2), marks=pytest.mark.slow),
    ],
    ids=["tied", "capped", "sharded", "capped and sharded"],
)
def test_value_and_gradient_are_those_of_the_whole_softmax_without_the_rest(model, mesh):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 100, 40).astype(np.int32)
    kept = np.full((40, 12), -1, np.int32)
    for i in range(8, 40):  # of 1 to 12 tokens, the target among them
        others = rng.permutation(np.delete(np.arange(100), tokens[i]))[: rng.integers(0, 12)]
        kept[i, : len(others) + 1] = rng.permutation([tokens[i], *others])
    built, params = learner(model=model, mesh=mesh), random_params(model)
    item = PackItem(tokens, (np.arange(40) >= 8).astype(np.float32), {}, kept=kept)
    rows = 8 if mesh else 2
    batch = put_rows(built.mesh, pack([item], 64, rows, num_kept=12)[0])
    weights = rng.normal(size=39).astype(np.float32)

    def ours(params):
        found = model_outputs(params, batch, built.config, ("logprobs",))["logprobs"][0, :39]
        return jnp.sum(found * weights), found

    def right(params):
        found = explicit(model, params, tokens, kept)
        return jnp.sum(found * weights), found

    with jax.set_mesh(built.mesh):
        placed = jax.device_put(params, built.param_shardings)
        (_, found), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(placed)
    (_, expected), wanted = jax.jit(jax.value_and_grad(right, has_aux=True))(params)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    for got, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5 * max(float(np.abs(want).max()), 1e-3), rtol=1e-4)


def test_sets_of_partial_responses_survive_a_checkpoint_and_a_cut():
    """Tokens 5, 8 and 9 are the policy's, 6 and 7 an observation."""
    sets = [np.array(ids, np.int32) for ids in ([5, 1, -1], [8, -1, -1], [9, 2, 3])]
    request = Request(np.array([1, 2]), 0, 1, 9)
    one = PartialResponse(
        [5, 6, 7, 8, 9], [-1.0, 0, 0, -2.0, -3.0], [3] * 5, observed=[(1, 3)], kept=sets, request=request
    )
    [[found, none]] = unpack_responses(pack_responses({4: [[one, PartialResponse([7], [-1.0], [3])]]}))[4]
    np.testing.assert_array_equal(found.kept, sets)
    assert none.kept == [] and trajectory_of(dataclasses.replace(none, request=request), None).kept is None
    item = from_trajectory(trajectory_of(one, None))
    nothing = [-1] * 3
    np.testing.assert_array_equal(item.kept, [nothing] * 2 + [sets[0], nothing, nothing, *sets[1:]])
    (batch,) = pack([item], 8, 1, num_kept=4)
    np.testing.assert_array_equal(batch.kept[0, 1], [5, 1, -1, -1])  # the set of the target
    again = one.copy()
    again.truncate(4)
    assert len(one.kept) == 3 and [ids[0] for ids in again.kept] == [5, 8]


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"sampling": SamplingConfig(top_p=0.9, kept_sets=True)},
            "is True with top_k 0: it must have a top_k",
        ),
        ({"sampling": SamplingConfig(top_k=129, kept_sets=True)}, "of 1 to 128"),
        ({"sampling": SamplingConfig(0.0, 20, kept_sets=True)}, "must have a temperature above 0"),
        (
            {"sampling": SAMPLING, "engine": "sglang", "launch": 1},
            "servers do not report tokens kept by filters",
        ),
    ],
)
def test_what_kept_sets_need_is_said(settings, message):
    config = RolloutConfig(**settings)
    found = [text for _, text in (*problems(config), *problems(config.sampling))]
    assert any(message in text for text in found)
    assert not list(problems(RolloutConfig(sampling=SAMPLING)))
