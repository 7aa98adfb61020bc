"""Trajectories with rewritten histories: the step is that of each turn after its own context, by hand."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradients import SUM, assert_same, assert_same_gradients, gradients_of
from random_weights import random_params, weights_for

from jaxrl_llm import algos, models
from jaxrl_llm.algos.config import Correction
from jaxrl_llm.builders.models import config_with_heads
from jaxrl_llm.data.packing import arrange, branches_of, from_trajectory, pack, unpack
from jaxrl_llm.forks import Fork, TurnRecord, contexts
from jaxrl_llm.learn.credit import assign_credit
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.learn.moe_losses import Replay
from jaxrl_llm.learn.stage import Experience, Stage
from jaxrl_llm.learn.update import StepConfig
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.models.experts.router import route_spec
from jaxrl_llm.models.mixer_config import DeltaConfig
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.structs import Episode, LossInputs, Rollouts, Trajectory

MODEL = TransformerConfig(
    vocab_size=64, hidden_size=32, mlp_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    initializer_range=0.3,
)  # fmt: skip
HYBRID = dataclasses.replace(
    MODEL, layer_kinds=("delta", "attention"), attention_gate=True, delta=DeltaConfig(2, 4, 8, 8)
)
EXPERTS = dataclasses.replace(MODEL, moe=MoEConfig(num_experts=4, experts_per_token=2, expert_size=16))
PROMPT = 6
# Mask of the response, and the forks: none, one that drops a turn, one after another, one into the prompt.
SHAPES = (
    ("1110011", ()),
    ("111100111", (Fork(PROMPT + 4, PROMPT + 1),)),
    ("110011110001001", (Fork(PROMPT + 2, PROMPT), Fork(PROMPT + 8, PROMPT + 1))),
    ("11001100011", (Fork(PROMPT + 2, PROMPT), Fork(PROMPT + 6, 2))),
)


def trajectories(model=MODEL, num_kept=0):
    """Two prompts with a response of each shape, with routes if the model has experts, and with kept sets."""
    rng, found = np.random.default_rng(0), []
    ids = lambda n: rng.integers(0, MODEL.vocab_size, n).astype(np.int32)
    for index in range(2 * len(SHAPES)):
        if index % len(SHAPES) == 0:
            prompt = ids(PROMPT)
        mask, forks = SHAPES[index % len(SHAPES)]
        mask = np.array([*map(int, mask)], np.int8)
        found.append(Trajectory(
            prompt_ids=prompt, response_ids=ids(len(mask)), mask=mask, versions=np.zeros(len(mask), np.int32),
            logprobs=np.where(mask, rng.normal(-4, 0.3, len(mask)), 0.0).astype(np.float32),
            prompt_index=index // len(SHAPES), response_index=index % len(SHAPES), finish="stop",
            reward=float(rng.integers(0, 4)), forks=forks, episode=Episode(records=records_of(mask, index)),
        ))  # fmt: skip
    for t in found:
        if model.moe:
            spec, experts = route_spec(model), np.arange(model.moe.num_experts)
            drawn = [rng.permutation(experts)[: spec.shape[1]] for _ in range(t.num_tokens * spec.shape[0])]
            t.routes = np.reshape(drawn, (t.num_tokens, *spec.shape)).astype(spec.dtype)
        if num_kept:
            others = rng.integers(0, MODEL.vocab_size, (len(t.mask), num_kept - 1))
            kept = np.concatenate([t.response_ids[:, None], others], axis=1)
            kept = [[*dict.fromkeys(row), *[-1] * num_kept][:num_kept] for row in kept.tolist()]
            t.kept = np.where(t.mask[:, None] > 0, kept, -1).astype(np.int32)
    return found


def records_of(mask, index):
    """Rewards of turns, and two states in which turns were taken."""
    ends = np.flatnonzero(np.diff(mask, append=0) < 0) + 1
    rewards = [0.5 * k - 0.25 * index for k in range(len(ends))]
    turns = zip(ends, rewards, "aab?", strict=False)
    return tuple(TurnRecord(int(end), 0, -1, reward, state=state) for end, reward, state in turns)


def turns_by_hand(mask):
    """Return turns, their rewards and their states [N, R], of the masks [N, R]."""
    mask = np.asarray(mask, np.int32)
    turns = np.maximum(np.cumsum(np.diff(mask, prepend=0) > 0, axis=1) - 1, 0)
    ends, rows = np.diff(mask, append=0) < 0, np.arange(len(mask))[:, None]
    rewards = np.where(ends, 0.5 * turns - 0.25 * rows, 0.0)
    states = rows // len(SHAPES) * 3 + np.array([0, 1, 1, 2])[turns]  # "", a, a, b of each prompt
    arrays = {"turns": turns, "turn_rewards": np.float32(rewards), "states": states}
    return {name: jnp.array(x) for name, x in arrays.items()}


def log_probs(products, t, own):
    """Log-probs [own, V] of the tokens `own` of a response, over their kept sets if it has any."""
    if t.kept is None:
        return jax.nn.log_softmax(products)
    member = (t.kept[own][:, :, None] == np.arange(MODEL.vocab_size)).any(axis=1)
    return jax.nn.log_softmax(jnp.where(member | (t.mask[own] == 0)[:, None], products, -1e30))


@functools.cache
def by_hand(algo, model, num_kept):
    """(loss, gradients) of the algorithm's loss over [N, R]. Each context is a row of the forward pass."""
    found = trajectories(model, num_kept)
    shape = len(found), max(len(t.mask) for t in found)
    padded = lambda rows: jnp.array([np.pad(row, (0, shape[1] - len(row))) for row in rows], jnp.float32)
    mask, reported = padded([t.mask for t in found]), padded([t.logprobs for t in found])
    rollouts = Rollouts(
        rewards=jnp.array([t.reward for t in found], jnp.float32), mask=mask, valid=jnp.ones(shape[0]),
        group=jnp.array([t.prompt_index for t in found]), truncated=jnp.zeros(shape[0]),
        **turns_by_hand(mask),
    )  # fmt: skip
    advantages = algos.of(algo).advantages(rollouts, algo)

    ids = [np.concatenate([t.prompt_ids, t.response_ids]) for t in found]
    rows = [(n, *each) for n, t in enumerate(found) for each in contexts(t.num_tokens, t.forks)]
    padding = lambda x: [(0, 24 - len(x)), *[(0, 0)] * (x.ndim - 1)]
    of_rows = lambda arrays: np.stack(
        [np.pad(x, padding(x)) for x in (arrays[n][read] for n, read, _ in rows)]
    )
    tokens, routes = of_rows(ids), jnp.array(of_rows([t.routes for t in found])) if model.moe else None

    def loss(params):
        positions = jnp.broadcast_to(jnp.arange(24), tokens.shape)
        hidden, _, _ = params.forward(jnp.array(tokens), positions, routes=routes)
        products = hidden @ params.head.T
        logprobs = jnp.zeros(shape)
        for row, (n, read, keep) in enumerate(rows):
            own = np.arange(keep or PROMPT, len(read))
            every = log_probs(products[row, own - 1], found[n], read[own] - PROMPT)
            logprobs = logprobs.at[n, read[own] - PROMPT].set(every[np.arange(len(own)), tokens[row, own]])
        inputs = LossInputs(
            logprobs=logprobs * mask, mask=mask, segments=jnp.ones(shape, jnp.int32),
            lengths=jnp.broadcast_to(mask.sum(1, keepdims=True), shape), num_tokens=mask.sum(),
            num_sequences=jnp.float32(shape[0]), advantages=advantages, old_logprobs=reported,
            rollout_logprobs=reported,
        )  # fmt: skip
        return algos.of(algo).loss(inputs, algo)[0]

    value, gradients = jax.jit(jax.value_and_grad(loss))(random_params(model))
    return float(value), {name: np.asarray(x) for name, x in models.named_leaves(gradients) if x is not None}


