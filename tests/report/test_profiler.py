"""--profile: ranges, and a trace that names steps and phases."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.config import TrainConfig, WarmStartConfig
from jaxrl_llm.ranges import problems
from jaxrl_llm.report.config import LogConfig, profiled_steps
from jaxrl_llm.report.log import RunLog

QUIET = LogConfig(progress="none", tensorboard=False)


def test_both_ends_are_profiled():
    assert profiled_steps("3:5") == range(3, 6)
    assert profiled_steps("7") == range(7, 8)
    assert not profiled_steps("") and not TrainConfig().profiled


@pytest.mark.parametrize(
    "text", ["5:3", "0:2", "0", "a:b", "3:", ":5", "1:2:3", "-1:2", "1.5", "3-5", " 3:5"]
)
def test_what_is_not_a_range_is_refused(text):
    ((field, problem),) = problems(TrainConfig(profile=text))
    assert field == "profile"
    assert problem.startswith(f"is {text!r}: it must be FIRST:LAST, steps from 1 on")


def test_steps_that_the_run_does_not_have_are_refused():
    config = TrainConfig(steps=10, warm_start=WarmStartConfig(steps=5), profile="14:15")
    assert list(problems(config)) == []
    ((field, problem),) = problems(TrainConfig(steps=10, profile="9:11"))
    assert (field, problem) == ("profile", "is '9:11': the run has 10 steps, from 1 to 10.")
    ((_, problem),) = problems(TrainConfig(steps=1000, profile="1:101"))
    assert "at most 100 steps" in problem


def test_the_trace_has_steps_and_phases_by_name(tmp_path, capsys):
    log = RunLog(tmp_path, QUIET, 5, profile=range(2, 4))
    double = jax.jit(lambda x: x * 2)
    for step in log.steps(0, 5):
        with log.phase("rollout"), log.phase("publish"):
            double(jnp.ones(4)).block_until_ready()
        with log.phase("update"):
            pass
        log.step(step + 1, {}, tokens=1)
    log.close()
    (file,) = (tmp_path / "profile").rglob("perfetto_trace.json.gz")
    assert len(list(file.parent.glob("*.xplane.pb"))) == 1
    with gzip.open(file) as text:
        events = json.load(text)["traceEvents"]
    steps = [event["args"]["step_num"] for event in events if event.get("name") == "step"]
    assert steps == ["2", "3"]
    for phase in ("rollout", "publish", "update"):
        assert sum(event.get("name") == phase for event in events) == 2, phase
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert ["time/profile" in json.loads(line) for line in lines] == [False, False, False, True, False]
    out = capsys.readouterr().out
    assert out.count("profile of steps 2 to 3: ") == 1 and "warning" not in out


def test_a_run_that_ends_early_has_its_trace(tmp_path):
    log = RunLog(tmp_path, QUIET, 5, profile=range(1, 5))
    for _ in log.steps(0, 5):
        break
    log.close()
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_a_profiler_that_fails_is_a_warning(tmp_path, capsys):
    jax.profiler.start_trace(tmp_path / "another")
    try:
        log = RunLog(tmp_path, QUIET, 3, profile=range(1, 3))
        assert list(log.steps(0, 3)) == [0, 1, 2]
        log.close()
    finally:
        jax.profiler.stop_trace()
    out = capsys.readouterr().out
    assert out.count("warning: steps cannot be profiled (RuntimeError: Profile has already been started") == 1
    assert "profile of steps" not in out


def test_steps_before_a_resume_are_not_profiled_and_it_says_so(tmp_path, capsys):
    log = RunLog(tmp_path, QUIET, 9, resume_step=5, profile=range(3, 6))
    assert list(log.steps(5, 7)) == [5, 6]
    assert capsys.readouterr().out == "no profile: its steps are done\n"


def test_each_process_has_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert RunLog(tmp_path, QUIET, 1).profiler.folder == tmp_path / "profile/process_1"
