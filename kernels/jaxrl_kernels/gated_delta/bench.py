"""Benchmark of `gated_delta`: python -m jaxrl_kernels.gated_delta.bench --length 4096

Prints one JSON object an implementation: seconds of the forward pass and of both passes, at the heads of
Qwen3-Next. The peer flash-linear-attention is measured on a GPU if it is installed, with torch and triton
(`pip install fla-core==0.6.0`); JAX must then leave torch memory (XLA_PYTHON_CLIENT_MEM_FRACTION=0.5).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_kernels.dispatch import choose, device
from jaxrl_kernels.gated_delta.api import gated_delta
from jaxrl_kernels.linear_logprob.bench import median_seconds

PEER, PEER_PACKAGE = "flash-linear-attention", "fla-core"


class DeltaShape(NamedTuple):
    """Rows of one sequence each."""

    batch: int = 4
    length: int = 4096
    key_heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"

    def implementation(self, name: str) -> str:
        """Return the implementation that "auto" or another name means on the first device."""
        return choose(
            "gated_delta",
            self.key_dim,
            self.value_dim,
            self.value_heads // self.key_heads,
            self.dtype,
            True,
            implementation=name,
        )[0]

    def inputs(self) -> dict[str, np.ndarray]:
        """Return random q (normalised, scaled), k (normalised), v, g, beta and the gradient of the output."""
        rng, tokens = np.random.default_rng(0), (self.batch, self.length)
        normal = lambda *dims: rng.standard_normal((*tokens, *dims), np.float32)
        unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
        q, k = (unit(normal(self.key_heads, self.key_dim)) for _ in range(2))
        v, d_out = (normal(self.value_heads, self.value_dim) for _ in range(2))
        g, beta = -np.log1p(np.exp(normal(self.value_heads))), 1 / (1 + np.exp(-normal(self.value_heads)))
        return {"q": q * self.key_dim**-0.5, "k": k, "v": v, "g": g, "beta": beta, "d_out": d_out}


def our_passes(shape: DeltaShape, implementation: str = "auto") -> tuple[Callable, Callable]:
    """Return the jitted forward pass, and both passes, of (q, k, v, g, beta, d_out)."""
    segments = jnp.ones((shape.batch, shape.length), jnp.int32)
    attend = lambda *tokens: gated_delta(*tokens, segments=segments, implementation=implementation)[0]
    both = lambda *args: jax.vjp(attend, *args[:-1])[1](args[-1])
    return jax.jit(lambda *args: attend(*args[:-1])), jax.jit(both)


def measure_ours(shape: DeltaShape, repeat: int = 10, implementation: str = "auto") -> dict[str, Any]:
    """Measure our implementation on the first device."""
    name = shape.implementation(implementation)
    dtype = lambda name: "float32" if name == "g" else shape.dtype
    args = tuple(jnp.asarray(x, dtype(name)) for name, x in shape.inputs().items())
    forward, both = (median_seconds(function, args, repeat) for function in our_passes(shape, name))
    return {
        "op": "gated_delta",
        "implementation": "ours",
        "kernel": name,
        **shape._asdict(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "forward_s": forward,
        "both_s": both,
    }


def peer_problem() -> str:
    """Return why the peer cannot be measured; "" = it can."""
    missing = [name for name in ("torch", "triton", "fla") if not importlib.util.find_spec(name)]
    if missing:
        return f"not compared: {', '.join(missing)} not installed"
    return "" if device()[0] == "gpu" else "not compared: it needs a GPU"


def measure_peer(shape: DeltaShape, repeat: int = 10) -> dict[str, Any]:
    """Measure flash-linear-attention at the same inputs, on torch's first GPU."""
    torch = importlib.import_module("torch")  # imported only if it is measured
    chunk_gated_delta_rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    dtype = lambda name: torch.float32 if name == "g" else getattr(torch, shape.dtype)
    args = {name: torch.tensor(x, dtype=dtype(name), device="cuda") for name, x in shape.inputs().items()}
    d_out = args.pop("d_out")

    # The two functions, and their seconds: torch runs them asynchronously.
    def forward():
        with torch.no_grad():
            return chunk_gated_delta_rule(**args, scale=1.0)

    def both():
        out = chunk_gated_delta_rule(**{name: x.requires_grad_() for name, x in args.items()}, scale=1.0)[0]
        return torch.autograd.grad(out, list(args.values()), d_out)

    def seconds(function: Callable) -> float:
        times = []
        for _ in range(repeat + 3):  # the first ones compile and tune
            torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[3:])

    return {
        "op": "gated_delta",
        "implementation": f"{PEER} {importlib.metadata.version(PEER_PACKAGE)}",
        **shape._asdict(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "forward_s": seconds(forward),
        "both_s": seconds(both),
    }


def compare_delta(
    shape: DeltaShape, repeat: int = 10, implementation: str = "auto"
) -> Iterator[dict[str, Any] | str]:
    """Yield our measurement, then the peer's or why it was not made."""
    yield measure_ours(shape, repeat, implementation)
    yield peer_problem() or measure_peer(shape, repeat)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in DeltaShape()._asdict().items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--repeat", type=int, default=10)
    given = vars(parser.parse_args(arguments))
    repeat = given.pop("repeat")
    for row in compare_delta(DeltaShape(**given), repeat):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
