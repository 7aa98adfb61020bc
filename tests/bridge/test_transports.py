"""Weights to servers with SGLang's JSON: in order, each step ended, and a failure is one server's."""

import os
import subprocess
import sys

import jax
import pytest
from fake_sglang import FakeServer
from servers_shared import GREEDY, KEY, MODEL, TOKENIZER, engine_for, native, requests, weights

from jaxrl_llm.bridge.buckets import WeightSource
from jaxrl_llm.bridge.transports.cuda_ipc import shared_gpus
from jaxrl_llm.bridge.transports.disk import DiskTransport
from jaxrl_llm.bridge.transports.http_weights import HttpTransport
from jaxrl_llm.bridge.transports.process_group import GroupTransport, Relay, address_towards
from jaxrl_llm.builders import engines
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.errors import RunError, ServerError
from jaxrl_llm.hf import export
from jaxrl_llm.recipe.checks import check_on_devices
from jaxrl_llm.rollout.config import RolloutConfig, ServersConfig
from jaxrl_llm.rollout.servers.kinds import KINDS


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    return export.save_description(MODEL, tmp_path_factory.mktemp("shell"), dtype="float32")


@pytest.fixture(scope="module")
def both(shell):
    return [FakeServer(model_path=shell), FakeServer(model_path=shell)]


@pytest.fixture
def servers(both):
    """The two, well again."""
    for server in both:
        server.sessions, server.ranks, server.fails_at = True, 1, ""
        server.open = server.paused = False
        server.asked.clear()
    return both


@pytest.fixture
def make(servers, tmp_path):
    closing = []

    def engine(transport="http", **settings):
        made = DiskTransport(tmp_path / "weights", "float32", TOKENIZER)
        source = WeightSource(MODEL, "float32", 12_000)
        if transport == "http":
            pytest.importorskip("torch")  # the fake server reads as SGLang does
            made = HttpTransport(source, KINDS["sglang"])
        if transport == "group":
            made = GroupTransport(source, KINDS["sglang"], python=sys.executable, timeout=30.0)
        one = engine_for([s.url for s in servers], made, **settings)
        closing.append(one.pool)
        if transport == "group":
            closing.append(made)
        return one

    yield engine
    for one in reversed(closing):
        one.close()


def routes(server):
    """Of weights, in order; each run of the same one once."""
    names = [name for name, _ in server.asked]
    return [name for name, before in zip(names, ["", *names], strict=False) if name != before]


@pytest.mark.slow
def test_tensors_arrive_in_a_session_inside_a_pause_and_compute_what_the_trainer_computes(make, servers):
    servers[1].ranks = 2
    engine, params = make(), weights()
    metrics = engine.publish(params, 5)
    assert metrics["bridge/probe_mean_abs"] < 1e-5
    assert metrics["rollout/publish_bytes"] == 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    assert (
        metrics["rollout/publish_seconds"] > metrics["bridge/pause_seconds"] > metrics["bridge/wire_seconds"]
    )
    for server in servers:
        assert routes(server) == [
            "pause_generation", "begin_weight_update", "update_weights_from_tensor", "end_weight_update",
            "continue_generation",
        ]  # fmt: skip
        sent = [body for name, body in server.asked if name == "update_weights_from_tensor"]
        assert len(sent) > 3 and sent[-1] == {"flush_cache": True, "weight_version": "5-1"}
        assert all(body == {"flush_cache": False} for body in sent[:-1])
    mine, theirs = engine.generate(requests(), GREEDY, KEY), native(params, GREEDY)
    assert [t.response_ids.tolist() for t in mine] == [t.response_ids.tolist() for t in theirs]
    engine.publish(weights(1), 6)
    assert [server.label for server in servers] == ["6-2", "6-2"]


@pytest.mark.parametrize("transport", ["disk", "http"])
@pytest.mark.parametrize("pause", ["abort", "retract", "in_place"])
def test_what_is_cached_is_dropped_unless_responses_go_on_in_place(make, servers, transport, pause):
    make(transport, pause=pause).publish(weights(), 1)
    assert servers[0].asked[0] == ("pause_generation", {"mode": pause})
    ((last_route, last),) = [(name, body) for name, body in servers[0].asked if "weight_version" in body]
    assert last["flush_cache"] == (pause != "in_place")
    assert routes(servers[0])[-2:] == [
        "flush_cache" if pause == "in_place" else "end_weight_update" if transport == "http" else last_route,
        "continue_generation",
    ]
    assert not servers[0].paused


def test_a_server_of_before_sessions_needs_none(make, servers):
    for server in servers:
        server.sessions = False
    engine = make()
    assert engine.publish(weights(), 1)["servers/usable"] == 2
    assert "end_weight_update" not in routes(servers[0])


