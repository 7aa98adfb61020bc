"""Files of a run: lines that survive kills and full disks, the curve; and the progress display."""

import contextlib
import json
import math
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from jaxrl_llm.config import ModelConfig, TrainConfig
from jaxrl_llm.ranges import problems
from jaxrl_llm.recipe.dump import describe_run
from jaxrl_llm.report import curve, jsonl, log, progress
from jaxrl_llm.report.config import LogConfig
from jaxrl_llm.report.goodput import PhaseClock
from jaxrl_llm.report.log import RunLog, json_value
from jaxrl_llm.report.samples import sample_rows
from jaxrl_llm.structs import Outcome, Trajectory

QUIET = LogConfig(progress="none", tensorboard=False)


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Clock:
    """A fake time.perf_counter that only the test moves."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(log.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(progress, "TICK", 1e6)  # tests tick themselves


# -- metrics.jsonl


def test_a_step_is_one_line_with_times_by_phase(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    log = RunLog(tmp_path, QUIET, total_steps=2)
    with log.phase("rollout"):
        clock.now += 2.0
    with log.phase("update"):
        clock.now += 1.0
    with log.phase("rollout"):
        clock.now += 0.5
    clock.now += 0.5
    returned = log.step(1, {"loss": 0.25, "reward/mean": 1.0}, tokens=800)
    clock.now += 5.0
    log.step(2, {"loss": 0.5}, tokens=10, kind="warm_start")
    first, second = lines(tmp_path / "metrics.jsonl")
    assert first == returned
    assert first == {
        "step": 1,
        "kind": "train",
        "loss": 0.25,
        "reward/mean": 1.0,
        "time/rollout": 2.5,
        "time/reward": 0.0,
        "time/update": 1.0,
        "time/checkpoint": 0.0,
        "time/step": 4.0,
        "time/other": 0.5,
        "tokens_per_second": 200.0,
        "goodput/rollout": 0.625,
        "goodput/update": 0.25,
        "goodput/other": 0.125,
        "goodput/productive": 0.875,
        "goodput/wall_seconds": 4.0,
    }
    assert (second["kind"], second["time/rollout"], second["time/step"]) == ("warm_start", 0.0, 5.0)


def test_a_phase_that_raises_is_timed_too(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    log = RunLog(tmp_path, QUIET, 1)
    with contextlib.suppress(KeyError), log.phase("reward"):
        clock.now += 3.0
        raise KeyError
    assert log.step(1, {}, tokens=0)["time/reward"] == 3.0


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (float("nan"), None),
        (float("inf"), None),
        (np.float32("-inf"), None),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (jnp.float32(0.25), 0.25),
        (jnp.bfloat16(2), 2.0),
        (7, 7),
        (None, None),
        ("text", "text"),
    ],
)
def test_values_become_strict_json(value, written):
    assert json_value(value) == written
    assert type(json_value(value)) is type(written)


def test_nan_is_null_in_the_file(tmp_path):
    RunLog(tmp_path, QUIET, 1).step(1, {"loss": jnp.float32(np.nan)}, tokens=1)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert '"loss": null' in text
    assert "NaN" not in text


def test_a_killed_and_rerun_training_has_the_file_of_an_uninterrupted_one(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    timed = lambda key: key.startswith(("time/", "goodput/")) or key == "tokens_per_second"
    without_times = lambda path: [{k: v for k, v in row.items() if not timed(k)} for row in lines(path)]

    def train(run_dir, steps, resume=0):
        log = RunLog(run_dir, QUIET, 6, resume_step=resume)
        for step in steps:
            log.samples(step, [{"response": f"r{step}"}])
            log.step(step, {"loss": 1 / step}, tokens=1)
        return log

    train(whole, range(1, 7))
    train(killed, range(1, 6))
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (killed / name).open("a") as file:
            file.write('{"step": 6, "lo')  # the kill came in the middle of a line
    train(killed, range(4, 7), resume=3)
    assert without_times(killed / "metrics.jsonl") == without_times(whole / "metrics.jsonl")
    assert (killed / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    assert [row["step"] for row in lines(killed / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_metrics_are_added_to_the_line_of_the_restored_step(tmp_path):
    for step in (1, 2, 3):
        RunLog(tmp_path, QUIET, 3, resume_step=step - 1).step(step, {"loss": 1 / step}, tokens=1)
    log = RunLog(tmp_path, QUIET, 3, resume_step=2)
    log.loggers["fake"] = mock.Mock()
    log.add({"eval/score": np.float32(0.5)})
    log.loggers["fake"].step.assert_called_once_with(2, {"eval/score": 0.5}, [])
    rows = [(row["step"], row["loss"], row.get("eval/score")) for row in lines(tmp_path / "metrics.jsonl")]
    assert rows == [
        (1, 1, None),
        (2, 0.5, 0.5),
    ]


def test_a_run_from_the_start_begins_an_empty_file(tmp_path):
    RunLog(tmp_path, QUIET, 1).step(1, {}, tokens=1)
    RunLog(tmp_path, QUIET, 1)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_appending_after_a_line_cut_short_keeps_the_new_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "x')
    jsonl.append_rows(path, [{"step": 3}])
    assert jsonl.read_rows(path) == [{"step": 1}, {"step": 3}]
    with pytest.raises(ValueError, match="not JSON compliant"):
        jsonl.append_rows(path, [{"step": 4, "x": math.nan}])
    jsonl.truncate_after(path, 1)
    assert path.read_text() == '{"step": 1}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_only_process_0_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    log = RunLog(tmp_path / "run", LogConfig(progress="plain"), 1)
    with log.phase("rollout"):
        pass
    row = log.step(1, {"loss": 1.0}, tokens=1)
    log.samples(1, [{"response": "x"}])
    log.config({})
    log.finish(next_command="x")
    assert row["loss"] == 1.0
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


# -- samples


def test_samples_keep_the_first_few_of_each_step(tmp_path):
    trajectory = Trajectory(
        prompt_ids=np.array([1, 2]),
        response_ids=np.array([3, 4, 5]),
        logprobs=np.zeros(3),
        mask=np.ones(3),
        versions=np.zeros(3),
        prompt_index=1,
        response_index=0,
        finish="stop",
        text="four",
        reward=float("nan"),
        outcome=Outcome.FAILED,
    )
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two plus two?"}]
    rows = sample_rows([trajectory], [{"prompt": "two plus two?", "messages": chat}])
    assert rows == [
        {
            "prompt": "two plus two?",
            "messages": chat,
            "response": "four",
            "tree": [{"after": -1, "tokens": [2, 5], "read": [[0, 2]]}],
            "reward": None,
            "outcome": "failed",
            "finish": "stop",
            "response_tokens": 3,
        }
    ]
    log = RunLog(tmp_path, LogConfig(progress="none", tensorboard=False, samples=2), 1)
    log.samples(1, rows * 3)
    log.samples(2, rows)
    assert [row["step"] for row in lines(tmp_path / "samples.jsonl")] == [1, 1, 2]


def test_ranges_of_the_settings():
    assert list(problems(LogConfig())) == list(problems(LogConfig(samples=0))) == []
    assert list(problems(LogConfig(samples=-1))) == [
        ("samples", "is -1: it must be at least 0 and at most 2,147,483,647.")
    ]


# -- loggers that fail


def test_a_full_disk_is_reported_once_and_training_goes_on(tmp_path, monkeypatch, capsys):
    log = RunLog(tmp_path, QUIET, 4)
    real, full = jsonl.append_rows, [True]

    def append(path, rows):
        if full[0]:
            raise OSError(28, "No space left on device")
        real(path, rows)

    monkeypatch.setattr(jsonl, "append_rows", append)
    log.step(1, {}, tokens=1)
    log.step(2, {}, tokens=1)
    full[0] = False  # space was freed
    log.step(3, {}, tokens=1)
    assert capsys.readouterr().out == (
        "warning: metrics.jsonl cannot be written (OSError: [Errno 28] No space left on device); "
        "training continues.\n"
    )
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [3]


def test_an_unwritable_run_directory_stops_nothing(tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    log = RunLog(tmp_path / "taken", LogConfig(progress="none"), 1)
    log.config({"a": 1})
    log.samples(1, [{"response": "x"}])
    log.step(1, {"loss": 1.0}, tokens=1)
    log.finish()
    out = capsys.readouterr().out
    for name in ("run directory", "metrics.jsonl", "samples.jsonl", "config.json", "tensorboard"):
        assert len(re.findall(f"^warning: {name} cannot be written ", out, re.M)) == 1, name


def test_tensorboard_events_hold_the_numbers(tmp_path):
    log = RunLog(tmp_path, LogConfig(progress="none"), 2)
    log.step(1, {"loss": 0.5, "note": "text", "kl": math.nan}, tokens=1)
    log.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    data = file.read_bytes()
    assert b"loss" in data
    assert b"tokens_per_second" in data
    assert b"note" not in data
    assert b"kl" not in data


def test_a_full_disk_ends_tensorboard_and_not_the_run(tmp_path, monkeypatch, capsys):
    """tensorboardX's own thread would end, and its queue of ten block the step for ever."""
    from tensorboardX.event_file_writer import EventsWriter

    log = RunLog(tmp_path, LogConfig(progress="plain"), 2)
    logger = log.loggers["tensorboard"]

    def full(self, event):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EventsWriter, "write_event", full)
    for step in (1, 2):
        log.step(step, {f"m{i}": 0.5 for i in range(40)}, tokens=1)
    log.finish()
    out = capsys.readouterr().out
    assert out.count("warning: tensorboard cannot be written (OSError") == 1 and "done: step 2 of 2" in out
    logger.close()


