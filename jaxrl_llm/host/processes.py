"""Collectives between the processes of a run, on host values."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def agree(value: int) -> int:
    """The largest of all processes' values. A collective: every process calls it at the same point."""
    if jax.process_count() == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def share(value: Any) -> Any:
    """Process 0's value on every process. A collective, as `agree`; the value must be picklable."""
    if jax.process_count() == 1:
        return value
    data = np.frombuffer(pickle.dumps(value), np.uint8) if jax.process_index() == 0 else np.zeros(0, np.uint8)
    room = np.zeros(agree(len(data)), np.uint8)
    room[: len(data)] = data
    return pickle.loads(multihost_utils.broadcast_one_to_all(room).tobytes())
