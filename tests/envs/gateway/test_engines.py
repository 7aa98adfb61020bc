"""Programs call the policy through each engine, and new weights are published between their calls.

Captured are the ids that the engine was asked for and wrote, and the version of the weights that wrote them.
"""

import dataclasses
import threading

import jax
import numpy as np
import pytest
from fake_sglang import FakeServer
from fake_vllm import FakeVLLM
from scripted import ROW, SIZES, Program, open_gateway
from servers_shared import KEY, MODEL, TOKENIZER, engine_for, score_of, until, weights
from slow_cases import with_slow

from jaxrl_llm.bridge import vllm
from jaxrl_llm.bridge.transports.disk import DiskTransport
from jaxrl_llm.experience.rollouts import start_responses
from jaxrl_llm.rollout.config import RolloutConfig, SamplingConfig
from jaxrl_llm.rollout.native.asynchronous import AsynchronousEngine
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh

TIED = dataclasses.replace(MODEL, tie_embeddings=True)
PROGRAMS, PROMPT, RESPONSE = 4, 8, 40
LIMITS = (6, 4)  # tokens of the two calls of a program
SAMPLED = SamplingConfig()


@pytest.fixture
def gateway(monkeypatch):
    sizes = SIZES | {"max_prompt_tokens": PROMPT, "max_response_tokens": RESPONSE}
    with open_gateway(monkeypatch, sizes=sizes) as opened:
        yield opened


class Programs:
    """Programs that wait between their two calls until `gate` is set.

    Attributes:
        seen: of each program, (ids sent, ids read, log-probs read) of each call.
    """

    def __init__(self, gateway):
        self.gateway, self.gate, self.begun = gateway, threading.Event(), threading.Semaphore(0)
        self.seen = [[] for _ in range(PROGRAMS)]
        self.threads = [threading.Thread(target=self._play, args=(i,)) for i in range(PROGRAMS)]
        for thread in self.threads:
            thread.start()

    def _play(self, number):
        program, ids = Program(self.gateway), [5, 6, 10 + number]
        for limit in LIMITS:
            call = {"prompt": ids, "max_tokens": limit, "logprobs": 0}
            choice = program.call("/completions", **call)["choices"][0]
            logprobs = choice["logprobs"]["token_logprobs"]
            self.seen[number].append((ids, choice["token_ids"], logprobs))
            ids = [*ids, *choice["token_ids"], 9]
            self.begun.release()
            self.gate.wait()
        program.done()

    def wait_for_first_calls(self):
        for _ in range(PROGRAMS):
            assert self.begun.acquire(timeout=60)


