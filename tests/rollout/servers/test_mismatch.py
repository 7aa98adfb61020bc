"""Log-probs that are possible and false: whose they are, what becomes of the server and of its responses."""

import dataclasses

import numpy as np
import pytest
from fake_sglang import FakeServer
from servers_shared import KEY, MODEL, ROLLOUT, TOKENIZER, engine_for, ids, requests, score_of, until, weights
from test_servers import pairs

from jaxrl_llm.bridge.transports.disk import DiskTransport
from jaxrl_llm.errors import ServerError
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.engine import GenerationCall
from jaxrl_llm.rollout.servers import health
from jaxrl_llm.rollout.servers.engine import MismatchTotals, choose_compared, logprob_differences
from jaxrl_llm.rollout.servers.health import run_health_checks
from jaxrl_llm.structs import Trajectory

SAMPLED = SamplingConfig(ignore_eos=True)
COLDER = pairs(lambda said: [[0.7 * logprob, *rest] for logprob, *rest in said])
SHIFTED = pairs(lambda said: [[logprob - 0.5, *rest] for logprob, *rest in said])


@pytest.fixture(scope="module")
def servers():
    return [FakeServer(), FakeServer()]


@pytest.fixture
def make(servers, tmp_path, monkeypatch):
    """make(...) -> an engine on both servers, with health checks."""
    monkeypatch.setattr(health, "CHECK_INTERVAL", 0.05)
    monkeypatch.setattr("jaxrl_llm.rollout.servers.server.FIRST_RETRY", 0.1)
    pools = []

    def engine(members=None, **settings):
        transport = DiskTransport(tmp_path / "weights", "float32", TOKENIZER)
        made = engine_for([s.url for s in servers], transport, patience=20.0, **settings)
        pools.append(made.pool)
        made.pool.start(run_health_checks(made.pool, members))
        return made

    for server in servers:
        server.behave()
    yield engine
    for pool in pools:
        pool.close()
    for server in servers:
        server.behave()


def own_logprobs(params, trajectories):
    """Return the trainer's own log-probs."""
    score = score_of(MODEL)
    both = [np.concatenate([t.prompt_ids, t.response_ids]) for t in trajectories]
    return [score(params, x, 1.0)[len(t.prompt_ids) - 1 :] for x, t in zip(both, trajectories, strict=True)]


def trajectory(server="a", logprobs=(-1.0, -2.0, -3.0), versions=(4, 5, 5), mask=(1, 1, 0)):
    return Trajectory(
        prompt_ids=np.array([1]), response_ids=np.arange(len(logprobs)), logprobs=np.array(logprobs),
        mask=np.array(mask), versions=np.array(versions), prompt_index=0, response_index=0, finish="stop",
        server=server,
    )  # fmt: skip


def test_tokens_of_the_same_weights_that_the_policy_chose_are_compared():
    own = np.array([-1.5, -2.25, -9.0])
    assert logprob_differences(trajectory(), own, 5, in_place=False).tolist() == [0.25]
    assert logprob_differences(trajectory(), own, 4, in_place=False).tolist() == [0.5]
    assert logprob_differences(trajectory(), own, 5, in_place=True).tolist() == []  # rests on older keys, too
    assert logprob_differences(trajectory(versions=(5, 5, 5)), own, 5, in_place=True).tolist() == [0.5, 0.25]
    assert logprob_differences(trajectory(), np.full(3, np.nan), 5, in_place=False).tolist() == []


def test_a_server_is_judged_by_the_mean_of_enough_tokens():
    totals, some = MismatchTotals(), [trajectory("a"), trajectory("b"), trajectory("a b"), trajectory("c")]
    found = [np.full(20, 0.3), np.full(30, 0.1), np.full(30, 0.3), np.full(20, 0.3)]
    assert totals.find_mismatches(some, found, 0.2, {"a", "b"}) == (
        {},
        [2],
    )  # "a" has 20 tokens, and "c" is no server
    assert totals.worst == pytest.approx(0.1)
    false, alone = totals.find_mismatches([trajectory("a")], [np.full(10, 0.0)], 0.15, {"a", "b"})
    assert false == {"a": pytest.approx(20 * 0.3 / 30)} and alone == []
    assert totals.find_mismatches([trajectory("a")], [np.full(24, 0.1)], 0.15, {"a"}) == (
        {},
        [],
    )  # counted anew
    assert totals.worst == pytest.approx(0.2)


def test_honest_servers_stay_and_each_response_names_its_own(make, servers):
    engine, params = make(), weights()
    engine.publish(params, 3)
    made = engine.generate(requests(prompts=2, responses=3, tokens=24), SAMPLED, KEY)
    assert {t.server for t in made} == {server.url for server in servers}
    assert engine.check_logprobs(params, made) == []
    assert len(engine.pool.usable) == 2
    assert 0 < engine.usage()["servers/mismatch_mean_abs"] < 1e-5
    other = weights(1)
    engine.publish(other, 4)
    assert engine.check_logprobs(other, made) == []  # no token is of version 4