def test_no_secret_is_in_any_file_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hunter2hunter2")
    config = TrainConfig(run_dir=str(tmp_path), model=ModelConfig(path="https://user:hunter2@host/model"))
    log = RunLog(tmp_path, LogConfig(progress="none"), 1)
    log.config(describe_run(config, "recipe.py", ["--key", "hunter2hunter2"]))
    log.step(1, {"loss": 1.0}, tokens=1)
    log.finish()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.json", "metrics.jsonl", "curve.png"} <= {path.name for path in files}
    assert all(b"hunter2" not in path.read_bytes() for path in files)
    assert (
        json.loads((tmp_path / "config.json").read_text())["config"]["model"]["path"]
        == "https://***@host/model"
    )


# -- progress


def test_a_summary_that_cannot_be_read_does_not_end_the_run(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").mkdir()
    RunLog(tmp_path, QUIET, total_steps=1).finish()
    out = capsys.readouterr().out
    assert "warning: metrics.jsonl cannot be written (IsADirectoryError" in out and "done: step 0 of 1" in out


# -- curve and summary


def made_up(tmp_path, rows):
    jsonl.append_rows(tmp_path / "metrics.jsonl", rows)
    return curve.draw_curve(tmp_path)


def test_the_curve_of_rl_shows_accuracy_held_out_points_and_the_supervised_start(tmp_path, monkeypatch):
    drawn = {}
    for name in ("_line", "_points", "_shade"):
        real = getattr(curve, name)
        monkeypatch.setattr(
            curve,
            name,
            lambda axes, *a, real=real, name=name, **k: (
                drawn.setdefault(name, []).append((*a, *k.values())),
                real(axes, *a, **k),
            ),
        )
    rows = [{"step": s, "kind": "warm_start", "loss": 1.0, "accuracy": 9.9} for s in (1, 2)]
    rows += [
        {"step": s, "kind": "train", "accuracy": s / 10, "reward/mean": s / 5, "loss": 0.0} for s in (3, 4, 5)
    ]
    rows[1]["eval/pass@1"] = 0.1
    rows[4]["eval/pass@1"] = 0.75
    rows[3]["accuracy"] = None
    rows += [{"step": s, "kind": "train", "loss": 0.0} for s in (6, 7, 8)]
    path = made_up(tmp_path, rows)
    assert path == tmp_path / "curve.png"
    assert imread(path).shape == (675, 1200, 4)
    (accuracy, _, accuracy_label), (reward, _, reward_label) = drawn["_line"]
    np.testing.assert_allclose(accuracy, [[3, 0.3], [5, 0.5]])
    np.testing.assert_allclose(reward, [[3, 0.6], [4, 0.8], [5, 1.0]])
    assert (accuracy_label, reward_label) == ("training accuracy", "training reward")
    np.testing.assert_allclose(drawn["_points"][0][0], [[2, 0.1], [5, 0.75]])
    assert drawn["_shade"] == [(0, 2)]
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []


def test_a_supervised_start_longer_than_the_run_is_cut_to_a_third_of_it(tmp_path, monkeypatch):
    shaded, limits = [], []
    monkeypatch.setattr(curve, "_shade", lambda axes, *a, **_: (shaded.append(a), limits.append(axes)))
    rows = [{"step": s, "kind": "warm_start", "loss": 1.0} for s in range(1, 101)]
    rows += [{"step": s, "kind": "train", "accuracy": 0.5} for s in range(101, 131)]
    made_up(tmp_path, rows)
    assert shaded == [(90, 100)] and limits[0].get_xlim() == (90, 131)


def test_the_curve_of_sft_is_its_loss(tmp_path):
    plain_loss = made_up(tmp_path, [{"step": s, "kind": "train", "loss": 1 / s} for s in range(1, 9)])
    assert imread(plain_loss).shape == (675, 1200, 4)
    jsonl.append_rows(
        tmp_path / "metrics.jsonl", [{"step": 9, "kind": "train", "loss": 0.1, "eval/pass@1": 0.5}]
    )
    assert imread(curve.draw_curve(tmp_path)).shape == (675, 1200, 4)


@pytest.mark.parametrize(
    ("extra", "labels", "note"),
    [
        ({}, ["training reward"], "no held-out evaluation"),
        ({"eval/pass@1": 0.5}, ["training reward", "held-out accuracy"], ""),
        (
            {"eval/win_rate": 0.6, "eval/reward": 2.0},
            ["training reward", "held-out reward", "win rate against the start"],
            "",
        ),
    ],
)
def test_the_labels_of_the_curve_are_what_was_evaluated(tmp_path, monkeypatch, extra, labels, *, note):
    figures = []
    real = Figure.add_subplot
    monkeypatch.setattr(Figure, "add_subplot", lambda self: figures.append(real(self)) or figures[-1])
    made_up(tmp_path, [{"step": s, "kind": "train", "reward/mean": 1.5, **extra} for s in (1, 2)])
    (axes,) = figures
    assert axes.get_legend_handles_labels()[1] == labels
    assert axes.get_title(loc="right") == note


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 100])
def test_ticks_of_the_curve_are_whole_steps_that_differ(tmp_path, monkeypatch, steps):
    figures = []
    real = Figure.add_subplot
    monkeypatch.setattr(Figure, "add_subplot", lambda self: figures.append(real(self)) or figures[-1])
    made_up(tmp_path, [{"step": s, "kind": "train", "reward/mean": 1.5} for s in range(1, steps + 1)])
    (axes,) = figures
    low, high = axes.get_xlim()
    ticks = [x for x in axes.get_xticks() if low <= x <= high]
    texts = axes.xaxis.get_major_formatter().format_ticks(ticks)
    assert ticks and all(x == int(x) for x in ticks) and texts == [f"{x:.0f}" for x in ticks]
    assert len(set(texts)) == len(texts)


