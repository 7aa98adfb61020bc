"""Pushes of changed bits: exact, refused from another version, and whole wherever that is needed."""

import dataclasses
import sys
import zlib

import jax
import numpy as np
import pytest
from fake_sglang import FakeServer
from fake_vllm import FakeVLLM
from servers_shared import GREEDY, KEY, MODEL, engine_for, ids, native, requests, weights

from jaxrl_llm.bridge import delta, vllm
from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.bridge.delta import Entry, Piece, Shadow
from jaxrl_llm.bridge.sglang import LOADER, loader_problem
from jaxrl_llm.bridge.transports.delta import DeltaTransport
from jaxrl_llm.bridge.transports.process_group import GroupTransport
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import ServerError
from jaxrl_llm.hf.export import save_description
from jaxrl_llm.models import LoraConfig
from jaxrl_llm.recipe.rules_recipe import RECIPE
from jaxrl_llm.rollout.config import RolloutConfig, ServersConfig
from jaxrl_llm.rollout.servers.health import run_health_checks
from jaxrl_llm.rollout.servers.kinds import KINDS

TIED = dataclasses.replace(MODEL, tie_embeddings=True)
BUCKET = 12_000


def source_for(name):
    return WeightSource(TIED, "float32", BUCKET, vllm.with_tied_head if name == "vllm" else None)


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Kind -> two servers of it."""
    shell = save_description(TIED, tmp_path_factory.mktemp("shell"), dtype="float32")
    return {
        "vllm": [FakeVLLM(TIED), FakeVLLM(TIED)],
        "sglang": [FakeServer(model_path=shell), FakeServer(model_path=shell)],
    }


@pytest.fixture(params=["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
def kind(request):
    if request.param == "sglang":
        pytest.importorskip("torch")  # the fake server reads as SGLang does
    return request.param


@pytest.fixture(params=["http", pytest.param("group", marks=pytest.mark.slow)])
def transport(request, kind):
    if request.param == "group":
        pytest.importorskip("torch")
        if kind == "sglang":
            pytest.skip("refused")
    return request.param


@pytest.fixture
def both(servers, kind):
    for server in servers[kind]:
        server.behave()
        if kind == "sglang":
            server.restart()
    return servers[kind]


@pytest.fixture
def make(both, kind, transport):
    """make() -> an engine on both servers whose pushes are changes."""
    closing = []

    def engine(patience=0.0):
        made, urls = DeltaTransport(source_for(kind), KINDS[kind]), [server.url for server in both]
        if transport == "group":
            made = DeltaTransport(source_for(kind), KINDS[kind], vllm.announce_piece)
            settings = {"python": sys.executable, "timeout": 30.0, "delta": made}
            made = GroupTransport(made.source, KINDS[kind], **settings)
        rollout = RolloutConfig(engine=kind, servers=("http://127.0.0.1:1",))
        one = engine_for(urls, made, TIED, rollout=rollout, patience=patience, timeout=60.0)
        if patience:
            one.pool.start(run_health_checks(one.pool))
        closing.extend([one.pool, made] if transport == "group" else [one.pool])
        return one

    yield engine
    for one in reversed(closing):
        one.close()


def trained(params, seed, share=0.01):
    """The weights after a step: a share of the entries moves, the final norm does not."""
    rng = np.random.default_rng(seed)

    def moved(leaf):
        values = np.array(leaf)
        if values.shape == (TIED.hidden_size,):
            return leaf
        chosen = rng.random(values.shape) < share
        values[chosen] += rng.normal(0, 1e-3, chosen.sum()).astype(np.float32)
        values[rng.random(values.shape) < 1e-3] = -0.0
        return jax.numpy.asarray(values)

    return jax.tree.map(moved, params)


def held(server):
    return server.held if isinstance(server, FakeVLLM) else server.tensors


def sums(tensors):
    """SHA-256 of each tensor."""
    return {name: delta.sha256_of(np.ascontiguousarray(array)) for name, array in tensors.items()}


def whole(params, kind):
    """SHA-256 of the tensors of a full push."""
    buckets = [part.content for part in source_for(kind).parts(params)]
    return sums({t.name: a for bucket in buckets for t, a in zip(bucket.tensors, bucket.arrays, strict=True)})


# -- the format


def test_gaps_and_bits_of_a_change_by_hand():
    """Gaps of 0, 254 and 255 before entries 0, 255 and 511: 1.0 -> -0.0, 0.0 -> NaN, 2.0 -> one ulp more."""
    old = np.zeros(600, np.uint16)
    old[[0, 511]] = 0x3F80, 0x4000
    new = old.copy()
    new[[0, 255, 511]] = 0x8000, 0x7FC1, 0x4001
    made = delta.encode(old, new)
    assert made[:8] == (3).to_bytes(8, "little")
    gaps, low, high = bytes([0, 254, 255, 0]), bytes([0x80, 0xC1, 0x01]), bytes([0xBF, 0x7F, 0x00])
    assert zlib.decompress(made[8:]) == gaps + low + high
    delta.apply_changes(old, made)
    assert (old == new).all()


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4"])
@pytest.mark.parametrize("share", [0.0, 1e-3, 0.05, 1.0])
def test_changes_restore_all_bits(dtype, share):
    rng = np.random.default_rng(0)
    old = rng.integers(0, np.iinfo(dtype).max, (37, 211), dtype)  # any bits, of NaN and Inf too
    new = np.where(rng.random(old.shape) < share, old ^ np.dtype(dtype).type(rng.integers(1, 127)), old)
    made = delta.encode(old, new)
    assert (made == b"") == (share == 0)
    if made:
        delta.apply_changes(old, made)
    assert (old == new).all()


def piece(content, label="2", base="1", *, index=0, last=True, name="w", digest="", whole=False):
    """A piece of one tensor of 4 entries."""
    entry = Entry(name, "BF16", (4,), whole, size=len(content), sha256=digest)
    return delta.write_piece(Piece(base, label, index, last), [entry], [content])


def test_a_receiver_refuses_what_it_cannot_make_exact():
    """After a refusal nothing is complete, until all weights come."""
    old, new = np.arange(4, dtype=np.uint16), np.array([0, 1, 9, 3], np.uint16)
    whole_piece = piece(old.tobytes(), "1", "", digest=delta.sha256_of(old), whole=True)
    change, good = delta.encode(old, new), delta.sha256_of(new)
    for pieces, message in (
        ([piece(change, base="0", digest=good)], "update of weights '0', and here are '1'"),
        ([piece(change, digest=delta.sha256_of(old))], "w has other bits than the trainer's"),
        ([piece(b"", digest=good)], "w has other bits than the trainer's"),
        ([piece(change, name="x", digest=good)], "changes of x, which is not here"),
        ([piece(change, index=1, digest=good)], "piece 1 of an update after 0 pieces"),
        ([piece(change, last=False, digest=good), piece(b"", index=1, digest=good)], "w for the second time"),
        ([piece(change[:-3], digest=good)], "changes that cannot be read"),
    ):
        shadow = Shadow()
        assert shadow.receive(whole_piece) and shadow.label == "1"
        with pytest.raises(ValueError, match=message):
            for each in pieces:
                assert not shadow.receive(each)
        if "here are" in message or "after 0" in message:  # nothing has been touched
            assert shadow.receive(piece(change, digest=good)) and shadow.label == "2"
        else:
            assert shadow.label == ""
            with pytest.raises(ValueError, match="and here are ''"):
                shadow.receive(piece(change, digest=good))
        assert shadow.receive(whole_piece) and (shadow.tensors["w"] == old).all()


# -- pushes


@pytest.mark.slow
def test_fifty_updates_leave_the_bits_of_a_full_push(make, both, kind):
    engine, params = make(), weights(0, TIED)
    metrics = engine.publish(params, 0)
    assert metrics["bridge/sent_fraction"] == 1 and metrics["bridge/full_pushes"] == 2
    for version in range(1, 51):
        params = trained(params, version)
        metrics = engine.publish(params, version)
        assert metrics["bridge/full_pushes"] == 0 and metrics["bridge/sent_fraction"] < 0.07
        assert metrics["bridge/probe_mean_abs"] < 1e-5 and metrics["servers/usable"] == 2
        assert metrics["rollout/publish_bytes"] < 0.07 * source_for(kind).num_bytes
    for server in both:
        assert sums(held(server)) == sums(held(both[0])) == whole(params, kind)
    assert ids(engine.generate(requests(), GREEDY, KEY)) == ids(native(params, GREEDY, model=TIED))


def test_a_server_that_was_restarted_gets_all_weights_in_the_same_push(make, both, kind):
    engine, params = make(), weights(0, TIED)
    assert engine.publish(params, 0)["bridge/sent_fraction"] == 1
    params = trained(params, 1)
    metrics = engine.publish(params, 1)
    assert metrics["bridge/full_pushes"] == 0 and metrics["bridge/sent_fraction"] < 0.07
    assert sums(held(both[0])) == sums(held(both[1])) == whole(params, kind)
    # Another process with the same address; and so many changes that tensors are sent whole.
    (both[1].behave if kind == "vllm" else both[1].restart)()
    params = weights(1, TIED)
    metrics = engine.publish(params, 2)
    assert metrics["servers/usable"] == 2 and metrics["bridge/full_pushes"] == 1
    assert metrics["rollout/publish_bytes"] == source_for(kind).num_bytes
    assert sums(held(both[0])) == sums(held(both[1])) == whole(params, kind)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hash", "base", "interrupted"])
def test_a_server_that_refuses_changes_keeps_its_weights_and_gets_all_of_them(make, both, kind, fault):
    engine, params = make(patience=60.0), weights(0, TIED)
    engine.publish(params, 0)
    before, label = sums(held(both[1])), both[1].label
    shadow = both[1].shadow
    if fault == "hash":  # a bit of its copy has flipped
        shadow.tensors["model.layers.1.mlp.up_proj.weight"][3, 5] ^= 1
    elif fault == "base":
        shadow.label = "another"
    else:  # the first piece of another push, whose trainer then was killed
        shadow._check_place(Piece(label, "x", 0, False))
    params = trained(params, 1)
    seen, server = [], engine.pool.servers[1]
    leave_out = server.leave_out

    def left_out(error):
        seen.append((sums(held(both[1])), both[1].label, str(error)))
        both[1].down = False
        if kind == "sglang":
            both[1].restart()  # as the launcher does with a server that has ended
        leave_out(error)

    server.leave_out = left_out
    assert engine.publish(params, 1)["servers/usable"] >= 1 and len(seen) == 1
    assert seen[0][:2] == (before, label)
    assert {"hash": "other bits", "base": "and here are 'another'", "interrupted": "here are ''"}[fault] in (
        seen[0][2]
    )
    engine.pool.run(engine.pool.admit(server))  # or the health check has done it
    assert server.usable and both[1].label == both[0].label
    assert sums(held(both[1])) == sums(held(both[0])) == whole(params, kind)
    assert engine.publish(trained(params, 2), 2)["bridge/full_pushes"] == 0


@pytest.mark.slow
def test_a_push_that_broke_off_and_a_trainer_that_was_restarted_are_followed_by_full_ones(
    make, both, transport
):
    engine, params = make(), weights(0, TIED)
    engine.publish(params, 0)
    parts = engine.publisher.transport.parts(trained(params, 1), "lost")
    assert next(parts).base == "0-1"
    parts.close()
    assert engine.publish(trained(params, 2), 2)["bridge/full_pushes"] == 2
    with pytest.raises(ServerError, match="the next push, which has started"):
        content = next(engine.publisher.transport.parts(params, "a")).content
        next(engine.publisher.transport.parts(params, "b"))
        (engine.publisher.transport if transport == "http" else engine.publisher.transport.delta)._whole(
            content
        )
    assert make().publish(params, 0)["bridge/full_pushes"] == 2


# -- rules


def test_the_recipe_names_what_changes_need():
    for wrong in ({}, {"transport": "http", "quantization": "fp8"}):
        ((field, problem),) = ServersConfig(push="delta", **wrong).problems()
        assert field == "push" and "needs transport http (vLLM: or group) and quantization none" in problem
    assert not list(ServersConfig(push="delta", transport="group").problems())
    servers = ServersConfig(push="delta", transport="http")
    assert not list(servers.problems())
    rollout = RolloutConfig(engine="vllm", servers=("http://127.0.0.1:1",))
    config = TrainConfig(rollout=rollout, servers=servers, lora=LoraConfig(rank=4))
    (rule,) = (rule for rule in RECIPE if rule.problems.__name__ == "_servers_hold_the_base")
    assert ["sends the adapters alone" in problem for problem in rule.problems(config)] == [True]


def test_an_sglang_server_without_our_loader_is_named():
    assert loader_problem({"custom_weight_loader": [LOADER]}) == ""
    assert "Start it with --custom-weight-loader jaxrl_sglang_loader.load" in loader_problem({})
