"""time/PHASE, perf/... and goodput/PHASE: by hand, over compilation, kills and resumes."""

import json
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.report import goodput
from jaxrl_llm.report.config import LogConfig
from jaxrl_llm.report.log import RunLog, performance

QUIET = LogConfig(progress="none", tensorboard=False)


@pytest.fixture
def clock(monkeypatch):
    """A time.perf_counter that only the test moves."""
    fake = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: fake.now)
    return fake


def take_step(log, clock, step, seconds, *, save=0.0):
    with log.phase("update"):
        clock.now += seconds
    row = log.step(step, {}, tokens=1)
    if save:
        with log.phase("checkpoint"):
            clock.now += save
    return row


def goodputs(row):
    return {key.removeprefix("goodput/"): x for key, x in row.items() if key.startswith("goodput/")}


def test_an_inner_phase_takes_its_time_from_the_outer_one(tmp_path, clock):
    log = RunLog(tmp_path, QUIET, 1)
    with log.phase("rollout"):
        clock.now += 3.0
        with log.phase("publish"):
            clock.now += 0.5
        clock.now += 1.0
    clock.now += 0.25
    row = log.step(1, {}, tokens=0)
    assert (row["time/rollout"], row["time/publish"], row["time/other"]) == (4.0, 0.5, 0.25)
    assert row["time/step"] == sum(x for key, x in row.items() if key.startswith("time/")) / 2


def test_start_up_ends_with_the_first_step(tmp_path, clock, capsys):
    startup = goodput.PhaseClock("import", began=93.0)  # 7 s ago
    startup.begin("build")
    clock.now += 3.0
    startup.begin("weights")
    log = RunLog(tmp_path, LogConfig(progress="plain", tensorboard=False), 2, clock=startup)
    clock.now += 4.0
    with log.phase("evaluate"):
        clock.now += 1.0
    log.step(0, {}, tokens=0, kind="start")
    for step in log.steps(0, 2):
        clock.now += 0.5
        row = take_step(log, clock, step + 1, 1.0)
    assert goodputs(row) == {
        "start": pytest.approx(14 / 18),
        "evaluate": pytest.approx(1 / 18),
        "update": pytest.approx(2 / 18),
        "other": pytest.approx(1 / 18),
        "productive": pytest.approx(2 / 18),
        "wall_seconds": 18.0,
    }
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("first step")]
    assert lines == [
        "first step done 16.5 s after the start: import 7.0, build 3.0, weights 4.0, evaluate 1.0, "
        "other 0.5, update 1.0"
    ]


def test_compilation_is_counted_once_and_not_for_its_phase(tmp_path):
    log = RunLog(tmp_path, QUIET, 1)
    inner = jax.jit(lambda x: jnp.sin(x) @ x)
    with log.phase("update"):
        jax.jit(lambda x: inner(x) + inner(x + 1))(jnp.ones((17, 17)))
    # The third contains the second; they are longer than the time that passes.
    spans = [(0.0, 1e3), (2e3, 3e3), (1.5e3, 4e3), (6e3, 6.5e3)]
    for span in spans:
        log.clock._on_span("/jax/core/compile/backend_compile_duration", *span)
    log.clock._on_span("/jax/checkpoint/write", 10.0, 20.0)
    assert log.clock._compiling == [(0.0, 1e3), (1.5e3, 4e3), (6e3, 6.5e3)]
    row = log.step(1, {}, tokens=0)
    assert 0 < row["time/compile"] < row["time/step"] and row["time/update"] < row["time/compile"]
    log.close()
    log.close()