def test_there_is_no_curve_without_a_point(tmp_path):
    assert curve.draw_curve(tmp_path) is None
    assert made_up(tmp_path, [{"step": 1, "kind": "train", "loss": None}]) is None
    assert not (tmp_path / "curve.png").exists()


def test_smoothing_by_hand():
    np.testing.assert_array_equal(curve.smooth(np.array([1.0, 5.0, 3.0])), [1.0, 5.0, 3.0])
    spike = np.zeros(80)
    spike[40] = 10.0
    np.testing.assert_allclose(curve.smooth(spike)[37:44], [0, 2, 2, 2, 2, 2, 0])
    np.testing.assert_allclose(curve.smooth(np.arange(80.0))[:2], [1.0, 1.5])


def test_the_end_says_what_was_reached_and_where_things_lie(tmp_path, monkeypatch, capsys):
    clock = Clock(monkeypatch)
    log = RunLog(tmp_path, QUIET, 3)
    clock.now += 83
    log.step(1, {"loss": 2.0, "eval/pass@1": 0.4}, tokens=1, kind="warm_start")
    log.step(2, {"reward/mean": 0.5, "accuracy": 0.25, "loss": 0.125}, tokens=1)
    log.step(3, {"reward/mean": 0.75, "accuracy": 0.5, "loss": 0.0, "eval/pass@1": 0.9375}, tokens=1)
    (tmp_path / "hf").mkdir()
    log.finish(next_command="python -m jaxrl_llm generate --model hf")
    assert capsys.readouterr().out == (
        "\ndone: step 3 of 3, 1:23 since the start\n"
        "  eval/pass@1    0.400 (step 1) -> 0.938\n"
        "  reward/mean    0.500 (step 2) -> 0.750\n"
        "  accuracy       0.250 (step 2) -> 0.500\n"
        f"  curve          {tmp_path}/curve.png\n"
        f"  metrics        {tmp_path}/metrics.jsonl\n"
        f"  Hugging Face   {tmp_path}/hf\n"
        f"  view           python -m jaxrl_llm view {tmp_path}\n"
        "\nnext:  python -m jaxrl_llm generate --model hf\n"
    )


