"""Benchmark of `grouped_matmul`: python -m jaxrl_kernels.grouped_matmul.bench --rows 131072

Prints one JSON object for each implementation and distribution of the rows over the groups, at the shape of
Qwen3-30B-A3B's up projection. FLOPs are 2 M K N forward, and 4 M K N for both gradients. The peer tokamax is
measured if it is installed (`pip install tokamax`).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_kernels.dispatch import choose, device
from jaxrl_kernels.grouped_matmul.api import grouped_matmul
from jaxrl_kernels.linear_logprob.bench import median_seconds

PEER = "tokamax"


def group_sizes(rows: int, groups: int, skew: float) -> np.ndarray:
    """Return the rows of each group, int32 with sum `rows`: group i has a share of 1 / (i + 1)^skew."""
    shares = 1.0 / np.arange(1, groups + 1) ** skew
    ends = np.rint(rows * np.cumsum(shares) / shares.sum()).astype(np.int32)
    return np.diff(ends, prepend=np.int32(0))


def implementations() -> list[str]:
    """Return our choice for this device, one in plain JAX, and the peer if it is installed."""
    # On GPUs, XLA's ragged_dot multiplies each row by every matrix: 64 GiB at the default size.
    plain = "tiled" if device()[0] == "gpu" else "ragged_dot"
    own = dict.fromkeys((choose("grouped_matmul", "bfloat16")[0], plain))
    return [*own, *([PEER] if importlib.util.find_spec(PEER) else [])]


def measure_product(
    implementation: str,
    rows: int,
    groups: int,
    depth: int,
    columns: int,
    skew: float = 0.0,
    dtype: str = "bfloat16",
    repeat: int = 10,
) -> dict[str, Any]:
    """Measure TFLOP/s of the forward pass, and of both gradients, on the first device.

    Args:
        implementation: of `dispatch.OPERATIONS`, or PEER.
        skew: 0 = groups of one size, 1 = Zipf's law.
    """
    # Random operands; only the sizes of the groups depend on the skew.
    keys = jax.random.split(jax.random.key(0), 3)
    lhs = jax.random.normal(keys[0], (rows, depth), dtype)
    rhs = (jax.random.normal(keys[1], (groups, depth, columns)) / depth**0.5).astype(dtype)
    d_out = jax.random.normal(keys[2], (rows, columns), dtype)
    sizes, product = jnp.asarray(group_sizes(rows, groups, skew)), _product(implementation)

    def gradients(lhs, rhs, sizes, d_out):
        return jax.vjp(lambda lhs, rhs: product(lhs, rhs, sizes), lhs, rhs)[1](d_out)

    # Measured times; both gradients are two products.
    forward = median_seconds(jax.jit(product), (lhs, rhs, sizes), repeat)
    backward = median_seconds(jax.jit(gradients), (lhs, rhs, sizes, d_out), repeat)
    work = 2e-12 * rows * depth * columns
    return {
        "op": "grouped_matmul",
        "implementation": implementation,
        "rows": rows,
        "groups": groups,
        "depth": depth,
        "columns": columns,
        "skew": skew,
        "dtype": dtype,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "forward_s": forward,
        "forward_tflops": work / forward,
        "gradients_s": backward,
        "gradients_tflops": 2 * work / backward,
    }


def _product(implementation: str) -> Callable:
    if implementation != PEER:
        return lambda *args: grouped_matmul(*args, implementation=implementation)
    peer = importlib.import_module(PEER)  # imported only if it is measured
    return lambda lhs, rhs, sizes: peer.ragged_dot(lhs, rhs, group_sizes=sizes)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"rows": 131_072, "groups": 128, "depth": 2048, "columns": 768, "repeat": 10}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--skew", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--implementations", nargs="+", default=implementations())
    given = vars(parser.parse_args(arguments))
    names, skews = given.pop("implementations"), given.pop("skew")
    for name in names:
        for skew in skews:
            print(json.dumps(measure_product(name, skew=skew, **given)), flush=True)


if __name__ == "__main__":
    main()
