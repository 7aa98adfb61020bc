"""The folder of a run's checkpoints, as one process sees it.

<step>/           complete: every file is listed with its checksum in manifest.json
<step>.tmp*       being written or deleted, or left by a process that was killed
<step>.rejected   damaged; kept for people to look at until the step is saved again
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from jaxrl_llm.checkpoint.manifest import checkpoint_problem, read_metrics
from jaxrl_llm.errors import UserError
from jaxrl_llm.host.processes import print_on_first

TOO_LARGE = "File too large"
"""Text of errors about a file that reached the limit on its size (`ulimit -f`, or of the file system)."""


class CheckpointChoice(NamedTuple):
    """The newest valid checkpoint, if any, and the newer ones that are damaged."""

    step: int | None
    rejected: list[int]


def temporary(folder: Path, step: int) -> Path:
    """Return the folder of a checkpoint while it is being written."""
    return folder / f"{step}.tmp"


def steps(folder: Path) -> list[int]:
    """Return the steps that have a complete checkpoint, oldest first."""
    return sorted(int(p.name) for p in folder.glob("*") if p.name.isdigit() and p.is_dir())


def newest_valid(folder: Path, candidates: list[int], checksums: bool) -> CheckpointChoice:
    """Return the newest valid candidate; each damaged one before it is reported with its fault."""
    rejected = []
    for step in sorted(candidates, reverse=True):
        reason = checkpoint_problem(folder / str(step), checksums)
        if reason is None:
            if rejected:
                print_on_first(f"checkpoint: going back to step {step}")
            return CheckpointChoice(step, rejected)
        rejected.append(step)
        print_on_first(f"checkpoint: step {step} cannot be used: {folder / str(step)}: {reason}")
    return CheckpointChoice(None, rejected)


def commit(folder: Path, step: int) -> None:
    """Rename a finished checkpoint into place."""
    os.replace(temporary(folder, step), folder / str(step))
    shutil.rmtree(_rejected(folder, step), ignore_errors=True)


def set_aside(folder: Path, step: int) -> None:
    """Rename a damaged checkpoint, out of the way of a new one of the same step."""
    shutil.rmtree(_rejected(folder, step), ignore_errors=True)
    os.replace(folder / str(step), _rejected(folder, step))


def prune(folder: Path, keep: set[int]) -> None:
    """Delete all checkpoints but these."""
    for step in set(steps(folder)) - keep:
        # Renamed first: a deletion that is cut off leaves something to sweep, not half a checkpoint.
        os.replace(folder / str(step), temporary(folder, step))
        shutil.rmtree(temporary(folder, step), ignore_errors=True)  # NFS keeps files that are being read


def remove_temporary(folder: Path) -> list[str]:
    """Delete temporary folders and return their names."""
    left = sorted(folder.glob("[0-9]*.tmp*"))
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in left]


def rank_steps(folder: Path, metric: str, mode: str) -> list[int]:
    """Return the steps whose checkpoint has a finite `metric`, best first; of equals, the newest first."""
    sign = 1 if mode == "max" else -1
    recorded = {step: read_metrics(folder / str(step)).get(metric, math.nan) for step in steps(folder)}
    scores = {step: sign * value for step, value in recorded.items() if math.isfinite(value)}
    return sorted(scores, key=lambda step: (scores[step], step), reverse=True)


def make_writable(folder: Path) -> None:
    """Make the folder.

    Raises:
        UserError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"checkpoints cannot be written to {folder}: {error.strerror}. "
            "Set --run_dir to a folder that you may write to."
        ) from error


def free_bytes(folder: Path) -> int:
    """Return the space left on the disk that holds the folder, which is made if it has disappeared."""
    make_writable(folder)
    return shutil.disk_usage(folder).free


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error of ours, Orbax or tensorstore means that the disk or the quota is full, or that
    a file reached the limit on its size."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return True
    signs = ("RESOURCE_EXHAUSTED", "No space left", "Disk quota", TOO_LARGE)
    return any(sign in str(error) for sign in signs)


def _rejected(folder: Path, step: int) -> Path:
    return folder / f"{step}.rejected"
