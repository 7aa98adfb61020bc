"""Collectives between the processes of a run, on host values: every process calls them at the same point."""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.errors import RunError

Result = TypeVar("Result")


def agree(value: int) -> int:
    """Return the largest of all processes' values. A collective."""
    if jax.process_count() == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def share(value: Any) -> Any:
    """Return process 0's value, which must be picklable, on every process. A collective."""
    if jax.process_count() == 1:
        return value
    data = np.frombuffer(pickle.dumps(value), np.uint8) if jax.process_index() == 0 else np.zeros(0, np.uint8)
    padded = np.zeros(agree(len(data)), np.uint8)
    padded[: len(data)] = data
    return pickle.loads(multihost_utils.broadcast_one_to_all(padded).tobytes())


def on_first(work: Callable[[], Result]) -> Result:
    """Return `work()`, which runs on process 0 alone, on every process. A collective.

    Raises:
        Exception: what `work` raised, on every process. An exception that cannot be pickled is a RunError
            elsewhere than on process 0.
    """
    if jax.process_count() == 1:
        return work()
    result, error = None, None
    if jax.process_index() == 0:
        try:
            result = work()
        except Exception as raised:
            error = raised
    if jax.process_index() == 0:
        share((result, _picklable(error)))
    else:
        result, error = share(None)
    if error is not None:
        raise error
    return result


def say(message: str) -> None:
    """Print one line to stderr, from process 0."""
    if jax.process_index() == 0:
        print(message, file=sys.stderr, flush=True)


class StderrHandler(logging.Handler):
    """Log handler that prints "warning: ..." to stderr, above a live panel, from process 0."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {record.getMessage()}")


def show_warnings() -> None:
    """Print the warnings of this package as lines of ours, whatever handlers other libraries install."""
    logger = logging.getLogger("jaxrl_llm")
    if not any(isinstance(handler, StderrHandler) for handler in logger.handlers):
        logger.addHandler(StderrHandler())
    logger.propagate = False


def _picklable(error: Exception | None) -> Exception | None:
    """Return the exception as other processes can raise it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does when it is copied
        return RunError(f"process 0 failed: {type(error).__name__}: {error}")
    return error