def test_what_is_lost_to_a_kill_is_the_time_since_the_checkpoint(tmp_path, clock):
    log = RunLog(tmp_path, QUIET, 9)
    for step in (1, 2, 3):
        take_step(log, clock, step, 10.0, save=2.0 if step == 2 else 0.0)
    with log.phase("rollout"):
        clock.now += 15.0
    with log.phase("rollout"):
        clock.now += 4.0  # less than WRITE_INTERVAL after the last write: not known to the next start
    saved = json.loads((tmp_path / "goodput.json").read_text())
    assert saved == {"step": 3, "wall_seconds": 47.0, "seconds": {"update": 30.0, "checkpoint": 2.0}}

    clock.now += 1000.0  # between the starts
    log = RunLog(tmp_path, QUIET, 9, resume_step=2)  # step 3 and 15 s of step 4 are lost; the row has no save
    row = take_step(log, clock, 3, 10.0)
    expected = {"update": 30 / 57, "lost": 27 / 57, "productive": 30 / 57, "wall_seconds": 57.0}
    assert goodputs(row) == pytest.approx(expected)

    log = RunLog(tmp_path, QUIET, 9, resume_step=2)  # killed once more, before another checkpoint
    row = take_step(log, clock, 3, 10.0)
    expected = {"update": 30 / 67, "lost": 37 / 67, "productive": 30 / 67, "wall_seconds": 67.0}
    assert goodputs(row) == pytest.approx(expected)


def test_nothing_is_lost_where_the_last_step_was_saved(tmp_path, clock):
    log = RunLog(tmp_path, QUIET, 9)
    take_step(log, clock, 1, 10.0, save=5.0)
    log = RunLog(tmp_path, QUIET, 9, resume_step=1)
    row = take_step(log, clock, 2, 5.0)
    expected = {"update": 0.75, "checkpoint": 0.25, "productive": 0.75, "wall_seconds": 20.0}
    assert goodputs(row) | {"lost": 0.0} == pytest.approx(expected | {"lost": 0.0})


def test_a_run_without_a_checkpoint_starts_anew(tmp_path, clock):
    take_step(RunLog(tmp_path, QUIET, 9), clock, 1, 10.0)
    row = take_step(RunLog(tmp_path, QUIET, 9, resume_step=-1), clock, 1, 4.0)
    assert goodputs(row) == {"update": 1.0, "productive": 1.0, "wall_seconds": 4.0}


def test_a_damaged_goodput_json_is_a_warning(tmp_path, capsys):
    (tmp_path / "goodput.json").write_text("{}")
    RunLog(tmp_path, QUIET, 9, resume_step=1).step(2, {}, tokens=1)
    assert "warning: goodput.json cannot be written (KeyError" in capsys.readouterr().out


def test_the_file_is_not_written_in_every_phase(tmp_path, clock, monkeypatch):
    written = []
    monkeypatch.setattr(goodput, "replace_text", lambda path, text, sync: written.append(clock.now))
    log = RunLog(tmp_path, QUIET, 9)
    for _ in range(30):
        with log.phase("rollout"):
            clock.now += 1.0
    assert written == [101.0, 111.0, 121.0]


def device(kind):
    return SimpleNamespace(device_kind=kind)


def test_mfu_by_hand():
    """Two H100 of 989.4 TFLOP/s: 3e15 FLOPs in 4 s are 375 TFLOP/s on each: 375 / 989.4 = 0.379."""
    times = {"rollout": 1.5, "update": 2.0, "other": 0.5, "evaluate": 9.0, "checkpoint": 9.0, "compile": 9.0}
    devices = [device("NVIDIA H100 80GB HBM3")] * 2
    assert performance(times, 8000, 3e15, devices) == {
        "perf/per_device_tokens_per_sec": 1000.0,
        "perf/per_device_tflops_per_sec": 375.0,
        "perf/mfu": pytest.approx(0.37902, abs=1e-5),
    }
    assert performance(times, 0, 0.0, devices) == {}  # an evaluation
    assert performance(times, 8000, 0.0, devices) == {"perf/per_device_tokens_per_sec": 1000.0}


def test_no_mfu_is_invented():
    known = {"perf/per_device_tokens_per_sec": 2.0, "perf/per_device_tflops_per_sec": 3.0}
    for kind in ("cpu", "NVIDIA H100 PCIe", "TPU v99"):  # PCIe cards have another peak
        assert performance({"update": 1.0}, 2, 3e12, [device(kind)]) == known
    for kind, peak in (("TPU v5 lite", 197e12), ("TPU7x", 1153.5e12), ("Tesla T4", 65e12)):
        assert performance({"update": 1.0}, 2, 3e12, [device(kind)])["perf/mfu"] == 3e12 / peak
