"""Collectives on host values: every process of the run calls them at the same point."""

from __future__ import annotations

import logging
import pickle
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax._src import distributed  # the coordinator's key-value store has no public name

from jaxrl_llm.addresses import mask_text
from jaxrl_llm.errors import RunError
from jaxrl_llm.host.command import own_flags

Result = TypeVar("Result")
POLL_MILLISECONDS = 1000
_calls: dict[str, int] = defaultdict(int)  # by name of the thread


def agree(value: int) -> int:
    """Return the maximum of all processes' values. A collective."""
    if jax.process_count() == 1:
        return value
    return int(_combine(str(value).encode(), lambda values: max(values, key=int)))


def share(value: Any) -> Any:
    """Return process 0's value, which must be picklable, on every process. A collective."""
    if jax.process_count() == 1:
        return value
    own = pickle.dumps(value) if jax.process_index() == 0 else b"-"
    return pickle.loads(_combine(own, lambda values: values[0]))


def _combine(own: bytes, combine: Callable[[list[bytes]], bytes]) -> bytes:
    """Return `combine` of the values of all processes, in order; process 0 calls it.

    The values pass through the coordinator's key-value store instead of the devices: if threads started
    programs on the same devices in a different order in each process, they would wait forever. Threads with
    the same name form a group.
    """
    client, index = distributed.global_state.client, jax.process_index()
    thread = threading.current_thread().name
    number = _calls[thread] = _calls[thread] + 1
    call = f"jaxrl_llm/processes/{thread}/{number}"
    if index:
        client.key_value_set_bytes(f"{call}/{index}", own)
        return _wait_for(f"{call}/result")
    values = [own, *(_wait_for(f"{call}/{i}") for i in range(1, jax.process_count()))]
    if number > 1:  # all have called again, so they have read the last result
        client.key_value_delete(f"jaxrl_llm/processes/{thread}/{number - 1}/")
    result = combine(values)
    client.key_value_set_bytes(f"{call}/result", result)
    return result


def _wait_for(key: str) -> bytes:
    """Return a value of the key-value store once it is there; signals are handled meanwhile."""
    while True:
        try:
            return distributed.global_state.client.blocking_key_value_get_bytes(key, POLL_MILLISECONDS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


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
        print_on_first(f"{record.levelname.lower()}: {own_flags(mask_text(record.getMessage()))}")


def show_warnings() -> None:
    """Print the warnings of this package as lines of ours, whatever handlers other libraries install."""
    logger = logging.getLogger("jaxrl_llm")
    if not any(isinstance(handler, StderrHandler) for handler in logger.handlers):
        logger.addHandler(StderrHandler())
    logger.propagate = False


def _picklable(error: Exception | None) -> Exception | None:
    """Return the exception, or a RunError instead if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # the exception's class may raise anything
        return RunError(f"process 0 failed: {type(error).__name__}: {error}")
    return error