def one_step(algo, model=MODEL, mesh=None, source="rollout", **settings):
    """(metrics, gradients) of scores, advantages and an update of policy and critic."""
    replay = Replay("rollout", route_spec(model)) if model.moe else None
    settings = {"rows": 1, "row_tokens": 64, "max_grad_norm": 0.0, "replay": replay, **settings}
    step = StepConfig(**settings, old_logprobs_source=source)
    mesh, others = mesh or MeshConfig(fsdp=1), {}
    mesh = make_mesh(mesh, jax.devices()[: math.prod(mesh.sizes.values())])
    policy = Learner(algo, config_with_heads(model, algo), SUM, step, mesh=mesh)
    if algos.requirements(algo).critic:
        value = algos.value.Config()
        critic = Learner(value, config_with_heads(model, value), SUM, step, mesh=mesh)
        others = {"critic": critic, "critic_params": lambda: weights_for(critic, 2)}
    stage, found = Stage(policy, **others), trajectories(model, step.num_kept)
    with jax.set_mesh(policy.mesh):
        state = stage.init_state(weights_for(policy))
        reference = weights_for(policy, 1) if stage.needs_reference else None
        experience = Experience([from_trajectory(t) for t in found], {}, 0, [], trajectories=found)
        minibatches = stage.prepare(state, experience, reference, seed=0)
        state, metrics = stage.update(state, minibatches, step=0)
    gradients = gradients_of(state)
    if stage.critic:
        gradients |= {f"critic/{name}": x for name, x in gradients_of(state.critic).items()}
    return {name: float(value) for name, value in metrics.items()}, gradients


