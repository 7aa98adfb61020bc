"""Asynchronous rollout: snapshots, partial rollouts continued, whole runs."""
# ruff: noqa: F811

import asyncio
import json
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_sglang import FakeServer
from servers_shared import GREEDY, KEY, MODEL, native, requests, until, weights
from test_sglang import make, servers  # noqa: F401
from test_sglang_train import ARGS, rows

from jaxrl_llm.rollout.engine import GenerationCall, PartialResponse, Reply, Request
from jaxrl_llm.rollout.meter import Meter
from jaxrl_llm.rollout.partial import pack_responses, unpack_responses
from jaxrl_llm.rollout.servers.generate import ResponseGenerator
from jaxrl_llm.structs import Episode
from jaxrl_llm.train import main


def test_the_meter_integrates_requests_over_time():
    now = 0.0
    meter = Meter(clock=lambda: now)
    now = 1.0  # nothing to do for a second
    with meter:
        now = 2.0
        with meter:
            now = 4.0
    assert meter.read(4) == ((1 + 2 * 2) / 4 / 4, 1 / 4)
    now = 6.0
    assert meter.read(4) == (0.0, 1.0)


@pytest.mark.slow
def test_a_snapshot_has_what_is_written_and_the_writing_goes_on(make, servers):
    engine, params = make(urls=[servers[0].url]), weights()
    engine.publish(params, 3)
    theirs = native(params, GREEDY)
    servers[0].holds_after = 4
    pending = engine.start(GenerationCall(requests(), GREEDY, KEY))
    until(lambda: servers[0].held == sum(len(t.response_ids) > 4 for t in theirs))
    ((*found,),) = engine.snapshot([pending])
    for partial, t in zip(found, theirs, strict=True):
        assert partial.ids == t.response_ids[:4].tolist()
        np.testing.assert_allclose(partial.logprobs, t.logprobs[:4], atol=1e-5)
        assert set(partial.versions) <= {3}
    servers[0].holds_after = 0
    assert [t.response_ids.tolist() for t in pending.result()] == [t.response_ids.tolist() for t in theirs]


