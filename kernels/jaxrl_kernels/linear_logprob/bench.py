"""Benchmark of `linear_logprob`: python -m jaxrl_kernels.linear_logprob.bench --tokens 16384

Prints one JSON object an implementation. `tflops` counts the model's work, 2 M D V forward and 4 M D V
backward; `tflops_done` also counts the logits that the backward pass recomputes, 8 M D V in all, as
published figures of fused kernels do (Liger's 672 TFLOP/s on an H100 at this size).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_kernels.dispatch import choose
from jaxrl_kernels.linear_logprob.api import linear_logprob


def measure(
    implementation: str, tokens: int, dim: int, vocab: int, dtype: str = "bfloat16", repeat: int = 10
) -> dict[str, Any]:
    """Measure median seconds of the forward pass, and of forward and backward, on the first device.

    Raises:
        ValueError: the implementation does not take these inputs.
    """
    # Random operands, and a loss with gradients of both outputs.
    name, reason = choose("linear_logprob", dim, dtype, implementation=implementation)
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (1, tokens, dim), dtype)
    head = (jax.random.normal(keys[1], (vocab, dim), jnp.float32) / dim**0.5).astype(dtype)
    targets = jax.random.randint(keys[2], (1, tokens), 0, vocab)

    def loss(hidden, head):
        logprob, entropy = linear_logprob(hidden, head, targets, implementation=name)
        return jnp.sum(logprob) + 0.01 * jnp.sum(entropy)

    # Measured times; the backward pass computes the logits again.
    forward = median_seconds(jax.jit(loss), (hidden, head), repeat)
    both = median_seconds(jax.jit(jax.grad(loss, argnums=(0, 1))), (hidden, head), repeat)
    work = 2e-12 * tokens * dim * vocab
    return {
        "op": "linear_logprob",
        "implementation": name,
        "why": reason,
        "tokens": tokens,
        "dim": dim,
        "vocab": vocab,
        "dtype": dtype,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "forward_s": forward,
        "forward_tflops": work / forward,
        "step_s": both,
        "tflops": 3 * work / both,
        "tflops_done": 4 * work / both,
    }


def median_seconds(fn: Callable, args: tuple, repeat: int) -> float:
    """Return the median seconds of fn(*args), compiled before."""
    times = []
    for _ in range(repeat + 1):  # the first compiles
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 16384), ("dim", 4096), ("vocab", 131072), ("repeat", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--implementations", nargs="+", default=["auto", "chunked"])
    given = vars(parser.parse_args(arguments))
    for implementation in given.pop("implementations"):
        print(json.dumps(measure(implementation, **given)), flush=True)


if __name__ == "__main__":
    main()