@pytest.mark.parametrize("lie", [COLDER, SHIFTED], ids=["another temperature", "a constant"])
def test_a_server_that_lies_after_the_probe_is_left_out_for_good(make, servers, lie, capsys):
    engine, params = make(), weights()
    engine.publish(params, 3)
    servers[0].spoil = lie
    todo = requests(prompts=2, responses=3, tokens=24)
    made = engine.generate(todo, SAMPLED, KEY)
    theirs = [i for i, t in enumerate(made) if t.server == servers[0].url]
    assert len(theirs) == 3
    assert engine.check_logprobs(params, made) == theirs
    said = capsys.readouterr().err
    assert f"a server is left out: {servers[0].url}: log-probs of its responses differ" in said
    assert "more than 0.001 (--servers.probe_tolerance)" in said
    again = engine.generate(todo, SAMPLED, KEY)
    assert {t.server for t in again} == {servers[1].url} and ids(again) == ids(made)
    engine.publish(weights(1), 4)  # whose probe it would pass
    assert [server.url for server in engine.pool.usable] == [servers[1].url]
    assert engine.pool.metrics()["servers/failures"] == 1


def test_a_lie_in_asynchronous_rollout_is_found_in_what_is_pending_and_generated_again(make, servers):
    engine, params = make(), weights()
    engine.publish(params, 3)
    todo = requests(prompts=2, responses=3, tokens=32)
    honest = engine.generate(todo, SAMPLED, KEY)
    servers[0].spoil = COLDER
    for server in servers:
        server.holds_after = 26
    pending = engine.start(GenerationCall(todo, SAMPLED, KEY))
    until(lambda: all(server.held == 3 for server in servers))
    engine.snapshot([pending])
    until(lambda: all(server.held == 0 for server in servers))
    partial = pending.responses
    until(lambda: all(len(response.ids) >= 26 for response in partial))
    assert engine.check_logprobs(params, []) == []
    assert [server.url for server in engine.pool.servers] == [servers[1].url]
    ((*saved,),) = engine.snapshot([pending])
    rejected = [not response.ids for response in saved]
    assert rejected.count(True) == 3
    for server in servers:
        server.holds_after = 0
    engine.snapshot([pending])
    made = pending.result()
    assert {t.server for t in made} == {servers[1].url}
    for now, then, again in zip(ids(made), ids(honest), rejected, strict=True):
        assert now == then if again else now[:26] == then[:26]  # the rest was drawn in a second request
    for own, t in zip(own_logprobs(params, made), made, strict=True):
        np.testing.assert_allclose(t.logprobs, own, atol=1e-4)


def test_when_all_servers_lie_the_run_ends_at_once_and_says_why(make, servers):
    engine, params = make(), weights()
    engine.publish(params, 3)
    for server in servers:
        server.spoil = SHIFTED
    made = engine.generate(requests(prompts=2, responses=3, tokens=24), SAMPLED, KEY)
    assert engine.check_logprobs(params, made) == list(range(6))
    with pytest.raises(
        ServerError, match=r"no SGLang server can be used: http.*by 0.5 on average, more than"
    ):
        engine.generate(requests(prompts=1), SAMPLED, KEY)


def test_a_server_that_was_excluded_may_come_back_by_the_file_of_addresses(make, servers):
    urls = [server.url for server in servers]
    present = list(urls)
    engine, params = make(members=lambda: present), weights()
    engine.publish(params, 3)
    servers[0].spoil = SHIFTED
    made = engine.generate(requests(prompts=2, responses=3, tokens=24), SAMPLED, KEY)
    engine.check_logprobs(params, made)
    assert list(engine.pool.excluded) == [urls[0]]
    present.remove(urls[0])
    until(lambda: not engine.pool.excluded)
    present.append(urls[0])
    until(lambda: len(engine.pool.usable) == 2)


def test_noise_and_greedy_rollouts_are_not_compared(make):
    params = weights()
    false = [trajectory("http://x", [-9.0] * 30, [3] * 30, [1] * 30)]
    for change in ({"weight_noise": 0.1}, {"sampling": SamplingConfig(temperature=0.0)}):
        engine = make(rollout=dataclasses.replace(ROLLOUT, **change))
        engine.publish(params, 3)
        assert engine.check_logprobs(params, false) == []


@pytest.mark.parametrize(("gap", "bad"), [(0.0015, []), (0.0025, [0])])  # the tolerance is 1e-3 / 0.5
def test_the_tolerance_grows_as_the_temperature_falls(make, gap, bad):
    """A response from behind a router is no known server's: it is judged, and left out, by itself."""
    engine, params = (
        make(rollout=dataclasses.replace(ROLLOUT, sampling=SamplingConfig(temperature=0.5))),
        weights(),
    )
    engine.publish(params, 3)
    one = trajectory("http://router", [-1.0] * 30, [3] * 30, [1] * 30)
    ids = np.concatenate([one.prompt_ids, one.response_ids])
    one.logprobs = score_of(MODEL)(params, ids, 0.5)[len(one.prompt_ids) - 1 :] - gap
    assert engine.check_logprobs(params, [one]) == bad


def test_two_responses_and_enough_tokens_of_each_server_are_compared():
    long, short = [3] * 30, [3] * 10
    of = lambda server, versions: trajectory(server, [-1.0] * len(versions), versions, [1] * len(versions))
    some = [of("a", short), of("a", long), of("a", long), of("b", short), of("b", short), of("b", short)]
    older = of("a", [2] * 40)
    assert [id(t) for t in choose_compared([older, *some], 3)] == [id(some[i]) for i in (1, 2, 3, 4, 5)]
