"""Benchmark of attention, ours and JAX's own: python -m jaxrl_kernels.flash_attention.bench"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxrl_kernels.flash_attention import api


class Shape(NamedTuple):
    """Rows of attention: causal, `packed` sequences of equal length in each."""

    batch: int = 4
    length: int = 4096
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    packed: int = 1

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def flops(self) -> float:
        """FLOPs of the two products of the forward pass over visible pairs; the backward pass has five."""
        sequence = self.length / self.packed
        return 4 * self.batch * self.heads * self.head_dim * self.packed * sequence * (sequence + 1) / 2

    def segments(self) -> Int[Array, "B T"]:
        one = 1 + np.arange(self.length) * self.packed // self.length
        return jnp.broadcast_to(jnp.asarray(one, jnp.int32), (self.batch, self.length))


class Measurement(NamedTuple):
    """Seconds a call of the forward pass, and of both passes."""

    name: str
    forward: float
    both: float

    def rates(self, shape: Shape) -> tuple[float, float]:
        """Return TFLOP/s over visible pairs of forward and backward pass, the latter by difference."""
        return shape.flops / self.forward / 1e12, 2.5 * shape.flops / (self.both - self.forward) / 1e12


def ours(name: str, shape: Shape) -> Callable:
    """Return an implementation of `flash_attention`."""
    segments = shape.segments()
    return lambda q, k, v: api.flash_attention(q, k, v, segments, scale=shape.scale, implementation=name)


def xla(shape: Shape) -> Callable:
    """Return jax.nn's attention as XLA compiles it: dense."""
    segments = shape.segments()
    mask = (segments[:, None, :, None] == segments[:, None, None]) if shape.packed > 1 else None
    return lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=shape.scale, is_causal=True, implementation="xla"
    )


def splash(shape: Shape) -> Callable:
    """Return jax's own TPU kernels."""
    from jax.experimental.pallas.ops.tpu import splash_attention as theirs

    block = min(512, shape.length)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    sizes = theirs.BlockSizes(**dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), block))
    mask = theirs.MultiHeadMask([theirs.CausalMask((shape.length, shape.length))] * shape.heads)
    kernel = theirs.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)
    segments = shape.segments()

    def attend(q, k, v):
        q, k, v = (jnp.moveaxis(x, 1, 2) for x in (q * shape.scale, k, v))
        out = jax.vmap(kernel)(q, k, v, theirs.SegmentIds(segments, segments))
        return jnp.moveaxis(out, 1, 2)

    return attend


def triton(shape: Shape) -> Callable:
    """Return jax's own Triton kernels, with key heads repeated."""
    from jax.experimental.pallas.ops.gpu.attention import mha

    segments, group = shape.segments(), shape.heads // shape.kv_heads

    def attend(q, k, v):
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        return mha(q, k, v, segments, shape.scale, True)

    return attend


OTHERS = {"xla": xla, "splash": splash, "triton": triton}
"""Implementations that are not ours, by name."""
OF_PLATFORM = {
    "tpu": ("pallas_tpu", "splash", "xla"),
    "gpu": ("pallas_gpu", "cudnn"),
    "cpu": ("blockwise", "reference", "xla"),
}


def compare(shape: Shape, names: tuple[str, ...], seconds: float = 1.0) -> Iterator[Measurement | str]:
    """Yield a `Measurement` of each implementation, or a line with the error."""
    counts = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    keys = jax.random.split(jax.random.key(0), 4)
    *inputs, d_out = (
        jax.random.normal(key, (shape.batch, shape.length, n, shape.head_dim), shape.dtype)
        for key, n in zip(keys, counts, strict=True)
    )
    for name in names:
        try:
            attend = OTHERS[name](shape) if name in OTHERS else ours(name, shape)
            pull = lambda q, k, v, attend=attend: jax.vjp(attend, q, k, v)[1](d_out)
            yield Measurement(name, *(seconds_a_call(jax.jit(f), inputs, seconds) for f in (attend, pull)))
        except Exception as problem:  # JAX's kernels may not take this device or shape
            yield f"{name}: {type(problem).__name__}: {str(problem).splitlines()[0][:100]}"


def seconds_a_call(function: Callable, inputs: list[Array], seconds: float) -> float:
    """Return the median of five batches of calls, each dispatched as one, about `seconds` in all."""
    jax.block_until_ready(function(*inputs))

    def batch(calls: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready([function(*inputs) for _ in range(calls)][-1])
        return (time.perf_counter() - start) / calls

    calls = max(1, round(seconds / 5 / batch(1)))
    return float(np.median([batch(calls) for _ in range(5)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in Shape()._asdict().items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--names", nargs="+", help="implementations; default: all of the platform")
    parser.add_argument("--seconds", type=float, default=1.0, help="spent on each measurement")
    options = vars(parser.parse_args())
    names, seconds = options.pop("names"), options.pop("seconds")
    shape, device = Shape(**options), jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {shape}")
    print(f"{'':12}{'forward ms':>12}{'TFLOP/s':>10}{'both ms':>12}{'backward TFLOP/s':>18}")
    for row in compare(shape, tuple(names or OF_PLATFORM[device.platform]), seconds):
        if isinstance(row, str):
            print(row)
            continue
        forward, backward = row.rates(shape)
        print(f"{row.name:12}{1e3 * row.forward:12.3f}{forward:10.1f}{1e3 * row.both:12.3f}{backward:18.1f}")


if __name__ == "__main__":
    main()