@pytest.mark.slow
def test_written_responses_are_continued_and_never_written_again(make, servers):
    engine, params = make(), weights()
    engine.publish(params, 1)
    theirs = native(params, GREEDY)
    long = [len(t.response_ids) > 3 for t in theirs]
    assert long.count(True) > 2
    half = [
        PartialResponse(t.response_ids[:3].tolist(), [-9.0] * 3, [0] * 3, "" if more else "stop")
        for t, more in zip(theirs, long, strict=True)
    ]
    half[0].finish = "stop"
    mine = engine.start(GenerationCall(requests(), GREEDY, KEY, partial=half)).result()
    assert mine[0].response_ids.tolist() == theirs[0].response_ids[:3].tolist()
    for a, b in zip(mine[1:], theirs[1:], strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist()
        assert a.versions.tolist() == [0] * 3 + [1] * (len(a.response_ids) - 3)
        assert a.logprobs[:3].tolist() == [-9.0] * 3


def test_new_weights_reach_responses_in_the_middle_and_each_token_knows_its_own(make, servers):
    engine = make(urls=[servers[0].url])
    engine.publish(weights(0), 1)
    servers[0].holds_after = 2
    pending = engine.start(GenerationCall(requests(prompts=1, responses=1), GREEDY, KEY))
    until(lambda: servers[0].held == 1)
    engine.publish(weights(1), 2)
    servers[0].holds_after = 0
    engine.snapshot([pending])
    (made,) = pending.result()
    assert set(made.versions[:2]) == {1} and set(made.versions[2:]) == {2}
    (rest,) = native(weights(1), GREEDY, [made_request(made, 2)])
    assert made.response_ids[2:].tolist() == rest.response_ids.tolist()


def test_what_an_earlier_run_had_stays_until_a_new_environment_replies_otherwise():
    """Also in a checkpoint that is taken while its turns are sent again."""
    response = PartialResponse([1, 2, 3, 4], [-1.0, -1.0, 0.0, -1.0], [7] * 4, "", observed=[(2, 3)])
    response.request = Request(np.array([9]), 0, 1, 9)
    response.routes = [np.full((1, 1), i) for i in range(4)]  # of the tokens that are kept they stay
    for reply, more, after in (([3], True, [1, 2, 3, 4]), ([5, 5], True, [1, 2, 5, 5]), ([], False, [1, 2])):
        future, again = Future(), response.copy()
        dialogue = SimpleNamespace(patience=60, reply=lambda *asked, future=future, **start: future)

        async def replay(future=future, again=again, dialogue=dialogue, reply=reply, *, more=more):
            task = asyncio.create_task(ResponseGenerator(None, (), {}, MODEL)._replayed(again, dialogue))
            await asyncio.sleep(0.01)
            assert (again.ids, again.observed) == (response.ids, response.observed)
            future.set_result(Reply(reply, not more, Episode(1)))
            return await task

        assert asyncio.run(replay()) == more and again.ids == after and again.episode.turns == 1
        assert [route.item() for route in again.routes] == [0, 1, 2, 3][: 4 if reply == [3] else 3]


def made_request(made, tokens):
    """The prompt with the first tokens of a response, as a prompt of its own."""
    (asked,) = requests(prompts=1, responses=1)
    ids = np.concatenate([asked.prompt_ids, made.response_ids[:tokens]])
    return asked._replace(prompt_ids=ids, max_tokens=asked.max_tokens - tokens)


AHEAD = ["--rollout.max_staleness", "1", "--checkpoint.every", "1", "--checkpoint.keep", "9"]


@pytest.mark.slow
def test_a_run_ahead_stays_within_its_bound_and_a_killed_one_goes_on_with_what_was_written(tmp_path):
    server, run = FakeServer(), tmp_path / "run"
    args = [*ARGS, "--steps", "3", "--rollout.servers", server.url, *AHEAD, "--run_dir", str(run)]
    assert main(args) == 0
    first = [row for row in rows(run) if row["kind"] == "train"]
    assert [row["staleness/max"] for row in first] == [0, 1, 1]
    assert all(0 <= row["trainer/idle_fraction"] <= 1 and row["servers/occupancy"] > 0 for row in first)
    begun = run / "checkpoints/2/rollouts.npz"  # after the supervised step and one of the run
    assert list(unpack_responses(begun.read_bytes())) == [1]
    assert not (run / "checkpoints/4/rollouts.npz").exists()
    for later in (run / "checkpoints/3", run / "checkpoints/4"):
        later.rename(tmp_path / later.name)
    replace(begun, pack_responses({1: [[PartialResponse([40 + i], [-1.0], [0], "stop") for i in range(8)]]}))
    assert main(args) == 0
    again = [row for row in rows(run) if row["kind"] == "train"]
    assert again[1]["response_tokens/max"] == 1  # of what the checkpoint had, nothing is written anew
    assert again[1]["staleness/max"] == 1 and again[2]["response_tokens/max"] > 1


KILLED = """
import os, signal, sys
from jaxrl_llm import train
from jaxrl_llm.checkpoint.state import Checkpointer
save = Checkpointer.save

def save_or_die(self, step, *args, **kwargs):
    if step == 4:
        self.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    save(self, step, *args, **kwargs)

Checkpointer.save = save_or_die
train.main()
"""


@pytest.mark.slow
def test_a_run_that_over_samples_trains_each_prompt_once_after_it_was_killed_too(tmp_path, capsys):
    """Four prompts a step, eight in progress; a kill -9 takes the third of four steps with it."""
    server, run = FakeServer(), tmp_path / "run"
    server.pace = 0.02
    bound = ["--rollout.max_staleness", "2", *AHEAD[2:]]
    args = [*ARGS, "--steps", "4", "--rollout.servers", server.url, *bound, "--run_dir", str(run)]
    killed = subprocess.run([sys.executable, "-c", KILLED, *args, "--rollout.oversample", "2"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["1", "2", "3"]
    position = lambda step: json.loads((run / f"checkpoints/{step}/cursor.json").read_text())
    used = {step: {*range(position(step)["draw"]), *position(step)["used"]} for step in (2, 3)}
    assert len(used[2]) == 4 and len(used[3]) == 8 and used[2] < used[3]
    saved = unpack_responses((run / "checkpoints/3/rollouts.npz").read_bytes())
    assert {*saved, *used[3]} == set(range(12)) and used[3].isdisjoint(saved)
    assert {len(lists[0]) for lists in saved.values()} == {2}
    assert main([*args, "--rollout.oversample", "1.5"]) == 2
    assert "rollout.oversample: was 2.0, now 1.5" in capsys.readouterr().err
    assert main([*args, "--rollout.oversample", "2"]) == 0
    assert position(5) == {"draw": 16, "used": [], "steps": {}}
    trained = [row for row in rows(run) if row["kind"] == "train"]
    assert [row["oversample/carried"] for row in trained] == [8, 8, 8, 0]
    assert max(row["staleness/max"] for row in trained) <= 2


ENV = """
from jaxrl_llm.envs.env import Step

class Twice:
    async def reset(self, example, seed): pass
    async def step(self, state, turn): return Step("go on", 1.0, done=turn.number == 2)
"""


@pytest.mark.slow
def test_a_checkpoint_holds_conversations_too(tmp_path):
    (tmp_path / "env.py").write_text(ENV)
    run, server = tmp_path / "run", FakeServer()
    env = ["--env.name", f"{tmp_path / 'env.py'}:Twice", "--max_response_tokens", "60"]
    env += ["--tokens_per_device", "80"]
    args = [*ARGS, "--rollout.servers", server.url, *AHEAD, *env, "--run_dir", str(run)]
    assert main(args) == 0
    (saved,) = unpack_responses((run / "checkpoints/2/rollouts.npz").read_bytes()).values()
    assert len(saved[0]) == 8
    (run / "checkpoints/3").rename(tmp_path / "3")
    assert main(args) == 0
    last = [row for row in rows(run) if row["kind"] == "train"][-1]
    assert last["step"] == 3 and 1 <= last["env/turns_mean"] <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "ahead",
    [[], AHEAD, [*AHEAD, "--rollout.oversample", "1.5"]],
    ids=["in the step", "a step ahead", "over-sampled"],
)
def test_programs_call_the_policy_of_servers(ahead, tmp_path):
    """Two calls each; a run ahead goes on from a checkpoint that holds started responses."""
    run, program = tmp_path / "run", Path(__file__).parents[2] / "envs/gateway/programs.py"
    env = ["--env.gateway.command", f"{sys.executable} {program} completes", "--env.gateway.reward", "post"]
    env += ["--max_response_tokens", "24", "--tokens_per_device", "48"]
    args = [*ARGS, "--rollout.servers", FakeServer().url, *ahead, *env, "--run_dir", str(run)]
    assert main(args) == 0
    if ahead:
        (run / "checkpoints/3").rename(tmp_path / "3")
        assert main(args) == 0
    trained = [row for row in rows(run) if row["kind"] == "train"]
    assert [row["staleness/max"] for row in trained] == ([0, 1] if ahead else [0, 0])
    for row in trained:
        assert row["env/turns_mean"] == 2 and row["env/failed_fraction"] == 0 and row["reward/std"] > 0
        assert ahead or row["mismatch/max_abs"] < 1e-4


def replace(file, data):
    """Other contents for a file of a checkpoint, and the manifest that vouches for them."""
    from jaxrl_llm.checkpoint import manifest

    folder = file.parent
    old = manifest.read_manifest(folder)
    file.write_bytes(data)
    (folder / manifest.MANIFEST).unlink()
    meta = json.loads((folder / manifest.META).read_text())
    manifest.write_manifest(folder, old.step, old.arrays, meta, metrics=old.metrics)


def test_the_native_engine_needs_devices_of_its_own(tmp_path, capsys):
    native_args = [word for word in ARGS if word not in ("--rollout.engine", "sglang")]
    assert main([*native_args, *AHEAD, "--run_dir", str(tmp_path)]) == 2
    assert "--rollout.max_staleness is 1: the native engine generates while" in capsys.readouterr().err
    own = ["--rollout.devices", "4:8", "--rollout.mesh.fsdp", "4"]
    assert main([*native_args, *AHEAD, *own, "--run_dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "--rollout.devices 4:8 and --devices have 4 device(s) in common. Set --devices to others" in error
