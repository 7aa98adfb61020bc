"""Settings of a run's log, and the steps to profile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxrl_llm.ranges import CountOrZero

MAX_STEPS = 100  # of one trace: a step of seconds is tens of megabytes


@dataclass(frozen=True)
class LogConfig:
    """Progress, samples and loggers of a run; metrics.jsonl is always written.

    Keys of services (WANDB_API_KEY, SWANLAB_API_KEY, MLFLOW_TRACKING_TOKEN) are read from the environment
    alone, as are all variables of a logger that no setting here replaces: WANDB_MODE, MLFLOW_TRACKING_URI,
    the id of a run to continue (WANDB_RUN_ID, MLFLOW_RUN_ID, SWANLAB_RUN_ID), the folder of local files
    (WANDB_DIR, SWANLAB_LOG_DIR; the default is the run directory; TRACKIO_DIR, the package's cache) ...
    """

    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """Display of progress; auto = rich on a terminal, a panel in a notebook, else plain lines."""
    samples: CountOrZero = 4
    """Responses of each step written to samples.jsonl, and as tables to the loggers."""
    sample_tokens: CountOrZero = 1024
    """First tokens of such a response that are written with ids, advantage and log-probs; 0 = none."""
    tensorboard: bool = True
    """Write tensorboard events into the run directory."""
    wandb: str = ""
    """Weights & Biases project, or ENTITY/PROJECT; "" = off (needs the extra "wandb")."""
    mlflow: str = ""
    """MLflow experiment; "" = off (needs the extra "mlflow")."""
    swanlab: str = ""
    """SwanLab project, or WORKSPACE/PROJECT; "" = off (needs the extra "swanlab")."""
    trackio: str = ""
    """Trackio project; "" = off (needs the extra "trackio")."""
    prometheus: str = ""
    """HOST:PORT at which the newest metrics are served for Prometheus, such as 127.0.0.1:9464; "" = off."""
    name: str = ""
    """Name of the logger's run; "" = WANDB_NAME or SWANLAB_EXP_NAME, else the name of the run directory."""
    group: str = ""
    """Group of the run; in mlflow the tag "group"."""
    tags: tuple[str, ...] = ()
    """Tags of the run; in mlflow KEY=VALUE, or KEY alone."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, problem)."""
        try:
            split_address(self.prometheus or "localhost:0")
        except ValueError as error:
            yield "prometheus", f"is {self.prometheus!r:.80}: it must be HOST:PORT ({error})."


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [HOST]:PORT. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host:
        raise ValueError("such as 127.0.0.1:9464, without http://")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError("the port is 0 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def profiled_steps(text: str) -> range:
    """Return the steps of "3:5" (3, 4 and 5, as they are numbered in metrics.jsonl) or "3"; "" = none.

    Raises:
        ValueError: the message has the problem, as in "--profile is '5:3': it ...".
    """
    if not text:
        return range(0)
    match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f"is {text!r}: it must be FIRST:LAST, steps from 1 on, both of them included (3:5), or one (3)."
        )
    if last - first >= MAX_STEPS:
        raise ValueError(
            f"is {text!r}: it must be at most {MAX_STEPS} steps; traces of more cannot be opened."
        )
    return range(first, last + 1)