def start(engine, gateway):
    """Return (the pending responses to programs, the programs)."""
    prompts = [ROW] * (PROGRAMS // 2)
    pending = start_responses(engine, prompts, 2, RESPONSE, sampling=SAMPLED, key=KEY, env=gateway)
    return pending, Programs(gateway)


def check(trajectories, programs, versions, model=MODEL):
    """Compare trajectories with what programs have sent and read, and with the weights of these versions.

    Return the calls as (ids that the policy read, limit, ids that it wrote, version).
    """
    calls = []
    by_prompt = {tuple(turns[0][0]): turns for turns in programs.seen}
    assert len(trajectories) == len(by_prompt) == PROGRAMS
    for t in trajectories:
        first, second = by_prompt.pop(tuple(t.prompt_ids.tolist()))
        tokens = [*t.prompt_ids.tolist(), *t.response_ids.tolist()]
        assert t.episode.failure == "" and t.episode.turns == 2
        assert tokens == [*second[0], *second[1]] and len(t.logprobs) == len(tokens) - len(t.prompt_ids)
        scores = {
            v: np.asarray(score_of(model)(weights(v, model), np.array(tokens, np.int32))) for v in (1, 2)
        }
        observed = np.ones(len(tokens), bool)
        for (sent, read, logprobs), limit, version in zip((first, second), LIMITS, versions, strict=True):
            span = slice(len(sent), len(sent) + len(read))
            mine = slice(span.start - len(t.prompt_ids), span.stop - len(t.prompt_ids))
            assert tokens[: span.start] == sent and tokens[span] == read and 0 < len(read) <= limit
            assert t.logprobs[mine].tolist() == logprobs and t.mask[mine].all()
            expected = scores[version][span.start - 1 : span.stop - 1]
            np.testing.assert_allclose(logprobs, expected, atol=3e-5)
            assert np.abs(expected - scores[3 - version][span.start - 1 : span.stop - 1]).max() > 0.01
            assert set(t.versions[mine]) == {version}
            observed[span] = False
            calls.append((sent, limit, read, version))
        assert not t.mask[observed[len(t.prompt_ids) :]].any()
    return calls


def test_the_native_engine(gateway):
    engine = NativeEngine(
        RolloutConfig(slots=4), MODEL, make_mesh(MeshConfig(), jax.devices()[:1]), TOKENIZER
    )
    engine.set_lengths(PROMPT, RESPONSE, turns=True)
    for version in (1, 2):
        engine.publish(weights(version), version)
        pending, programs = start(engine, gateway)
        programs.gate.set()
        check(pending.result(), programs, (version, version))


def test_the_native_engine_ahead_of_training_keeps_the_weights_of_the_start(gateway):
    mesh = make_mesh(MeshConfig(), jax.devices()[6:7])
    inner = NativeEngine(RolloutConfig(slots=4), MODEL, mesh, TOKENIZER)
    inner.set_lengths(PROMPT, RESPONSE, turns=True)
    engine = AsynchronousEngine(inner)
    engine.publish(weights(1), 1)
    pending, programs = start(engine, gateway)
    programs.wait_for_first_calls()
    engine.publish(weights(2), 2)
    programs.gate.set()
    check(pending.result(), programs, (1, 1))
    later, programs = start(engine, gateway)
    programs.gate.set()
    check(later.result(), programs, (2, 2))
    engine.close()


class RecordingServer(FakeServer):
    """Keeps (body, answer, label of the weights) of what it generates."""

    def __init__(self):
        self.made = []
        super().__init__()

    def _generate(self, body):
        said = super()._generate(body)
        self.made.append((body, said, self.label))
        return said


def sglang_pool(folder):
    server = RecordingServer()
    transport = DiskTransport(folder, "float32", TOKENIZER)
    return server, MODEL, engine_for([server.url], transport)


def vllm_pool(folder):
    server = FakeVLLM(TIED)
    server.model.__class__, server.model.made = RecordingServer, []
    transport = DiskTransport(folder, "float32", TOKENIZER, vllm.with_tied_head)
    rollout = RolloutConfig(engine="vllm", servers=(server.url,))
    return server.model, TIED, engine_for([server.url], transport, TIED, rollout=rollout)


@pytest.mark.parametrize("pool", with_slow([sglang_pool, vllm_pool], {vllm_pool}))
def test_servers_write_each_turn_with_their_newest_weights(gateway, tmp_path, pool):
    server, model, engine = pool(tmp_path)
    engine.publish(weights(1, model), 1)
    pending, programs = start(engine, gateway)
    programs.wait_for_first_calls()
    engine.publish(weights(2, model), 2)
    programs.gate.set()
    calls = check(pending.result(), programs, (1, 2), model)
    asked = [
        (body["input_ids"], body["sampling_params"]["max_new_tokens"], said["output_ids"], label)
        for body, said, label in server.made
        if body["sampling_params"].get("sampling_seed")  # probes have none
    ]
    versions = {label: version for version, label in enumerate(dict.fromkeys(a[3] for a in asked), 1)}
    assert sorted((*rest, versions[label]) for *rest, label in asked) == sorted(calls)
    engine.pool.close()


def test_new_weights_in_the_middle_of_a_turn(gateway, tmp_path):
    """The program reads one turn; each of its tokens has the version of the weights that wrote it."""
    server, model, engine = sglang_pool(tmp_path)
    engine.publish(weights(1), 1)
    server.holds_after = 2
    pending, programs = start(engine, gateway)
    until(lambda: server.held == PROGRAMS)
    engine.publish(weights(2), 2)
    server.holds_after = 0
    engine.snapshot([pending])  # as a checkpoint: it breaks off all requests
    programs.gate.set()
    trajectories = pending.result()
    by_prompt = {tuple(turns[0][0]): turns for turns in programs.seen}
    for t in trajectories:
        (_, first, logprobs), (sent, second, _) = by_prompt.pop(tuple(t.prompt_ids.tolist()))
        assert t.response_ids.tolist() == [*first, *sent[len(t.prompt_ids) + len(first) :], *second]
        assert t.versions[: len(first)].tolist() == [1, 1, *[2] * (len(first) - 2)] and len(first) > 2
        assert t.logprobs[: len(first)].tolist() == logprobs
        tokens = np.concatenate([t.prompt_ids, t.response_ids])
        for version, span in ((1, slice(0, 2)), (2, slice(2, len(first)))):
            scores = np.asarray(score_of(model)(weights(version), tokens))[len(t.prompt_ids) - 1 :]
            np.testing.assert_allclose(logprobs[span], scores[: len(first)][span], atol=3e-5)
    engine.pool.close()
