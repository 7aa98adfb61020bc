"""Compilation of jitted functions before they are called, several at a time, and options of the compiler."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from jaxrl_kernels.chips import TPU_KINDS

MAX_THREADS = 16  # each holds the memory of a compilation
LAYOUT = {"tpu7x": {"xla_tpu_control_large_2nd_minor_layout_for_x16": False}}
"""TPU generation -> options. Without this option the compiler tiles 16-bit weights by 16 rows within a
program and by 8 rows as arguments, so that decoding, prefill and scoring begin with a copy of all weights
(libtpu 0.0.50; docs/fit.md)."""
GATHER = {
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000,
    "xla_tpu_assign_all_reduce_scatter_layout": True,
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": 1,
    "xla_tpu_use_minor_sharding_for_major_trivial_input": True,
}
"""Gather weights before their product, and reduce-scatter gradients. By default, if a weight has 8 or more
shards, they are multiplied one by one, and their sum is read and written each time (docs/fit.md)."""
SPARSECORE = {
    "xla_sc_disable_megacore_partitioning": True,
    "xla_sc_enable_instruction_fusion": False,
    "xla_tpu_enable_all_gather_offload_tracing": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": False,
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": False,
    "xla_tpu_enable_reduce_scatter_offload_tracing": True,
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_use_tc_device_shape_on_sc": True,
}
"""The SparseCores gather and reduce while the TensorCore computes, in a torus of any dims: the options of
MaxText's recipes for these generations."""
HAVE_SPARSECORES = ("v5p", "v6e", "tpu7x")
GATHER_ON_GPU = {"xla_gpu_experimental_collective_cse_distance_threshold": 1_000_000}
"""Gather a tied table once for the lookup and the head: XLA merges equal collectives that are at most so many
instructions apart."""
FLAGS_IN_ENVIRONMENT = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")

log = logging.getLogger(__name__)


def compiler_options(mesh: Mesh, gathers_weights: bool = False) -> dict[str, Any] | None:
    """Return the `compiler_options` of `jax.jit` for programs that run a model on these devices.

    Options that the environment's flags set are left out, and so are, with a warning, options that this
    version of the compiler lacks.

    Args:
        gathers_weights: the program gathers sharded weights layer by layer, as training and scoring do.
    """
    device = mesh.devices.flat[0]
    generation = TPU_KINDS.get(device.device_kind)
    options = dict(LAYOUT.get(generation, {}))
    if gathers_weights and mesh.size > 1:
        options |= GATHER_ON_GPU if device.platform in ("gpu", "cuda") else {}
        options |= GATHER if generation else {}
        options |= SPARSECORE if generation in HAVE_SPARSECORES else {}
    flags = " ".join(os.environ.get(name, "") for name in FLAGS_IN_ENVIRONMENT)
    options = {name: value for name, value in options.items() if f"--{name}=" not in flags}
    here = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return known_options(here[0] if here else device, tuple(options.items())) or None


@functools.cache
def known_options(device: jax.Device, options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Return the options that this version of the device's compiler knows."""
    place = SingleDeviceSharding(device)
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=place)

    def has(some: dict[str, Any]) -> bool:
        try:
            jax.jit(lambda x: x, out_shardings=place, compiler_options=some).lower(scalar).compile()
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
            return False
        return True

    if not options or has(dict(options)):
        return dict(options)
    known = {name: value for name, value in options if has({name: value})}
    missing = ", ".join(name for name, _ in options if name not in known)
    log.warning("This compiler has no option %s: steps may be slower (docs/fit.md).", missing)
    return known


class ParallelCompiler:
    """Compile jitted functions for abstract arguments: JAX traces in the caller's thread, XLA compiles in
    others.

    A later call with arrays of the same shapes, types and shardings compiles nothing. Leaving the context
    waits for all programs, and raises the error of a failed one.

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
        """Start to compile a program, unless it was started before.

        Args:
            function: made by `jax.jit`.
            args: arguments of one call: arrays or `jax.ShapeDtypeStruct`, or static values.

        Returns:
            Shapes, types and shardings of the results.
        """
        leaves, tree = jax.tree.flatten((args, static))
        key = function, tree, tuple(map(_signature, leaves))
        if key not in self._started:
            lowered = function.lower(*args, **static)
            self._started[key] = self._pool.submit(lowered.compile), lowered.out_info
        return self._started[key][1]


def _signature(x: Any) -> Any:
    """Return the key of an argument that selects the compiled program."""
    return (x.shape, x.dtype, getattr(x, "sharding", None)) if hasattr(x, "dtype") else x


def bucket(length: int, smallest: int) -> int:
    """Return the smallest of smallest * (1, 1.5, 2, 3, 4, 6, 8, ...) that is >= length.

    Each size is compiled once. For lengths without a known maximum.
    """
    size = smallest
    while size < length:
        size = size * 3 // 2 if (size // smallest).bit_count() == 1 and size * 3 // 2 >= length else size * 2
    return size


class Program(NamedTuple):
    """A jitted function with abstract arguments, to be compiled without being run."""

    fn: Any
    args: tuple
    static: dict[str, Any]