def test_the_time_at_the_end_counts_from_the_command_on(tmp_path, monkeypatch, capsys):
    """As that of the first step does: 37 seconds until the log, and 83 after it."""
    clock = Clock(monkeypatch)
    log = RunLog(tmp_path, QUIET, 3, clock=PhaseClock("import", began=clock.now - 37))
    clock.now += 83
    log.finish(stopped="SIGTERM")
    assert "step 0 of 3, 2:00 since the start\n" in capsys.readouterr().out


def test_the_end_of_a_reward_model_tells_its_held_out_accuracy(tmp_path, capsys):
    log = RunLog(tmp_path, QUIET, 2)
    log.step(1, {"loss": 2.0, "eval/pass@1": 0.4}, tokens=1, kind="warm_start")
    log.step(2, {"loss": 0.5, "eval/accuracy": 0.9}, tokens=1)
    log.finish()
    assert "  eval/accuracy  0.900 (step 2) -> 0.900\n" in capsys.readouterr().out


def test_an_early_end_says_why_and_how_to_go_on(tmp_path, monkeypatch, capsys):
    Clock(monkeypatch)
    log = RunLog(tmp_path, QUIET, 3)
    log.step(1, {"loss": 2.0}, tokens=1)
    (tmp_path / "checkpoints/1").mkdir(parents=True)
    log.finish(stopped="SIGTERM")
    out = capsys.readouterr().out
    assert out.startswith("\nstopped by SIGTERM: step 1 of 3, 0:00 since the start\n  loss           2.000")
    assert out.endswith("The same command again continues from the last checkpoint.\n")

    RunLog(tmp_path / "new", QUIET, 3, resume_step=-1).finish(stopped="SIGTERM")
    out = capsys.readouterr().out
    assert "stopped by SIGTERM: step 0 of 3" in out
    assert out.endswith("The same command again starts over: no checkpoint was saved.\n")
