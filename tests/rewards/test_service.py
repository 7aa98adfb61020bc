"""A reward behind HTTP, with a real server."""

import http.server
import json
import threading
from dataclasses import replace

import pytest

from jaxrl_llm.rewards.config import RewardConfig
from jaxrl_llm.rewards.load import ServiceError, request_scores
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rewards.sample import RewardLoadError, RewardSample
from jaxrl_llm.tools import score

SAMPLES = [RewardSample("4", answer="4", prompt="2+2="), RewardSample("5", answer="4", prompt="2+2=")]


@pytest.fixture
def serve():
    """Start a server that answers each body by a function; return its URL and the bodies that it got."""
    servers = []

    def start(answer, code=200):
        asked = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked.append((body, self.headers.get("Authorization"), self.path))
                said = json.dumps(answer(body)).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *args):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()  # s until it stops
        return f"http://127.0.0.1:{server.server_port}/score", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_scores_come_back_in_order_with_their_outcomes(serve):
    right = lambda body: {"scores": [float(s["response"] == s["answer"]) for s in body["samples"]]}
    url, asked = serve(right)
    with RewardPool(RewardConfig(name=url, workers=1)) as pool:
        results = pool.score(SAMPLES)
    assert [r.score for r in results] == [1.0, 0.0]
    assert [r.outcome.name for r in results] == ["CORRECT", "WRONG"]
    body, token, _ = asked[0]
    assert body["samples"][0] == {
        "prompt": "2+2=", "messages": [], "response": "4", "answer": "4", "source": "", "thought": "",
        "text": "4",
    }  # fmt: skip
    assert body["query"] == ["2+2=4", "2+2=5"] and body["labels"] == ["4", "4"] and token is None


def test_the_answer_of_openrlhf_is_understood_and_the_token_is_sent(serve, monkeypatch):
    monkeypatch.setenv("JAXRL_REWARD_TOKEN", "s3cret")
    url, asked = serve(lambda body: {"rewards": [0.25] * len(body["query"])})
    assert request_scores(url, SAMPLES, 5.0) == [0.25, 0.25]
    assert asked[0][1] == "Bearer s3cret"


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        (lambda body: {"scores": [1.0]}, 200, "expected .* with 2 of them"),
        (lambda body: "no", 200, "expected"),
        (lambda body: {}, 503, "answered 503"),
    ],
)
def test_a_bad_answer_says_what_was_expected(serve, answer, code, message):
    url, _ = serve(answer, code)
    with pytest.raises(ServiceError, match=message):
        request_scores(url, SAMPLES, 5.0)


def test_a_service_that_is_not_there_fails_its_samples_and_no_more():
    config = RewardConfig(name="http://127.0.0.1:9/x", workers=1, retries=0, max_failed_fraction=1.0)
    with RewardPool(config) as pool:
        results = pool.score(SAMPLES)
    assert all("127.0.0.1:9" in r.reason and not r.valid for r in results)


def test_requests_of_single_samples_are_in_flight_at_once(serve):
    """Each waits until all four are there; one that the service refuses costs its own sample only."""
    together = threading.Barrier(4, timeout=20)

    def judge(body):
        together.wait()
        (sample,) = body["samples"]
        return {"scores": [float(sample["response"])] if sample["response"] != "2" else []}

    url, bodies = serve(judge)
    config = RewardConfig(
        name=url, workers=1, service_samples=1, concurrency=4, retries=0, max_failed_fraction=1.0
    )
    with RewardPool(config) as pool:
        results = pool.score([RewardSample(str(i)) for i in range(4)])
    assert [r.score for r in results if r.valid] == [0.0, 1.0, 3.0] and len(bodies) == 4
    assert "expected" in results[2].reason


def test_a_request_has_no_more_samples_than_allowed(serve):
    url, bodies = serve(lambda body: {"scores": [1.0] * len(body["samples"])})
    with RewardPool(RewardConfig(name=url, workers=1, service_samples=2)) as pool:
        assert [r.score for r in pool.score(SAMPLES[:1] * 5)] == [1.0] * 5
    assert [len(body["samples"]) for body, *_ in bodies] == [2, 2, 1]


def test_a_key_of_an_address_is_masked_in_failures(serve, caplog):
    url, _ = serve(lambda body: {}, 503)
    config = RewardConfig(name=f"{url}?api_key=hunter2", workers=1, retries=0, max_failed_fraction=1.0)
    with RewardPool(config) as pool:
        with pytest.raises(RewardLoadError, match="fails on every row") as failed:
            pool.check(SAMPLES)
        reasons = [result.reason for result in pool.score(SAMPLES)]
    assert "hunter2" not in f"{failed.value}{caplog.text}" and "api_key=${NAME}" in caplog.text
    assert reasons == [f"ServiceError: {url}?api_key=*** answered 503 Service Unavailable"] * 2


def test_score_writes_the_address_without_its_key(serve, tmp_path):
    url, _ = serve(lambda body: {"scores": [1.0] * len(body["samples"])})
    (tmp_path / "t.jsonl").write_text('{"prompt": "2+2=", "answer": "4", "response": "4"}\n')
    flags = ["--reward.name", f"{url}?api_key=hunter2", "--reward.shaping", f"{url}?token=hunter3", "0.5"]
    assert score.main([*flags, "--data", str(tmp_path / "t.jsonl"), "--out", str(tmp_path / "o.jsonl")]) == 0
    row = json.loads((tmp_path / "o.jsonl").read_text())
    assert row["rewards"] == {f"{url}?api_key=***": 1.0, f"{url}?token=***": 1.0} and row["reward"] == 1.5
    assert not any(b"hunter" in file.read_bytes() for file in tmp_path.iterdir())


def test_a_key_may_be_named_by_its_variable(serve, monkeypatch):
    url, asked = serve(lambda body: {"scores": [1.0] * 2})
    config = RewardConfig(name=f"{url}?api_key=${{JUDGE_KEY}}", workers=1)
    monkeypatch.setenv("JUDGE_KEY", "hunter 2&")
    with RewardPool(config) as pool, pytest.raises(RewardLoadError, match=r"pass it on: --reward.keep_env J"):
        pool.check(SAMPLES)
    with RewardPool(replace(config, keep_env=("JUDGE_KEY",))) as pool:
        assert [result.score for result in pool.score(SAMPLES)] == [1.0, 1.0]
    assert asked[0][2] == "/score?api_key=hunter%202%26"
    monkeypatch.delenv("JUDGE_KEY")
    with RewardPool(config) as pool, pytest.raises(RewardLoadError, match="JUDGE_KEY is not set in"):
        pool.check(SAMPLES)


@pytest.mark.parametrize(
    "url", ["http://u:hunter2@h/x", "https://hunter2@h", "http://u:hunter2/x", "http://h/ hunter2"]
)
def test_an_address_that_cannot_work_is_refused_without_its_key(url):
    with pytest.raises(RewardLoadError, match="address") as refused:
        RewardPool(RewardConfig(name=url))
    assert "hunter2" not in str(refused.value)


def test_what_is_no_url_is_still_refused():
    with pytest.raises(RewardLoadError, match="unknown"):
        RewardPool(RewardConfig(name="ftp//x"))
