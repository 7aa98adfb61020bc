"""Loggers that receive the rows of metrics.jsonl: TensorBoard, Weights & Biases, MLflow, SwanLab and Trackio.

A resumed training run continues the logger's run: its id and the last step that it has are in
RUN/loggers.json, and steps that are taken again after a kill are not logged again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from jaxrl_llm.host.files import replace_text
from jaxrl_llm.report import jsonl
from jaxrl_llm.report.config import LogConfig

Row = dict[str, Any]

RUNS_FILE = "loggers.json"
FLUSH_INTERVAL = 30.0  # seconds between the writes of TensorBoard's events to the disk
EXTRAS = ("wandb", "mlflow", "swanlab", "trackio")
"""Loggers whose packages come with the extras of these names."""
SAMPLE_COLUMNS = (
    *("step", "eval", "data_source", "prompt", "response"),
    *("reward", "outcome", "score", "win", "finish", "response_tokens"),
)
"""Columns of the tables of samples; eval, data_source, score and win are set for evaluations only.
samples.jsonl has all fields."""
MAX_PARAM_LENGTH = 6000  # of a value, mlflow.utils.validation
MAX_PARAMS = 100  # of a request, there too
TABLE_STEPS, MAX_TABLES = 100, 100  # a table is sent again as it grows; the names of all are in one tag
MLFLOW_TABLES = "mlflow.loggedArtifacts"
"""Tag with the names of a run's tables. `mlflow.log_table` is not used: to append, it reads a table as pandas
does, where the text "007" is a number."""


class Logger(Protocol):
    """A logger of one run, opened with the settings, the run directory and the state of an earlier start."""

    id: str
    """Identifies the logger's run, so that a later start continues it; "" = the run directory does."""
    last_step: int | None
    """Last step that the service has of the run; None = not known."""

    def config(self, tree: dict[str, Any]) -> None:
        """Log the resolved config."""

    def step(self, step: int, row: Row, samples: Sequence[Row]) -> None:
        """Log the numbers of a step's row, and its samples as a table."""

    def close(self) -> None:
        """Flush, and end the logger's run."""


class LoggerRuns:
    """RUN/loggers.json: id and last step of each logger's run; empty for a new run."""

    def __init__(self, run_dir: Path, resume_step: int):
        self.path = run_dir / RUNS_FILE
        self.runs: dict[str, dict[str, Any]] = {}
        if resume_step > 0 and self.path.exists():
            self.runs = json.loads(self.path.read_text())

    def id(self, name: str) -> str:
        """Return the id of a logger's run, "" = none yet."""
        return self.runs.get(name, {}).get("id", "")

    def opened(self, name: str, logger: Logger) -> None:
        """Record the id of a run; its last step is the service's, if known."""
        known = self.runs.get(name, {}).get("step", -1) if self.id(name) == logger.id else -1
        step = known if logger.last_step is None else logger.last_step
        self.runs[name] = {"id": logger.id, "step": step}

    def has(self, name: str, step: int) -> bool:
        """Return whether a logger's run has a step already."""
        return step <= self.runs[name]["step"]

    def logged(self, name: str, step: int) -> None:
        """Note that a logger's run has a step."""
        self.runs[name]["step"] = step

    def write(self) -> None:
        """Write the file, of loggers whose runs have ids."""
        if named := {name: run for name, run in self.runs.items() if run["id"]}:
            replace_text(self.path, json.dumps(named), sync=False)


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Make imports of a package fail inside, as if it were not installed, unless it is imported already."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None
    try:
        yield
    finally:
        del sys.modules[package]


class Tensorboard:
    """Event files in run_dir/tensorboard; events after the restored step are hidden on resume.

    Events are written in the calling thread: the thread of tensorboardX's `SummaryWriter` ends when the disk
    is full, and its queue then blocks the run forever.
    """

    id = ""

    def __init__(self, run_dir: Path, resume_step: int):
        with _hidden("torch"):  # whose import takes seconds, for arguments that are not used here
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog
            from tensorboardX.summary import scalar

        self.last_step, self.event, self.scalar = resume_step, Event, scalar
        folder = run_dir / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self.writer, self.flushed = EventsWriter(str(folder / "events")), 0.0
        self._write(resume_step + 1, session_log=SessionLog(status=SessionLog.START))

    def config(self, tree: dict[str, Any]) -> None:
        """Do nothing: config.json is in the run directory."""

    def step(self, step: int, row: Row, samples: Sequence[Row]) -> None:
        for key, value in _numbers(row).items():
            self._write(step, summary=self.scalar(key, value))
        if time.monotonic() > self.flushed + FLUSH_INTERVAL:
            self.writer.flush()
            self.flushed = time.monotonic()

    def close(self) -> None:
        self.writer.close()

    def _write(self, step: int, **content: Any) -> None:
        self.writer.write_event(self.event(step=step, wall_time=time.time(), **content))


