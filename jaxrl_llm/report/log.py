"""Log of a run: metrics.jsonl and samples.jsonl; tensorboard, wandb, mlflow; progress; summary.

A logger that fails (full disk, no network) is reported once and dropped; training continues.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxrl_llm.ranges import CountOrZero
from jaxrl_llm.report import curve, jsonl, loggers
from jaxrl_llm.report.progress import Progress, format_duration
from jaxrl_llm.structs import Metrics, Trajectory

PHASES = ("rollout", "reward", "update", "checkpoint")  # whose times are in every line

PROMPTS = "prompts.jsonl"
OUTPUTS = {
    "curve": "curve.png",
    "metrics": "metrics.jsonl",
    "samples": "samples.jsonl",
    "prompts": PROMPTS,
    "checkpoints": "checkpoints",
    "Hugging Face": "hf",
    "adapter": "adapter",
}


@dataclass(frozen=True)
class LogConfig:
    """Progress, samples and loggers of a run; metrics.jsonl is always written."""

    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """Display of progress; auto = rich on a terminal, a panel in a notebook, else plain lines."""
    samples: CountOrZero = 4
    """Responses of each step written to samples.jsonl."""
    tensorboard: bool = True
    """Write tensorboard events into the run directory."""
    wandb: str = ""
    """Weights & Biases project; "" = off (needs the extra "wandb")."""
    mlflow: str = ""
    """MLflow experiment; "" = off (needs the extra "mlflow")."""


class RunLog:
    """Log files and progress of a run. Only process 0 writes.

        log = RunLog(run_dir, config.log, total_steps, resume_step=restored)
        with log.phase("rollout"): ...
        log.samples(step, sample_rows(trajectories, prompt_rows))
        log.step(step, metrics, tokens=n)      # before the step's checkpoint: a resumed run keeps the line
        log.finish(next_command="...")         # log.close() in any case

    On resume, lines after `resume_step` (-1: all) are dropped: the files of a resumed run equal those of an
    uninterrupted one (but for times).
    """

    def __init__(self, run_dir: str | Path, config: LogConfig, total_steps: int, resume_step: int = 0):
        self.run_dir, self.num_samples = Path(run_dir), config.samples
        self.is_writer = jax.process_index() == 0
        self.warned: set[str] = set()
        self.loggers: dict[str, loggers.Logger] = {}
        self.total_steps, self.last_step = total_steps, max(resume_step, 0)
        self.progress = Progress(
            config.progress if self.is_writer else "none", total_steps, max(resume_step, 0)
        )
        self.started = self.step_started = time.perf_counter()
        self.times = dict.fromkeys(PHASES, 0.0)
        self._try("run directory", lambda: self.run_dir.mkdir(parents=True, exist_ok=True))
        for file in ("metrics.jsonl", "samples.jsonl"):
            self._try(file, lambda file=file: jsonl.truncate_after(self.run_dir / file, resume_step))
        if config.tensorboard:
            self._open("tensorboard", lambda: loggers.Tensorboard(self.run_dir, resume_step))
        if config.wandb:
            self._open("wandb", lambda: loggers.Wandb(self.run_dir, config.wandb))
        if config.mlflow:
            self._open("mlflow", lambda: loggers.Mlflow(self.run_dir, config.mlflow))

    def config(self, tree: dict[str, Any]) -> None:
        """Write config.json, and send it to the loggers."""
        self._try(
            "config.json",
            lambda: jsonl.replace_text(self.run_dir / "config.json", json.dumps(tree, indent=2)),
        )
        for name, logger in list(self.loggers.items()):
            self._try(name, lambda logger=logger: logger.config(tree))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to time/NAME of the step that ends next."""
        self.progress.phase(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - start
            self.progress.phase("")

    def step(self, step: int, metrics: Metrics, tokens: int, kind: str = "train") -> dict[str, Any]:
        """Write the line of a step: {"step", "kind", metrics, time/PHASE, time/step, tokens_per_second}.

        Args:
            metrics: scalars by name (Python, numpy, jax); NaN and Inf become null.
            tokens: prompt and response tokens of the step, for tokens_per_second.
            kind: "train", or "warm_start" for a step of the SFT warm-up.
        """
        now = time.perf_counter()
        seconds, self.step_started = now - self.step_started, now
        times = {f"time/{name}": value for name, value in self.times.items()}
        speed = {"time/step": seconds, "tokens_per_second": tokens / max(seconds, 1e-9)}
        values = {**metrics, **times, **speed}
        row = {"step": step, "kind": kind, **{k: json_value(v) for k, v in values.items()}}
        self.times, self.last_step = dict.fromkeys(PHASES, 0.0), step
        self._try("metrics.jsonl", lambda: jsonl.append_rows(self.run_dir / "metrics.jsonl", [row]))
        for name, logger in list(self.loggers.items()):
            self._try(name, lambda logger=logger: logger.step(step, row))
        self.progress.step(step, row)
        return row

    def samples(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Write the first `config.samples` rows; see `sample_rows`."""
        samples = [{"step": step, **row} for row in rows[: self.num_samples]]
        self._try("samples.jsonl", lambda: jsonl.append_rows(self.run_dir / "samples.jsonl", samples))

    def prompts(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write prompts.jsonl: prompts to try the trained model on."""
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        self._try(PROMPTS, lambda: jsonl.replace_text(self.run_dir / PROMPTS, text))

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
        self._try("curve.png", lambda: curve.draw_curve(self.run_dir))
        self.close()
        seconds = time.perf_counter() - self.started
        head = (
            f"{f'stopped by {stopped}' if stopped else 'done'}: step {self.last_step} of {self.total_steps}"
        )
        self.message(f"\n{head}, {format_duration(seconds)} since the start")
        self._try("summary", lambda: self.message(summary(self.run_dir)))
        if stopped:
            self.message("The same command again continues from the last checkpoint.")
        if next_command:
            self.message(f"\nnext:  {next_command}")

    def close(self) -> None:
        """Restore the terminal and close the loggers; a second call does nothing."""
        self.progress.close()
        for name, logger in list(self.loggers.items()):
            self._try(name, logger.close)
        self.loggers.clear()

    def _open(self, name: str, make: Callable[[], loggers.Logger]) -> None:
        logger = self._try(name, make)
        if logger is not None:
            self.loggers[name] = logger

    def _try(self, name: str, action: Callable[[], Any]) -> Any:
        """Run an action on process 0; warn once if it fails. A logger is then dropped, a file tried again."""
        if not self.is_writer:
            return None
        try:
            return action()
        except Exception as error:
            self.loggers.pop(name, None)
            if name not in self.warned:
                self.warned.add(name)
                self.warn(f"{name} cannot be written ({type(error).__name__}: {error}); training continues.")
            return None


def json_value(value: Any) -> Any:
    """Return a metric as a JSON value: a finite number, text, or null."""
    if isinstance(value, str | bool | None):
        return value
    number = np.asarray(value).item()
    return number if isinstance(number, int) or math.isfinite(number) else None


def sample_rows(
    trajectories: Sequence[Trajectory], prompts: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return rows of samples.jsonl, which `python -m jaxrl_llm generate --prompts` reads.

    Args:
        prompts: `data.chat.prompt_row` of each trajectory: "prompt" and, of a chat, "messages".

    Returns: the prompt's row with "response" (text), "turns" (messages of a conversation), "reward",
        "outcome", "finish" and "response_tokens".
    """
    return [
        {
            **prompt,
            "response": t.text,
            **({"turns": t.messages} if t.episode else {}),
            "reward": json_value(t.reward),
            "outcome": t.outcome.name.lower(),
            "finish": t.finish,
            "response_tokens": len(t.response_ids),
        }
        for t, prompt in zip(trajectories, prompts, strict=True)
    ]


def summary(run_dir: Path) -> str:
    """Return the first and last value of the main metrics, and the paths of the run's outputs."""
    rows = jsonl.read_rows(run_dir / "metrics.jsonl")
    train = [row for row in rows if row.get("kind") != "warm_start"]
    lines = []
    rewarded = any("reward/mean" in row for row in train)
    main = ("reward/mean", "accuracy") if rewarded else ("loss",)
    for key, chosen in (*((key, rows) for key in curve.HELD_OUT), *((key, train) for key in main)):
        points = curve.series(chosen, key)
        if len(points):
            (step, first), (_, last) = points[0], points[-1]
            lines.append(f"  {key:<14} {first:.3f} (step {step:.0f}) -> {last:.3f}")
    paths = [(name, run_dir / file) for name, file in OUTPUTS.items() if (run_dir / file).exists()]
    return "\n".join([*lines, *(f"  {name:<14} {path}" for name, path in paths)])
