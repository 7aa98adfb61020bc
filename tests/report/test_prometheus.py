"""Metrics for Prometheus: the text of the format 0.0.4, over HTTP; mistakes before the run."""

import contextlib
import http.client
import importlib.util
import math
import socket

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.ranges import problems
from jaxrl_llm.report.config import LogConfig, split_address
from jaxrl_llm.report.log import RunLog
from jaxrl_llm.report.prometheus import Prometheus, exposition

NAME = 'a"b\\c\nd'
TEXT = r"""# TYPE jaxrl_steps_total counter
jaxrl_steps_total{run="a\"b\\c\nd"} 7
# TYPE jaxrl_last_step_timestamp_seconds gauge
jaxrl_last_step_timestamp_seconds{run="a\"b\\c\nd"} 1700000000.250
# TYPE jaxrl_eval_pass_at_1 gauge
jaxrl_eval_pass_at_1{run="a\"b\\c\nd",metric="eval/pass@1"} 0.5
jaxrl_eval_pass_at_1{run="a\"b\\c\nd",metric="eval_pass_at_1"} -Inf
# TYPE jaxrl_kl gauge
jaxrl_kl{run="a\"b\\c\nd",metric="kl"} NaN
# TYPE jaxrl_loss gauge
jaxrl_loss{run="a\"b\\c\nd",metric="loss"} 1e-05
"""
VALUES = {"eval/pass@1": 0.5, "eval_pass_at_1": -math.inf, "kl": math.nan, "loss": 1e-5}


def get(exporter: Prometheus, path: str = "/metrics") -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", exporter.port, timeout=30)
    connection.request("GET", path)
    reply = connection.getresponse()
    found = reply.status, reply.headers["Content-Type"], reply.read().decode()
    connection.close()
    return found


def test_the_text_is_that_of_the_format():
    """Backslash, quote and line feed are escaped in labels; two metrics with one name differ by a label."""
    text = exposition(NAME, 7, 1700000000.25, VALUES)
    assert text == TEXT
    if not importlib.util.find_spec("prometheus_client"):
        return
    from prometheus_client.parser import text_string_to_metric_families

    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["jaxrl_steps"].type == "counter"
    samples = [(s.labels["metric"], s.value) for name in ("eval_pass_at_1", "loss")
               for s in families[f"jaxrl_{name}"].samples]  # fmt: skip
    assert samples == [("eval/pass@1", 0.5), ("eval_pass_at_1", -math.inf), ("loss", 1e-5)]
    assert families["jaxrl_loss"].samples[0].labels["run"] == NAME


def test_a_run_serves_its_newest_metrics_until_it_ends(tmp_path):
    config = LogConfig(progress="none", tensorboard=False, prometheus="127.0.0.1:0")
    exporter = Prometheus(config, "run")
    log = RunLog(tmp_path, config, 3)
    log.attach("prometheus", exporter)
    assert get(exporter)[2] == ""
    log.step(1, {"loss": 0.5, "eval/pass@1": 0.25, "kl": math.nan, "note": "text"}, tokens=10)
    log.step(2, {"loss": 0.25}, tokens=10)
    status, kind, text = get(exporter, "/metrics?x=1")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    lines = text.splitlines()
    assert 'jaxrl_steps_total{run="run"} 2' in lines and 'jaxrl_loss{run="run",metric="loss"} 0.25' in lines
    assert 'jaxrl_eval_pass_at_1{run="run",metric="eval/pass@1"} 0.25' in lines  # of an earlier step
    assert 'jaxrl_kl{run="run",metric="kl"} NaN' in lines and "note" not in text
    assert get(exporter, "/")[0] == 404
    log.close()
    with pytest.raises(ConnectionRefusedError):
        get(exporter)
    exporter.close()


def test_an_address_that_cannot_be_used_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            UserError, match=rf"--log.prometheus {address}: cannot listen there .* port, or 0"
        ):
            Prometheus(LogConfig(prometheus=address), "run")
    for wrong in ("9464", "http://127.0.0.1:9464", "localhost:x", "localhost:65536"):
        ((field, problem),) = problems(LogConfig(prometheus=wrong))
        assert field == "prometheus" and "it must be HOST:PORT" in problem
    assert split_address("[::1]:9464") == ("::1", 9464)
    with contextlib.closing(Prometheus(LogConfig(prometheus="0.0.0.0:0"), "run")) as exporter:
        assert f":{exporter.port}/metrics\nWARNING: whoever reaches this port" in exporter.line
