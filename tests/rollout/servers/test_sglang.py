"""The SGLang engine against a fake server with its JSON, and (where there is one) against a real one."""

import dataclasses
import errno

import jax
import numpy as np
import pytest
from fake_sglang import FakeServer
from servers_shared import GREEDY, KEY, MODEL, TOKENIZER, engine_for, native, requests, weights

from jaxrl_llm.bridge.transports import disk
from jaxrl_llm.bridge.transports.disk import DiskTransport
from jaxrl_llm.errors import ServerError, UserError
from jaxrl_llm.models.config import MoEConfig
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.servers.launch import routes_problem

EXPERTS = dataclasses.replace(
    MODEL, family="qwen3_moe", tie_embeddings=False, moe=MoEConfig(8, 3, expert_size=16)
)


@pytest.fixture(scope="module")
def servers():
    return [FakeServer(), FakeServer()]


@pytest.fixture
def make(servers, tmp_path):
    """make(**settings of ServersConfig) -> an engine on both servers, which behave again."""
    pools = []

    def engine(urls=None, model=MODEL, **settings):
        transport = DiskTransport(tmp_path / "weights", "float32", TOKENIZER)
        settings = {"patience": 0.0, **settings}
        made = engine_for(urls or [s.url for s in servers], transport, model, **settings)
        pools.append(made.pool)
        return made

    for server in servers:
        server.behave()
    yield engine
    for pool in pools:
        pool.close()


def test_it_writes_what_the_native_engine_writes(make):
    engine, params = make(), weights()
    metrics = engine.publish(params, version=5)
    assert metrics["bridge/probe_mean_abs"] < 1e-5
    assert metrics["rollout/publish_bytes"] == 4 * sum(w.size for w in jax.tree.leaves(params))
    mine, theirs = engine.generate(requests(), GREEDY, KEY), native(params, GREEDY)
    assert len(mine) == len(theirs) == 6
    for a, b in zip(mine, theirs, strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        assert (a.prompt_index, a.response_index, a.finish, a.text) == (
            b.prompt_index, b.response_index, b.finish, b.text
        )  # fmt: skip
        assert set(a.versions) == {5} and a.mask.all()


def test_each_sample_has_a_seed_of_its_own_that_nothing_else_changes(make, servers):
    engine = make()
    engine.publish(weights(), 1)
    engine.generate(requests(), SamplingConfig(), KEY)
    seeds = lambda: sorted(b["sampling_params"]["sampling_seed"] for s in servers for b in s.seen[1:])
    everything = seeds()
    assert len(set(everything)) == 6
    for server in servers:
        del server.seen[1:]
    engine.generate(requests()[1:2], SamplingConfig(), KEY)
    assert set(seeds()) < set(everything)


def test_a_group_stays_on_one_server_and_both_work(make, servers):
    engine = make()
    engine.publish(weights(), 1)
    engine.generate(requests(prompts=2, responses=3), SamplingConfig(), KEY)
    prompts = [{tuple(body["input_ids"]) for body in server.seen[1:]} for server in servers]
    assert all(len(each) == 1 for each in prompts) and prompts[0] != prompts[1]


def test_the_same_weights_are_not_sent_twice_and_other_ones_are(make, servers):
    engine, params = make(), weights()
    assert engine.publish(params, 1) and not engine.publish(params, 1)
    first = servers[0].label
    assert engine.publish(weights(1), 1)  # not by the version, which weight noise keeps
    assert servers[0].label != first


def test_a_server_with_other_weights_is_left_out_and_comes_back(make, servers):
    engine = make()
    engine.publish(weights(0), 1)
    servers[1].deaf = True
    engine.publish(weights(1), 2)
    assert [s.usable for s in engine.pool.servers] == [True, False]
    assert "log-probs differ from the trainer's by" in engine.pool.servers[1].problem
    engine.generate(requests(), GREEDY, KEY)
    assert len(servers[1].seen) == 2  # the probes alone
    servers[1].deaf = False
    engine.publish(weights(2), 3)
    assert all(s.usable for s in engine.pool.servers)


def test_no_server_that_took_the_weights_is_an_error_that_says_why(make, servers):
    engine = make()
    for server in servers:
        server.refuses = True
    with pytest.raises(ServerError, match=r"no SGLang server can be used: http.*did not take.*no room"):
        engine.publish(weights(), 1)


def test_a_server_that_fails_is_left_out_and_its_responses_are_written_elsewhere(make, servers):
    engine, params = make(), weights()
    engine.publish(params, 1)
    servers[0].down = True
    mine, theirs = engine.generate(requests(), GREEDY, KEY), native(params, GREEDY)
    assert [t.response_ids.tolist() for t in mine] == [t.response_ids.tolist() for t in theirs]
    assert not engine.pool.servers[0].usable and engine.pool.retried >= 1
    servers[1].down = True
    with pytest.raises(ServerError, match="answered 500"):
        engine.generate(requests(), GREEDY, KEY)


def test_a_response_that_is_broken_off_goes_on_where_it_stopped(make, servers):
    engine, params = make(urls=[servers[0].url]), weights()
    engine.publish(params, 1)
    todo = requests(prompts=1, responses=1)
    servers[0].breaks_after = 2
    (mine,), (theirs,) = engine.generate(todo, GREEDY, KEY), native(params, GREEDY, todo)
    assert len(theirs.response_ids) > 2
    assert mine.response_ids.tolist() == theirs.response_ids.tolist()
    np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-5)
    assert mine.finish == theirs.finish and len(mine.versions) == len(mine.response_ids)


