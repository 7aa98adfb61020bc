"""Compilation of jitted functions before they are called, several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

MAX_THREADS = 16  # each holds the memory of a compilation


class ParallelCompiler:
    """Compile jitted functions for abstract arguments: JAX traces in the caller's thread, XLA compiles in
    others.

    A later call with arrays of the same shapes, types and shardings compiles nothing. Leaving the context
    waits for all programs, and raises what one of them raised.

        with jax.set_mesh(mesh), ParallelCompiler() as compiler:
            hidden = compiler.start(forward, params, jax.ShapeDtypeStruct((8, 128), jnp.int32))
            compiler.start(backward, params, hidden)
    """

    def __init__(self):
        self._pool = ThreadPoolExecutor(min(max(os.cpu_count() or 1, 2), MAX_THREADS), "compile")
        self._started: dict[Any, tuple[Future, Any]] = {}

    def __enter__(self) -> ParallelCompiler:
        return self

    def __exit__(self, error_type: type | None, *_: Any) -> None:
        self._pool.shutdown(cancel_futures=error_type is not None)
        if error_type is None:
            for compiled, _ in self._started.values():
                compiled.result()

    def start(self, function: Callable, *args: Any, **static: Any) -> Any:
        """Start to compile a program, unless that was done before.

        Args:
            function: made by `jax.jit`.
            args: of one call: arrays, `jax.ShapeDtypeStruct` in their place, or static values.

        Returns:
            Shapes, types and shardings of its results.
        """
        leaves, tree = jax.tree.flatten((args, static))
        key = function, tree, tuple(map(_signature, leaves))
        if key not in self._started:
            lowered = function.lower(*args, **static)
            self._started[key] = self._pool.submit(lowered.compile), lowered.out_info
        return self._started[key][1]


def _signature(x: Any) -> Any:
    """Return what tells the programs of two calls apart."""
    return (x.shape, x.dtype, getattr(x, "sharding", None)) if hasattr(x, "dtype") else x
