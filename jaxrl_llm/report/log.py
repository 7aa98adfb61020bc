"""Log of a run: metrics.jsonl and samples.jsonl; loggers; progress; summary.

A logger that fails (full disk, no network) is reported once and dropped; training continues.
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_kernels.chips import peak_flops
from jaxrl_llm.host.files import inode, replace_lines, replace_text
from jaxrl_llm.report import curve, jsonl, loggers
from jaxrl_llm.report.config import LogConfig
from jaxrl_llm.report.goodput import FILE as GOODPUT_FILE
from jaxrl_llm.report.goodput import PHASES, Goodput, PhaseClock, Profiler, startup_line, with_start
from jaxrl_llm.report.progress import Progress, format_duration
from jaxrl_llm.structs import Metrics

METRICS, SAMPLES, PROMPTS = "metrics.jsonl", "samples.jsonl", "prompts.jsonl"
SUMMARY = (*curve.HELD_OUT, "eval/score", "eval/loss")  # held-out metrics of the summary
UNMEASURED = ("evaluate", "checkpoint", "compile", "profile", "start")
"""Phases in which a step neither generates nor learns; perf/... are of the others."""
OUTPUTS = {
    "curve": "curve.png",
    "metrics": METRICS,
    "samples": SAMPLES,
    "prompts": PROMPTS,
    "profile": "profile",
    "checkpoints": "checkpoints",
    "Hugging Face": "hf",
    "adapter": "adapter",
    "averaged weights": "hf_ema",
    "exports": "exports",
}


class RunLog:
    """Log files and progress of a run. Only process 0 writes, except profiles.

        log = RunLog(run_dir, config.log, total_steps, resume_step=restored)
        for step in log.steps(restored, total_steps):
            with log.phase("rollout"): ...
            log.samples(step, sample_rows(trajectories, prompt_rows))
            log.step(step, metrics, tokens=n)  # before the step's checkpoint: a resumed run keeps the line
        log.finish(next_command="...")  # log.close() in any case

    On resume, lines after `resume_step` (-1: all) are dropped, so that a resumed run has the same files as an
    uninterrupted one (except times). Loggers get every step once, including steps that an earlier start could
    not send.

    Args:
        devices: of the run, for perf/...; () = none.
        profile: steps to profile, numbered from 1.
        clock: of the start-up, whose times are printed with the first step; None = no clock.
    """

    def __init__(
        self,
        run_dir: str | Path,
        config: LogConfig,
        total_steps: int,
        resume_step: int = 0,
        *,
        devices: Sequence[jax.Device] = (),
        profile: range = range(0),
        clock: PhaseClock | None = None,
    ):
        self.run_dir, self.num_samples = Path(run_dir), config.samples
        self.is_writer, self.devices = jax.process_index() == 0, devices
        self.warned: set[str] = set()
        self.loggers: dict[str, loggers.Logger] = {}
        self.shown: list[dict[str, Any]] = []  # samples of the step
        self.total_steps, self.last_step = total_steps, max(resume_step, 0)
        self.progress = Progress(
            config.progress if self.is_writer else "none", total_steps, max(resume_step, 0)
        )
        # Times start with the command, not with the log.
        self.step_started = time.perf_counter()
        self.clock, self.goodput = clock or PhaseClock(), Goodput(self.run_dir)
        self.startup = clock and Counter(clock.take())  # seconds by phase; None = after the first step
        self.started = self.step_started - sum((self.startup or {}).values())  # with the command
        self.times: Counter[str] = Counter()  # of the step
        self.profiler = Profiler(self.run_dir / "profile", profile, self.message, self.clock.phase)
        # Files of an earlier start are cut to the restored step.
        self.inode, self.described = 0, "{}"
        self._try("run directory", lambda: self.run_dir.mkdir(parents=True, exist_ok=True))
        self.inode = inode(self.run_dir)
        for file in (METRICS, SAMPLES):
            self._try(file, jsonl.truncate_after, self.run_dir / file, resume_step)
        rows = self._try(METRICS, jsonl.read_rows, self.run_dir / METRICS) or []
        self.restored = rows[-1] if rows and rows[-1]["step"] == resume_step else {}  # line of that step
        self._try(GOODPUT_FILE, lambda: self.goodput.resume(resume_step, self.restored))
        self.goodput.add(with_start(self.startup or {}))
        self._open_loggers(config, resume_step)
        self._send_missing(rows)

    def config(self, tree: dict[str, Any]) -> None:
        """Write config.json, and send it to the loggers."""
        self.described = json.dumps(tree, indent=2)
        self._try("config.json", self._write_config)
        for name, logger in list(self.loggers.items()):
            self._try(name, logger.config, tree)

    def attach(self, name: str, logger: loggers.Logger | None) -> None:
        """Send the following steps to an open logger; None = there is none."""
        if logger is not None:
            self.loggers[name] = logger
            self.runs.opened(name, logger)

    def steps(self, start: int, total: int, warm_up: int = 0) -> Iterator[int]:
        """Yield start, ..., total - 1; the body takes step n + 1, which is profiled if that was asked for.

        Args:
            warm_up: first steps that are of the SFT warm-up, whose remaining time is shown on its own.
        """
        self.progress.remaining.warm_up = warm_up
        self.clock.begin("other")
        self.progress.phase("")
        if self.profiler.steps and self.profiler.steps[-1] <= start:
            self.message("no profile: its steps are done")
        for step in range(start, total):
            with self.profiler.step(step + 1):
                yield step

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to time/NAME of the step that ends next; an inner phase takes its own."""
        outer = self.progress.phase_name
        self.progress.phase(name)
        try:
            with self.clock.phase(name):
                yield
        finally:
            self.progress.phase(outer)
            self._count(self.last_step if name == "checkpoint" else None)

    def step(
        self, step: int, metrics: Metrics, tokens: int, *, kind: str = "train", model_flops: float = 0.0
    ) -> dict[str, Any]:
        """Write the line of a step: {"step", "kind", metrics, time/, tokens_per_second, perf/, goodput/}.

        Args:
            metrics: scalars by name (Python, numpy, jax); NaN and Inf become null.
            tokens: prompt and response tokens of the step, for tokens_per_second.
            kind: "train", "warm_start" for a step of the SFT warm-up, "start" before the first step.
            model_flops: of the step (`experience.flops`), for perf/mfu; 0 = not known.
        """
        now = time.perf_counter()
        seconds, self.step_started = now - self.step_started, now
        self._count(step)
        times = {f"time/{name}": x for name, x in (dict.fromkeys(PHASES, 0.0) | self.times).items()}
        speed = {"time/step": seconds, "tokens_per_second": tokens / max(seconds, 1e-9)}
        speed |= performance(self.times, tokens, model_flops, self.devices)
        values = {**metrics, **times, **speed, **self.goodput.metrics()}
        row = {"step": step, "kind": kind, **{k: json_value(v) for k, v in values.items()}}
        self.last_step = step
        self.times.clear()
        self._try(METRICS, lambda: jsonl.append_rows(self.run_dir / METRICS, [row]))
        self._send(step, row, self.shown)
        self.shown = []
        if self.startup is not None and kind != "start":
            self.message(startup_line(self.startup))
            self.startup = None
        self.progress.step(step, row)
        return row

    def add(self, metrics: Metrics) -> None:
        """Add metrics to the line of the restored step."""
        values = {k: json_value(v) for k, v in metrics.items()}
        self.restored |= values
        path = self.run_dir / METRICS
        replace_last = lambda: replace_lines(path, [*jsonl.read_rows(path)[:-1], self.restored], sync=False)
        self._try(METRICS, replace_last)
        for name, logger in list(self.loggers.items()):
            self._try(name, logger.step, self.last_step, values, self.shown)
        self.shown = []

    def samples(self, step: int, rows: Sequence[dict[str, Any]], limit: int | None = None) -> None:
        """Write the first rows, by default `config.samples`; see `samples.sample_rows`.

        Loggers get them with the step's line.
        """
        limit = self.num_samples if limit is None else limit
        samples = [{"step": step, **row} for row in rows[:limit]]
        self.shown += samples
        self._try(SAMPLES, lambda: jsonl.append_rows(self.run_dir / SAMPLES, samples))

    def prompts(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write prompts.jsonl: prompts to try the trained model on."""
        self._try(PROMPTS, lambda: replace_lines(self.run_dir / PROMPTS, rows, sync=False))

    def message(self, text: str) -> None:
        """Print text, above the live panel."""
        if self.is_writer:
            self.progress.message(text)

    def warn(self, text: str) -> None:
        self.message(f"warning: {text}")

    def finish(self, stopped: str = "", next_command: str = "") -> None:
        """Draw the curve, close the loggers, print the summary.

        Args:
            stopped: reason of an early stop, such as "SIGTERM"; "" = the run is complete.
            next_command: a command to try next; "" = none.
        """
        self._count(self.last_step)
        self._try("curve.png", lambda: curve.draw_curve(self.run_dir))
        self.close()
        seconds = time.perf_counter() - self.started
        head = (
            f"{f'stopped by {stopped}' if stopped else 'done'}: step {self.last_step} of {self.total_steps}"
        )
        self.message(f"\n{head}, {format_duration(seconds)} since the start")
        self._try("summary", lambda: self.message(summary(self.run_dir)))
        if stopped:
            saved = any((self.run_dir / "checkpoints").glob("[0-9]*"))
            what = "continues from the last checkpoint" if saved else "starts over: no checkpoint was saved"
            self.message(f"The same command again {what}.")
        if next_command:
            self.message(f"\nnext:  {next_command}")

    def close(self) -> None:
        """Restore the terminal, end the profile and close the loggers; a second call does nothing."""
        self.profiler.close()
        self._count()
        self._try(GOODPUT_FILE, lambda: self.goodput.write(now=True))
        self.clock.close()
        self.progress.close()
        for name, logger in list(self.loggers.items()):
            self._try(name, logger.close)
        self.loggers.clear()

    def _count(self, done: int | None = None) -> None:
        """Count the time since the last call; `done` = a step that ends with it."""
        taken = self.clock.take()
        if self.startup is not None:
            self.startup.update(taken)
        taken = with_start(taken)
        self.times.update(taken)
        self.goodput.add(taken, done)
        self._try(GOODPUT_FILE, lambda: self.goodput.write(now=done is not None))

    def _write_config(self) -> None:
        replace_text(self.run_dir / "config.json", self.described, sync=False)

    def _replace_lost(self) -> None:
        """Warn if the run directory was deleted or moved during the run, and create it again."""
        if not self.inode or self.inode == inode(self.run_dir):
            return
        self.inode = 0
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._write_config()
            self.inode, then = inode(self.run_dir), "further output is written to a new one"
        except OSError as error:
            then = f"nothing more can be written ({error.strerror})"
            self.warned |= {*OUTPUTS.values(), "config.json", GOODPUT_FILE, loggers.RUNS_FILE, "tensorboard"}
        self.warn(f"{self.run_dir} has disappeared, with all that was in it; training continues, and {then}")
        if "tensorboard" in self.loggers:
            self._try("tensorboard", self.loggers.pop("tensorboard").close)
            anew = self._try("tensorboard", lambda: loggers.Tensorboard(self.run_dir, self.last_step))
            self.loggers |= {"tensorboard": anew} if anew else {}

    def _open_loggers(self, config: LogConfig, resume_step: int) -> None:
        """Open the loggers that the settings name, each with the run of an earlier start."""
        runs = self._try(loggers.RUNS_FILE, lambda: loggers.LoggerRuns(self.run_dir, resume_step))
        self.runs = runs or loggers.LoggerRuns(self.run_dir, -1)
        make = {
            "tensorboard": lambda _: loggers.Tensorboard(self.run_dir, resume_step),
            "wandb": lambda run_id: loggers.Wandb(config, self.run_dir, run_id),
            "mlflow": lambda run_id: loggers.Mlflow(config, self.run_dir, run_id, self.total_steps),
            "swanlab": lambda run_id: loggers.Swanlab(config, self.run_dir, run_id),
            "trackio": lambda run_id: loggers.Trackio(config, self.run_dir, run_id),
        }
        for name in [name for name in make if getattr(config, name)]:
            self.attach(name, self._try(name, make[name], self.runs.id(name)))
        self._try(loggers.RUNS_FILE, self.runs.write)

    def _send_missing(self, rows: Sequence[dict[str, Any]]) -> None:
        """Send the steps of earlier starts that loggers lack: to new loggers, or after a kill."""
        if all(self.runs.has(name, row["step"]) for name in self.loggers for row in rows[-1:]):
            return
        samples: dict[int, list[dict[str, Any]]] = {}
        for sample in jsonl.read_rows(self.run_dir / SAMPLES):
            samples.setdefault(sample["step"], []).append(sample)
        for row in rows:
            self._send(row["step"], row, samples.get(row["step"], []))

    def _send(self, step: int, row: dict[str, Any], samples: Sequence[dict[str, Any]]) -> None:
        """Send a step to the loggers that lack it."""
        for name, logger in list(self.loggers.items()):
            if not self.runs.has(name, step):
                self._try(name, logger.step, step, row, samples)
                if name in self.loggers:  # it has not failed
                    self.runs.logged(name, step)
        self._try(loggers.RUNS_FILE, self.runs.write)

    def _try(self, name: str, action: Callable[..., Any], *arguments: Any) -> Any:
        """Run an action on process 0; warn once if it fails. A logger is then dropped, a file tried again."""
        if not self.is_writer:
            return None
        self._replace_lost()
        try:
            return action(*arguments)
        except Exception as error:
            self.loggers.pop(name, None)
            if name not in self.warned:
                self.warned.add(name)
                missing = isinstance(error, ModuleNotFoundError) and error.name in loggers.EXTRAS
                fix = f" Fix: pip install 'jaxrl-llm[{error.name}]'" if missing else ""
                self.warn(
                    f"{name} cannot be written ({type(error).__name__}: {error}); training continues.{fix}"
                )
            return None


def performance(
    times: Mapping[str, float], tokens: int, model_flops: float, devices: Sequence[jax.Device]
) -> dict[str, float]:
    """Return perf/per_device_tokens_per_sec, perf/per_device_tflops_per_sec and perf/mfu of a step.

    Model FLOPs utilization is model FLOPs / (seconds x peak FLOP/s of all devices), arXiv 2204.02311,
    appendix B. The seconds of a step exclude the phases UNMEASURED.

    Args:
        times: seconds by phase.
        model_flops: 0 = not known.

    Returns: the known metrics; no MFU if the devices' peak is unknown, as on a CPU.
    """
    seconds = sum(x for name, x in times.items() if name not in UNMEASURED)
    device_seconds = len(devices) * seconds
    if not device_seconds or not tokens:
        return {}
    metrics = {"perf/per_device_tokens_per_sec": tokens / device_seconds}
    if not model_flops:
        return metrics
    metrics["perf/per_device_tflops_per_sec"] = model_flops / device_seconds / 1e12
    peaks = [peak_flops(device.device_kind) for device in devices]
    return metrics if None in peaks else metrics | {"perf/mfu": model_flops / seconds / sum(peaks)}


def json_value(value: Any) -> Any:
    """Return a metric as a JSON value: a finite number, text, or null."""
    if isinstance(value, str | bool | None):
        return value
    number = np.asarray(value).item()
    return number if isinstance(number, int) or math.isfinite(number) else None


def summary(run_dir: Path) -> str:
    """Return first and last value of the main metrics, the paths of the outputs, and the command `view`."""
    rows = jsonl.read_rows(run_dir / METRICS)
    train = [row for row in rows if row.get("kind") != "warm_start"]
    lines = []
    rewarded = any("reward/mean" in row for row in train)
    main = ("reward/mean", "accuracy") if rewarded else ("loss",)
    for key, chosen in (*((key, rows) for key in SUMMARY), *((key, train) for key in main)):
        points = curve.series(chosen, key)
        if len(points):
            (step, first), (_, last) = points[0], points[-1]
            lines.append(f"  {key:<14} {first:.3f} (step {step:.0f}) -> {last:.3f}")
    paths = [(name, run_dir / file) for name, file in OUTPUTS.items() if (run_dir / file).exists()]
    paths += [("view", f"python -m jaxrl_llm view {shlex.quote(str(run_dir))}")] if rows else []
    return "\n".join([*lines, *(f"  {name:<14} {path}" for name, path in paths)])