LONG = requests(prompts=5, responses=1)[4]._replace(prompt_index=0)
STOP = '_o"'  # the greedy response to LONG is FdW_o"QQQQfQ, a token for each character


@pytest.mark.parametrize("breaks_after", [4, 5])
def test_a_stop_string_across_two_requests_ends_a_response(make, servers, breaks_after):
    engine, params = make(urls=[servers[0].url]), weights()
    engine.publish(params, 1)
    sampling = dataclasses.replace(GREEDY, stop=(STOP,))
    servers[0].breaks_after = breaks_after
    (mine,), (theirs,) = engine.generate([LONG], sampling, KEY), native(params, sampling, [LONG])
    assert [len(body["input_ids"]) for body in servers[0].seen[1:]] == [8, 8 + breaks_after]
    assert mine.text == theirs.text == 'FdW_o"' and mine.finish == theirs.finish == "stop"
    assert mine.response_ids.tolist() == theirs.response_ids.tolist() and len(mine.versions) == 6
    np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-5)


@pytest.mark.parametrize("max_tokens", [LONG.max_tokens, 7, 6])
def test_a_stop_string_that_a_server_misses_ends_a_response(make, servers, max_tokens):
    """SGLang decodes as many of the last tokens as its tokenizer makes of the string."""
    engine, params = make(urls=[servers[0].url]), weights()
    engine.publish(params, 1)
    sampling, request = dataclasses.replace(GREEDY, stop=(STOP,)), LONG._replace(max_tokens=max_tokens)
    servers[0].misses_stops = True
    (mine,), (theirs,) = engine.generate([request], sampling, KEY), native(params, sampling, [request])
    assert mine.text == theirs.text == 'FdW_o"' and mine.finish == theirs.finish == "stop"
    assert mine.response_ids.tolist() == theirs.response_ids.tolist() and len(mine.versions) == 6
    np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-5)


@pytest.mark.parametrize("stop", [{"stop": (STOP,)}, {"stop_tokens": (12,)}])
def test_a_response_that_stops_with_its_last_token_has_not_been_cut_off(make, servers, stop):
    engine, params = make(urls=[servers[0].url]), weights()
    engine.publish(params, 1)
    sampling, six = dataclasses.replace(GREEDY, **stop), LONG._replace(max_tokens=6)
    (mine,), (theirs,) = engine.generate([six], sampling, KEY), native(params, sampling, [six])
    assert mine.text == theirs.text == 'FdW_o"' and mine.finish == theirs.finish == "stop"


def test_with_ignore_eos_no_stop_string_ends_a_response(make, servers):
    engine, params = make(urls=[servers[0].url]), weights()
    engine.publish(params, 1)
    sampling = dataclasses.replace(GREEDY, stop=(STOP,), ignore_eos=True)
    (mine,), (theirs,) = engine.generate([LONG], sampling, KEY), native(params, sampling, [LONG])
    assert mine.text == theirs.text == 'FdW_o"QQQQfQ'


