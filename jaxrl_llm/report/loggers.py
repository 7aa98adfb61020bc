"""Loggers that receive the rows of metrics.jsonl: TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

Row = dict[str, Any]


class Logger(Protocol):
    """A logger of one run, opened with its run directory."""

    def config(self, tree: dict[str, Any]) -> None:
        """Log the resolved config."""

    def step(self, step: int, row: Row) -> None:
        """Log the numbers of a step's row."""

    def close(self) -> None:
        """Flush, and end the logger's run."""


class Tensorboard:
    """Event files in run_dir/tensorboard; events after the restored step are hidden on resume."""

    def __init__(self, run_dir: Path, resume_step: int):
        from tensorboardX import SummaryWriter

        folder = str(run_dir / "tensorboard")
        self.writer = SummaryWriter(folder, purge_step=resume_step + 1, flush_secs=30)

    def config(self, tree: dict[str, Any]) -> None:
        """Do nothing: config.json is in the run directory."""

    def step(self, step: int, row: Row) -> None:
        for key, value in _numbers(row).items():
            self.writer.add_scalar(key, value, step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A Weights & Biases run; its id is a hash of the run directory, so that a resumed run continues it."""

    def __init__(self, run_dir: Path, project: str):
        import wandb

        run_id = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12]
        self.run = wandb.init(project=project, name=run_dir.name, dir=str(run_dir), id=run_id, resume="allow")

    def config(self, tree: dict[str, Any]) -> None:
        self.run.config.update(tree, allow_val_change=True)

    def step(self, step: int, row: Row) -> None:
        self.run.log(_numbers(row), step=step)

    def close(self) -> None:
        self.run.finish()


class Mlflow:
    """An MLflow run on the tracking server that MLflow's environment variables name."""

    def __init__(self, run_dir: Path, experiment: str):
        import mlflow

        self.mlflow = mlflow
        mlflow.set_experiment(experiment)
        mlflow.start_run(run_name=run_dir.name)

    def config(self, tree: dict[str, Any]) -> None:
        self.mlflow.log_dict(tree, "config.json")

    def step(self, step: int, row: Row) -> None:
        self.mlflow.log_metrics({key.replace("@", "_at_"): v for key, v in _numbers(row).items()}, step=step)

    def close(self) -> None:
        self.mlflow.end_run()


def _numbers(row: Row) -> dict[str, float]:
    return {key: value for key, value in row.items() if key != "step" and isinstance(value, int | float)}