def test_a_session_that_a_killed_trainer_left_open_is_ended_first(make, servers):
    servers[0].open = servers[0].paused = True
    assert make().publish(weights(), 1)["servers/usable"] == 2
    assert routes(servers[0])[:4] == [
        "pause_generation", "begin_weight_update", "end_weight_update", "begin_weight_update"
    ]  # fmt: skip
    assert not servers[0].open and not servers[0].paused


@pytest.mark.parametrize(
    "step",
    ["pause_generation", "begin_weight_update", "update_weights_from_tensor", "end_weight_update"],
)
def test_a_server_that_fails_in_a_push_is_left_out_and_goes_on(make, servers, step):
    engine = make()
    engine.publish(weights(0), 1)
    servers[0].fails_at = step
    servers[0].asked.clear()
    assert engine.publish(weights(1), 2)["servers/usable"] == 1
    left = engine.pool.servers[0]
    assert not left.usable and f"answered 500 to /{step}" in left.problem
    assert routes(servers[0])[-1] == "continue_generation" and not servers[0].paused
    assert engine.pool.servers[1].usable and servers[1].label == "2-2"
    servers[0].fails_at = ""
    assert engine.publish(weights(2), 3)["servers/usable"] == 2


def test_a_server_that_does_not_go_on_is_left_out(make, servers):
    engine = make()
    servers[0].fails_at = "continue_generation"
    assert engine.publish(weights(0), 1)["servers/usable"] == 1
    assert "answered 500 to /continue_generation" in engine.pool.servers[0].problem


def test_no_answer_in_time_is_no_success(make, servers):
    engine = make()
    engine.publish(weights(0), 1)
    engine.pool.timeout = 2.0
    with servers[0].turn:  # it hangs
        assert engine.publish(weights(1), 2)["servers/usable"] == 1
    assert "no answer to /server_info in 2 s" in engine.pool.servers[0].problem


def test_a_push_that_the_trainer_breaks_off_leaves_no_server_paused_or_in_use(make, servers):
    engine = make()
    engine.publish(weights(0), 1)
    parts = engine.publisher.transport.parts

    def broken(params, label):
        yield next(parts(params, label))
        raise MemoryError

    engine.publisher.transport.parts = broken
    with pytest.raises(MemoryError):
        engine.publish(weights(1), 2)
    assert not any(server.paused or server.open for server in servers)
    assert [server.problem for server in engine.pool.servers] == ["the trainer broke off a push"] * 2


def test_non_finite_weights_are_refused_and_no_server_is_asked_or_blamed(make, servers):
    engine = make("disk")
    engine.publish(weights(0), 1)
    servers[0].asked.clear()
    leaves, tree = jax.tree.flatten(weights(1))  # the first is the embedding, which the probe hardly reads
    params = jax.tree.unflatten(tree, [leaves[0].at[5, 3].set(float("inf")), *leaves[1:]])
    with pytest.raises(RunError, match=r"not sent to the servers: weights hold NaN or Inf: embed\. Lower"):
        engine.publish(params, 2)
    assert not servers[0].asked and all(server.usable for server in engine.pool.servers)


def test_ctrl_c_in_the_terminal_does_not_reach_a_relay():
    relay = Relay(sys.executable, "127.0.0.1", 1, 5.0)
    assert os.getsid(relay._process.pid) == relay._process.pid != os.getsid(0)
    relay.kill()


def test_a_group_needs_torch_and_says_so():
    source = WeightSource(MODEL, "float32", 1 << 20)
    with pytest.raises(ValueError, match=r"--servers.python /bin/false: it has no torch.*Install torch"):
        GroupTransport(source, KINDS["sglang"], python="/bin/false", timeout=5.0)


NOISY = """
import os, runpy, sys, torch.distributed
TCPStore = torch.distributed.TCPStore
def noisy(*args, **named):  # as NCCL is where NCCL_DEBUG is set, at any time
    os.write(1, b"NCCL INFO\\n" * 20_000)
    return TCPStore(*args, **named)
torch.distributed.TCPStore = noisy
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


BROKEN = """
import runpy, sys, torch.distributed
def refuse(name):
    raise ValueError("no_such_backend")
torch.distributed.distributed_c10d.Backend = refuse
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def python_with(tmp_path, script):
    """Return an interpreter that runs a script before the relay."""
    (tmp_path / "before.py").write_text(script)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/before.py "$@"\n')
    python.chmod(0o755)
    return python


def test_what_libraries_print_in_a_relay_is_no_reply(tmp_path):
    pytest.importorskip("torch")
    python = python_with(tmp_path, NOISY)
    relay = Relay(str(python), "127.0.0.1", 1, 20.0)
    assert relay.read_line().isdigit()
    relay.kill()


def test_a_relay_that_cannot_work_says_why(tmp_path):
    pytest.importorskip("torch")
    relay = Relay(str(python_with(tmp_path, BROKEN)), "127.0.0.1", 1, 20.0)
    assert relay.read_line().isdigit()
    with pytest.raises(ServerError, match=r"(?s)relay of a process group has ended: .*no_such_backend"):
        relay.read_line()
    relay.kill()