@pytest.mark.slow
def test_log_probs_are_compared_under_the_routes_that_servers_reported(make, servers):
    """A router that would choose otherwise, as rounding makes one do, is not the server's fault."""
    engine, params = make(urls=[servers[0].url], model=EXPERTS), weights(model=EXPERTS)
    engine.publish(params, 1)
    made = engine.generate(requests(prompts=2, responses=1, tokens=24), SamplingConfig(), KEY)
    ids = [np.concatenate([t.prompt_ids, t.response_ids]) for t in made]
    score = engine.publisher.score
    for t, tokens in zip(made, ids, strict=True):
        said = score(params, tokens, 1.0, t.routes)[len(t.prompt_ids) - 1 :]
        np.testing.assert_allclose(said, t.logprobs, atol=1e-5)
    assert not engine.check_logprobs(params, made)
    others = dataclasses.replace(made[0], routes=(made[0].routes + 1) % 8)
    others.routes.sort(axis=-1)
    assert np.abs(score(params, ids[0], 1.0, others.routes) - score(params, ids[0], 1.0)).max() > 1e-3
    assert engine.check_logprobs(params, [others, made[1]])


@pytest.mark.slow
def test_routes_are_those_of_the_native_engine(make, servers):
    """Of prompt and response, also of one that is broken off; the last token has none."""
    engine, params = make(urls=[servers[0].url], model=EXPERTS), weights(model=EXPERTS)
    engine.publish(params, 1)
    todo = requests(prompts=2, responses=1)
    servers[0].breaks_after = 2
    mine, theirs = engine.generate(todo, GREEDY, KEY), native(params, GREEDY, todo, EXPERTS)
    for a, b in zip(mine, theirs, strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist() and len(a.response_ids) > 2
        assert len(a.routes) == len(a.prompt_ids) + len(a.response_ids) and a.routes.dtype == np.uint8
        np.testing.assert_array_equal(a.routes, b.routes)
    assert (mine[0].routes[-1] == 255).all() and (mine[0].routes[:-1] < 8).all()
    asked = [body for body in servers[0].seen if body.get("return_routed_experts")]
    known = sorted((body["routed_experts_start_len"], len(body["input_ids"])) for body in asked)
    assert len(known) == 3 and known[1][0] == 0 and known[2][0] == known[2][1] - 1


def test_servers_that_do_not_report_routes_are_refused(make, servers, monkeypatch):
    monkeypatch.setattr(servers[0], "reports_routes", False)
    with pytest.raises(UserError, match=rf"{servers[0].url} does not report .* --enable-return-routed-exp"):
        make().pool.check_reachable(routes_problem)


def test_tokens_of_weights_that_were_not_sent_are_refused(make, servers):
    engine = make(urls=[servers[0].url])
    engine.publish(weights(), 1)
    servers[0].label = "somebody else's"
    with pytest.raises(ServerError, match="which this run did not send"):
        engine.generate(requests(prompts=1), GREEDY, KEY)


def test_a_server_that_does_not_answer_is_left_out_in_time(make):
    engine = make(urls=["http://127.0.0.1:9"], timeout=5.0)
    with pytest.raises(ServerError, match=r"127.0.0.1:9/server_info: ClientConnectorError"):
        engine.publish(weights(), 1)


def test_the_last_two_pushes_are_kept(make, tmp_path):
    engine = make()
    for version in range(3):
        engine.publish(weights(version), version)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["1-2", "2-3"]


def test_weights_that_do_not_fit_on_the_disk_are_an_outage_and_the_servers_go_on(make, servers, monkeypatch):
    engine = make()
    engine.publish(weights(), 0)

    def fails(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "save_model", fails)
    problem = r"the weights for the servers are not written: .*No space left on device\. .*--servers\.folder"
    with pytest.raises(ServerError, match=problem):
        engine.publish(weights(1), 1)
    monkeypatch.undo()
    assert engine.publish(weights(1), 1)["servers/usable"] == 2
    assert not any(server.paused for server in servers)


@pytest.mark.slow
def test_a_value_head_is_not_sent(make):
    model = dataclasses.replace(MODEL, value_head=True)
    engine = make(model=model)
    assert engine.publish(weights(model=model), 1)["bridge/probe_mean_abs"] < 1e-5
