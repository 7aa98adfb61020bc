"""Collectives on host values: every process of the run calls them at the same point."""

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
    """Return the maximum of all processes' values. A collective."""
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
        Exception: the exception of `work`, on every process. One that cannot be pickled is a RunError on
            processes other than 0.
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


def print_on_first(message: str) -> None:
    """Print one line to stderr, from process 0."""
    if jax.process_index() == 0:
        print(message, file=sys.stderr, flush=True)


class StderrHandler(logging.Handler):
    """Log handler that prints "warning: ..." to stderr, above a live panel, from process 0."""

    def emit(self, record: logging.LogRecord) -> None:
        print_on_first(f"{record.levelname.lower()}: {record.getMessage()}")


def show_warnings() -> None:
    """Print the warnings of this package as lines of ours, whatever handlers other libraries install."""
    logger = logging.getLogger("jaxrl_llm")
    if not any(isinstance(handler, StderrHandler) for handler in logger.handlers):
        logger.addHandler(StderrHandler())
    logger.propagate = False


def _picklable(error: Exception | None) -> Exception | None:
    """Return the exception, or a RunError in its place if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # any error of the exception's class
        return RunError(f"process 0 failed: {type(error).__name__}: {error}")
    return error