def check(algo, **settings):
    metrics, gradients = one_step(algo, **settings)
    loss, expected = by_hand(algo, settings.get("model", MODEL), settings.get("num_kept", 0))
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert_same_gradients(gradients, expected)


GIGPO = algos.gigpo.Config(gamma=0.5)
GRPO, GSPO = algos.grpo.Config(kl_coef=0.0), algos.gspo.Config(clip_low=0.5, clip_high=0.5)
SLOW = {
    "separate rows": (GRPO, {}),
    "rows that hold one context": (GRPO, {"row_tokens": 21, "rows": 2}),
    "one row": (GRPO, {"share_prefixes": True, "row_tokens": 128}),
    "small rows": (GRPO, {"share_prefixes": True, "row_tokens": 21, "rows": 2}),
    "fsdp 4, tensor 2": (GRPO, {"share_prefixes": True, "mesh": MeshConfig(fsdp=4, tensor=2), "rows": 4}),
    "ring": (GRPO, {"share_prefixes": True, "mesh": MeshConfig(fsdp=2, sequence=2), "rows": 2}),
    "tokens": (algos.dapo.Config(), {"share_prefixes": True}),
    "tokens, separate rows": (algos.dapo.Config(), {"rows": 3}),
    "sequences, several rows": (GSPO, {"share_prefixes": True, "row_tokens": 48, "rows": 2}),
    "sequences, contexts apart": (GSPO, {"whole_sequences": True, "row_tokens": 48, "rows": 2}),
    "sequences, flat": (GSPO, {"model": HYBRID, "share_prefixes": "flat", "whole_sequences": True}),
    "turns": (GIGPO, {"share_prefixes": True, "row_tokens": 48, "rows": 2}),
    "strict": (GRPO, {"share_prefixes": True, "strict": True}),
    "delta rule": (GRPO, {"model": HYBRID, "share_prefixes": "flat"}),
    "replayed routes": (GRPO, {"model": EXPERTS, "share_prefixes": True}),
    "replayed routes, separate rows": (GRPO, {"model": EXPERTS, "rows": 2}),
    "kept sets": (GRPO, {"num_kept": 5, "share_prefixes": True}),
    "kept sets, separate rows": (GRPO, {"num_kept": 5, "rows": 2}),
}  # fmt: skip


@pytest.mark.parametrize("share", [True, False, "flat"])
def test_every_token_has_its_context_once(share):
    """By the rule of attention, as in data/test_prefixes.py: of each token, the tokens that it reads. It is
    trained on once, too."""
    items = [from_trajectory(t) for t in trajectories()]
    read, batches = [], pack(items, 48, 2, share=share)
    assert sum(batch.mask.sum() for batch in batches) == sum(item.mask.sum() for item in items)
    for batch in batches:
        last = batch.segments if batch.last is None else batch.last
        texts = np.empty(batch.tokens.shape, object)
        for row, i in zip(*np.nonzero(batch.segments), strict=True):
            n = batch.segments[row, i]
            seen = [
                j
                for j in range(i + 1)
                if batch.segments[row, j] and batch.segments[row, j] <= n <= last[row, j]
            ]
            assert batch.positions[row, seen].tolist() == [*range(len(seen))]
            texts[row, i] = tuple(batch.tokens[row, seen].tolist())
        read.append(texts)
    for found, item in zip(unpack(read, items, 48, on_targets=False, share=share), items, strict=True):
        for numbers, keep in contexts(len(item.tokens), item.forks):
            ids = item.tokens[numbers].tolist()
            assert [found[n] for n in numbers[keep:]] == [tuple(ids[: i + 1]) for i in range(keep, len(ids))]
    columns = sum(
        place.end - place.columns[0] * 0 for row in arrange(items, 48, share=share) for place in row[-1:]
    )
    whole = sum(len(branch.item.tokens) for branch in branches_of(items))
    assert columns == whole if not share else columns < whole