class Wandb:
    """A Weights & Biases run, online or offline (WANDB_MODE)."""

    def __init__(self, config: LogConfig, run_dir: Path, run_id: str):
        import wandb

        entity, _, project = config.wandb.rpartition("/")
        self.wandb = wandb
        settings = _run_settings(config, run_dir, run_id, "WANDB_RUN_ID", name_variable="WANDB_NAME")
        self.id = settings["id"]
        self.run = wandb.init(
            entity=entity or None, project=project, dir=_setting("", "WANDB_DIR", str(run_dir)), **settings
        )
        self.last_step = None if self.run.offline else self.run.step - 1

    def config(self, tree: dict[str, Any]) -> None:
        self.run.config.update(tree, allow_val_change=True)

    def step(self, step: int, row: Row, samples: Sequence[Row]) -> None:
        values = _numbers(row)
        if samples:
            values["samples"] = self.wandb.Table(columns=list(SAMPLE_COLUMNS), data=_cells(samples))
        self.run.log(values, step=step, commit=True)

    def close(self) -> None:
        self.run.finish()


class Mlflow:
    """An MLflow run on the tracking server of MLFLOW_TRACKING_URI.

    The package mlflow-skinny knows servers alone (and folders, with MLFLOW_ALLOW_FILE_STORE=true); sqlite
    files need mlflow itself.

    Args:
        total_steps: of the training run, whose samples are at most about MAX_TABLES tables.
    """

    last_step = None

    def __init__(self, config: LogConfig, run_dir: Path, run_id: str, total_steps: int):
        import mlflow

        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # of each table
        self.mlflow = mlflow
        self.table_steps = max(TABLE_STEPS, math.ceil(total_steps / MAX_TABLES))
        self.samples_file, self.table, self.rows = run_dir / "samples.jsonl", -1, []
        mlflow.set_experiment(config.mlflow)
        tags = {key: value or "true" for key, _, value in (tag.partition("=") for tag in config.tags)}
        tags |= {"group": config.group} if config.group else {}
        run = mlflow.start_run(run_id=run_id or None, run_name=config.name or run_dir.name, tags=tags or None)
        self.id, self.params = run.info.run_id, dict(run.data.params)
        self.tables = json.loads(run.data.tags.get(MLFLOW_TABLES, "[]"))

    def config(self, tree: dict[str, Any]) -> None:
        """Log config.json, and its keys as params, which never change: a resumed run adds the new ones."""
        self.mlflow.log_dict(tree, "config.json")
        flat = [(_mlflow_name(key), text) for key, text in flat_texts(tree.get("config", tree))]
        new = [(key, text[:MAX_PARAM_LENGTH]) for key, text in flat if key not in self.params]
        for start in range(0, len(new), MAX_PARAMS):
            self.mlflow.log_params(dict(new[start : start + MAX_PARAMS]))

    def step(self, step: int, row: Row, samples: Sequence[Row]) -> None:
        numbers = {_mlflow_name(key): value for key, value in _numbers(row).items()}
        self.mlflow.log_metrics(numbers, step=step)
        if samples:
            self._log_samples(step, samples)

    def close(self) -> None:
        self.mlflow.end_run()

    def _log_samples(self, step: int, samples: Sequence[Row]) -> None:
        """Log the table of the steps around `step`, as MLflow's JSON of a data frame."""
        first = step - step % self.table_steps
        if first != self.table:  # after a resume, an earlier start may have logged some of its steps
            earlier = jsonl.read_rows(self.samples_file)
            self.table, self.rows = first, [row for row in earlier if first <= row["step"] < step]
        self.rows += samples
        name = f"samples/from_step_{first:06}.json"
        self.mlflow.log_dict({"columns": SAMPLE_COLUMNS, "data": _cells(self.rows)}, name)
        entry = {"path": name, "type": "table"}
        if entry not in self.tables:
            self.tables.append(entry)
            self.mlflow.set_tag(MLFLOW_TABLES, json.dumps(self.tables))


