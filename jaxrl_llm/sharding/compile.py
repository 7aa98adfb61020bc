"""Compilation of jitted functions before they are called, several at a time, and options of the compiler."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

MAX_THREADS = 16  # each holds the memory of a compilation
TPU7X_OPTIONS = {"xla_tpu_control_large_2nd_minor_layout_for_x16": False}
"""Without it the compiler tiles 16-bit weights by 16 rows within a program and by 8 rows where they enter it,
so that decoding, prefill and scoring begin with a copy of all of them (libtpu 0.0.50; docs/fit.md)."""


def compiler_options(mesh: Mesh) -> dict[str, Any] | None:
    """Return the `compiler_options` of `jax.jit` for programs that run a model on these devices."""
    return TPU7X_OPTIONS if mesh.devices.flat[0].device_kind == "TPU7x" else None


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