def test_a_trajectory_is_a_tree_in_its_row():
    """No token is in the row twice: it has as many columns as the trajectory has tokens."""
    *_, item = [from_trajectory(t) for t in trajectories()]
    (batch,) = pack([item], len(item.tokens), 1, share=True)
    assert batch.tokens[0].tolist() == item.tokens.tolist() and (batch.sequences == 1).all()
    assert batch.segments[0].tolist() == [1] * 8 + [2] * 4 + [3] * 5
    assert batch.last[0].tolist() == [3] * 2 + [2] * 4 + [1] * 2 + [2] * 4 + [3] * 5
    assert batch.positions[0].tolist() == [*range(8), *range(6, 10), *range(2, 7)]
    assert batch.mask[0].tolist() == [0, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0]
    assert batch.lengths[0].tolist() == [6.0] * 17


@pytest.mark.parametrize("share", [True, False])
def test_each_turn_of_a_tree_has_its_advantage(share):
    """In a row and in the order of the tokens; GiGPO's differ from turn to turn."""
    found = trajectories()
    items = [from_trajectory(t) for t in found]
    kept = assign_credit(GIGPO, items, found, 0.0, seed=0)
    mask = np.stack([np.pad(t.mask, (0, 16 - len(t.mask))) for t in found])
    turns, batches = turns_by_hand(mask)["turns"], pack(kept, 48, 2, share=share)
    read = unpack([batch.advantages for batch in batches], kept, 48, share=share)
    for row, (of_tokens, item) in enumerate(zip(read, kept, strict=True)):
        np.testing.assert_array_equal(of_tokens * item.mask, item.signals["advantages"])
        own = of_tokens[PROMPT:]
        of_turns = [
            np.unique(own[(turns[row, : len(own)] == k) & (mask[row, : len(own)] > 0)]) for k in range(4)
        ]
        of_turns = [float(turn[0]) for turn in of_turns if len(turn)]
        assert len({*of_turns}) == len(of_turns) == int((np.diff(mask[row], prepend=0) > 0).sum())


def test_losses_over_sequences_need_them_in_one_row():
    """A user's loss says so by `Requirements.sequences`."""
    by_sequence = Correction("token", reject=(("seq_mean_k1", -1.0, 1.0),))
    of = lambda algo: algos.requirements(algo).sequences
    assert of(GSPO) and of(algos.vespo.Config()) and of(algos.grpo.Config(correction=by_sequence))
    assert not of(GRPO) and not of(algos.grpo.Config(correction=Correction("token")))


@pytest.mark.slow
def test_the_step_of_one_row():
    check(GSPO, share_prefixes=True, row_tokens=128)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_every_packing_mesh_and_loss_gives_the_step_by_hand(name):
    algo, settings = SLOW[name]
    check(algo, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("algo", [algos.ppo.Config(), algos.otb.Config(), algos.rloo.Config()])
def test_scores_of_all_models_are_the_same_in_trees_and_in_separate_rows(algo):
    metrics, gradients = one_step(algo, source="recompute")
    trees = one_step(algo, source="recompute", share_prefixes=True)
    for name in [name for name in trees[0] if name.endswith("shared_fraction")]:
        assert trees[0].pop(name) > 0.25
    for name in ("mismatch/ppl_ratio", "mismatch/chi2_sequence"):  # of all contexts, which rows have apart
        metrics[name] = trees[0].get(name)
    assert_same(trees, (metrics, gradients))
