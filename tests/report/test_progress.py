"""The progress display: lines of steps and of long phases, the remaining time, the live panel."""

import math
import sys

import pytest
from test_log import Clock

from jaxrl_llm.report import progress
from jaxrl_llm.report.config import LogConfig
from jaxrl_llm.report.log import RunLog


def test_plain_progress_is_one_line_a_step(tmp_path, monkeypatch, capsys):
    clock = Clock(monkeypatch)
    log = RunLog(tmp_path, LogConfig(progress="auto", tensorboard=False), 100, resume_step=9)
    clock.now += 2.0
    log.step(10, {"reward/mean": 0.51239, "loss": -0.001, "kl": math.nan, "grad_norm": 2}, tokens=5000)
    clock.now += 4.0
    log.step(11, {}, tokens=4)
    assert capsys.readouterr().out.splitlines() == [
        "step 10/100  reward/mean 0.5124  loss -0.001  grad_norm 2  2,500 tokens/s  3:00 left",
        "step 11/100  1 tokens/s  4:27 left",
    ]


def shown_by(kind, capsys, rows, total=100):
    display = progress.Progress(kind, total)
    for row in rows:
        display.step(row["step"], row)
    display.close()
    return capsys.readouterr().out


def test_the_remaining_time_counts_evaluations_by_their_average_and_compilation_never(capsys):
    """Steps of 2 s, one of four with 8 s of evaluation and saving: 4 s each on average, 96 to go."""
    often = {"kind": "train", "time/step": 2.0}
    rows = [{"step": 1, **often, "time/step": 32.0, "time/compile": 25.0, "time/start": 5.0}]
    rows += [{"step": 2, **often}, {"step": 3, **often}]
    rows += [{"step": 4, **often, "time/step": 10.0, "time/evaluate": 7.0, "time/checkpoint": 1.0}]
    out = shown_by("plain", capsys, rows).splitlines()
    assert [line.split("  ")[-1] for line in out] == ["3:18 left", "3:16 left", "3:14 left", "6:24 left"]


def test_steps_of_the_warm_up_do_not_predict_those_of_the_run(capsys):
    rows = [{"step": 0, "kind": "start", "eval/pass@1": 0.25, "time/step": 50.0}]
    rows += [{"step": s, "kind": "warm_start", "loss": 2.0, "time/step": 0.5} for s in (1, 2)]
    rows += [{"step": s, "kind": "train", "loss": 1.0, "time/step": 4.0} for s in (3, 4)]
    assert shown_by("plain", capsys, rows, total=10).splitlines() == [
        "evaluation at step 0/10  pass@1 0.25",
        "step 1/10  loss 2  0 tokens/s",
        "step 2/10  loss 2  0 tokens/s",
        "step 3/10  loss 1  0 tokens/s  0:28 left",
        "step 4/10  loss 1  0 tokens/s  0:24 left",
    ]


def test_the_warm_up_has_a_remaining_time_of_its_own(tmp_path, monkeypatch, capsys):
    """Steps of 0.5 s, of which 300 are the warm-up; the run's steps are not known before they are taken."""
    log = RunLog(tmp_path, LogConfig(progress="plain", tensorboard=False), 302)
    monkeypatch.setattr(log, "progress", progress.Progress("plain", 302))
    rows = [{"step": s, "kind": "warm_start", "time/step": 0.5} for s in (100, 299, 300)]
    rows += [{"step": 301, "kind": "train", "time/step": 4.0}]
    for _ in log.steps(0, 1, warm_up=300):
        for row in rows:
            log.progress.step(row["step"], row)
    log.close()
    assert capsys.readouterr().out.splitlines() == [
        "step 100/302  0 tokens/s  1:40 of the SFT warm-up left",
        "step 299/302  0 tokens/s  0:00 of the SFT warm-up left",
        "step 300/302  0 tokens/s",
        "step 301/302  0 tokens/s  0:04 left",
    ]


def test_each_evaluation_is_a_line_that_stays(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "150")
    row = {
        "step": 5,
        "loss": 1.0,
        "eval/truncated_fraction": 0.0,
        "eval/pass@1": 0.5,
        "eval/maj@4": 0.625,
        "eval/note": "x",
        "eval/bad": None,
    }
    line = "evaluation at step 5/100  pass@1 0.5  maj@4 0.625  truncated_fraction 0"
    assert shown_by("plain", capsys, [row]).splitlines()[0] == line
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert line in shown_by("rich", capsys, [row, {"step": 6, "loss": 0.5}])
    assert shown_by("none", capsys, [row]) == ""
    many = {"step": 5, **{f"eval/source_{i}": i / 10 for i in range(11)}}
    assert shown_by("plain", capsys, [many]).splitlines()[0].endswith("  and 3 more in metrics.jsonl")


def test_a_long_step_shows_its_phases_in_a_log_without_a_terminal(tmp_path, monkeypatch, capsys):
    clock = Clock(monkeypatch)
    log = RunLog(tmp_path, LogConfig(progress="plain", tensorboard=False), 9, resume_step=3)
    for _ in log.steps(3, 5):
        for name, seconds in (("rollout", 12.0), ("reward", 5.0), ("update", 20.0), ("checkpoint", 1.0)):
            with log.phase(name):
                for _ in range(int(seconds)):  # a thread of the run's does it
                    clock.now += 1.0
                    log.progress.tick()
        log.step(log.last_step + 1, {}, tokens=1)
    first, second = "step 4/9, which compiles its programs", "step 5/9"
    lines = [line for line in capsys.readouterr().out.splitlines() if "so far" in line]
    assert lines == [
        f"{first}: rollout, 10 s so far",
        f"{first}: update, 3 s so far",
        f"{first}: update, 13 s so far",
        f"{second}: rollout, 10 s so far",
        f"{second}: update, 3 s so far",
        f"{second}: update, 13 s so far",
    ]


def test_the_live_panel_shows_phase_metrics_speed_and_gives_the_terminal_back(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = progress.Progress("auto", 50, 10)
    assert shown.kind == "rich"
    shown.phase("rollout")
    shown.step(20, {"time/step": 2.0, "tokens_per_second": 1234.0, "accuracy": 0.5})
    shown.message("saved [step 20]")
    shown.live.refresh()
    shown.close()
    shown.close()
    out = capsys.readouterr().out
    for text in ("step 20/50", "rollout", "1,234 tokens/s", "1:00 left", "accuracy 0.5", "saved [step 20]"):
        assert text in out, text
    assert out.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_not_a_terminal_is_plain(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    assert progress.Progress("auto", 1).kind == "plain"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert progress.Progress("auto", 1).kind == "plain"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (65, "1:05"), (59.6, "1:00"), (3725, "1:02:05")]
)
def test_clock(seconds, text):
    assert progress.format_duration(seconds) == text