@pytest.mark.filterwarnings("ignore")  # of torch's making
@pytest.mark.slow
def test_a_group_brings_the_weights_and_its_end_is_one_servers_problem(make, servers):
    pytest.importorskip("torch")
    engine = make("group")
    assert engine.publish(weights(), 1)["bridge/probe_mean_abs"] < 1e-5
    assert engine.publish(weights(1), 2)["servers/usable"] == 2
    relays = engine.publisher.transport._relays
    relays[servers[0].url]._process.kill()
    assert engine.publish(weights(2), 3)["servers/usable"] == 1
    assert not engine.pool.servers[0].usable and not servers[0].paused
    assert list(relays) == [servers[1].url]
    assert engine.publish(weights(3), 4)["servers/usable"] == 2
    assert [server.label for server in servers] == ["4-4", "4-4"]
    engine.publisher.transport.close()
    assert [routes(server)[-1] for server in servers] == ["destroy_weights_update_group"] * 2
    assert not relays and [server.group for server in servers] == [None, None]


def test_this_machines_address_is_the_one_that_the_server_sees():
    assert address_towards("http://127.0.0.1:30000") == "127.0.0.1"


def test_ipc_without_gpus_is_refused():
    rollout = RolloutConfig(engine="sglang", launch=1)
    with pytest.raises(
        ValueError, match=r"--servers.transport ipc: .* 1 process\(es\) on cpu. Use --servers"
    ):
        check_on_devices(TrainConfig(rollout=rollout, servers=ServersConfig(transport="ipc")), jax.devices())


@pytest.mark.parametrize(
    ("theirs", "ours", "ranks", "found"),
    [
        ("", "", 2, [0, 1]),
        ("2,3", "", 2, [2, 3]),
        ("2,3", "0,1,2,3", 1, [2]),
        ("6", "4,6", 1, [1]),
        ("6", "4,5", 1, [-1]),
        ("", "4,5", 2, [0, 1]),
        ("4", "4,5", 2, [0, -1]),
    ],
)
def test_a_rank_is_on_one_of_the_trainers_gpus(theirs, ours, ranks, found):
    assert shared_gpus(theirs, ours, ranks) == found


HANDLES = """
import base64, io, pickle, torch
from torch.multiprocessing import reductions
from jaxrl_llm.bridge.transports import cuda_ipc as ipc
size, storage = torch.Size([2, 3]), torch.storage.TypedStorage
arguments = (torch.Tensor, size, (3, 1), 0, storage, torch.float32, 1, b"handle")
reductions.reduce_tensor = lambda tensor: (reductions.rebuild_cuda_tensor, arguments)
ipc.uuid_of = lambda device: f"GPU-{device}"
class Reading(pickle.Unpickler):
    def find_class(self, module, name):
        if name == "rebuild_cuda_tensor":
            return lambda *given: (module, *given[1:4], *given[5:])
        return super().find_class(module, name)
made = ipc.pickle_handles([("a", torch.zeros(2, 3))])
print(Reading(io.BytesIO(base64.b64decode(made))).load())
"""


@pytest.mark.slow
def test_handles_name_a_gpu_by_its_uuid():
    """torch's reduction of CUDA memory is a fake; the pickle around it is the real one."""
    pytest.importorskip("torch")
    out = subprocess.run([sys.executable, "-c", HANDLES], capture_output=True, text=True)
    expected = "torch.Size([2, 3]), (3, 1), 0, torch.float32, 'GPU-1', b'handle'"
    assert out.stdout.strip() == f"[('a', ('torch.multiprocessing.reductions', {expected}))]", out.stderr


def test_the_transport_of_the_config_and_its_warning(capsys):
    source = WeightSource(MODEL, "float32", 1 << 20)
    made = engines._transport(ServersConfig(transport="http"), source, KINDS["sglang"], None)
    assert isinstance(made, HttpTransport)
    assert "--servers.transport http: weights are sent to the servers as pickles" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"--servers.transport ipc: trainer and"):
        engines._transport(ServersConfig(transport="ipc"), source, KINDS["sglang"], None)


def test_what_is_sent_is_what_the_models_folder_holds(tmp_path):
    export.save_model(weights(), MODEL, tmp_path / "hf", dtype="float32")
    source = WeightSource(MODEL, "float32", 1 << 20)
    engines._check_names(source, MODEL, tmp_path / "hf")
    source.tensors = [t._replace(name=t.name.replace("mlp.up", "mlp.gate_up")) for t in source.tensors]
    with pytest.raises(ValueError, match=r"hf: 2 missing: .*mlp.up_proj.*; 2 unknown: .*mlp.gate_up_proj"):
        engines._check_names(source, MODEL, tmp_path / "hf")