class Swanlab:
    """A SwanLab run, online, or with SWANLAB_MODE offline or local."""

    last_step = None

    def __init__(self, config: LogConfig, run_dir: Path, run_id: str):
        import swanlab

        workspace, _, project = config.swanlab.rpartition("/")
        self.swanlab = swanlab
        settings = _run_settings(config, run_dir, run_id, "SWANLAB_RUN_ID", name_variable="SWANLAB_EXP_NAME")
        self.id = settings["id"]
        self.run = swanlab.init(
            workspace=workspace or None,
            project=project,
            log_dir=_setting("", "SWANLAB_LOG_DIR", str(run_dir / "swanlab")),
            **settings,
        )

    def config(self, tree: dict[str, Any]) -> None:
        self.run.config.update(tree)

    def step(self, step: int, row: Row, samples: Sequence[Row]) -> None:
        values = _numbers(row)
        if samples:
            values["samples"] = self.swanlab.echarts.Table().add(list(SAMPLE_COLUMNS), _cells(samples))
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """A Trackio run: in a SQLite file of the project in TRACKIO_DIR, or in the Space TRACKIO_SPACE_ID.

    Trackio continues the newest run of a name. If another run has taken the name since the start, a new one
    gets all steps.
    """

    last_step = None

    def __init__(self, config: LogConfig, run_dir: Path, run_id: str):
        import trackio

        self.trackio, self.tags = trackio, list(config.tags)
        self.waiting: list[tuple[dict[str, Any], int]] | None = []  # steps; None = the config is known
        start = functools.partial(
            trackio.init,
            project=config.trackio,
            name=config.name or run_dir.name,
            group=config.group or None,
            embed=False,
        )
        self.run = start(resume="allow" if run_id else "never")
        if run_id and self.run.id != run_id:
            self.run = start(resume="never")
        self.id = self.run.id

    def config(self, tree: dict[str, Any]) -> None:
        """Set the config, which Trackio stores with the first step after its start alone."""
        self.run.config.update(tree | ({"tags": self.tags} if self.tags else {}))
        self._send_waiting()

    def step(self, step: int, row: Row, samples: Sequence[Row]) -> None:
        values = _numbers(row)
        if samples:
            values["samples"] = self.trackio.Table(columns=list(SAMPLE_COLUMNS), data=_cells(samples))
        if self.waiting is None:
            self.run.log(values, step=step)
        else:
            self.waiting.append((values, step))

    def close(self) -> None:
        self._send_waiting()
        self.run.finish()

    def _send_waiting(self) -> None:
        for values, step in self.waiting or ():
            self.run.log(values, step=step)
        self.waiting = None


def flat_texts(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield ("optim.learning_rate", "1e-05") pairs of a JSON tree; lists of scalars are one text."""
    nested = isinstance(tree, list) and any(isinstance(item, dict) for item in tree)
    if isinstance(tree, dict) or nested:
        items = enumerate(tree) if nested else tree.items()
        for key, value in items:
            yield from flat_texts(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree if isinstance(tree, str) else json.dumps(tree, ensure_ascii=False)


def _run_settings(
    config: LogConfig, run_dir: Path, run_id: str, id_variable: str, *, name_variable: str
) -> dict[str, Any]:
    """Return the arguments that wandb.init and swanlab.init share."""
    return {
        "id": run_id or os.environ.get(id_variable) or uuid4().hex[:12],
        "resume": "allow",
        "name": _setting(config.name, name_variable, run_dir.name),
        "group": config.group or None,
        "tags": list(config.tags) or None,
    }


def _setting(value: str, variable: str, default: str) -> str | None:
    """Return a setting; None = the library reads it from the environment variable, which is set."""
    return value or (None if os.environ.get(variable) else default)


def _mlflow_name(key: str) -> str:
    """Return a name of the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", key.replace("@", "_at_"))


def _cells(samples: Sequence[Row]) -> list[list[Any]]:
    return [[row.get(column) for column in SAMPLE_COLUMNS] for row in samples]


def _numbers(row: Row) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "step" and isinstance(value, int | float)}
