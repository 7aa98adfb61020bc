"""Benchmark of `decode_attention`: python -m jaxrl_kernels.decode_attention.bench --slots 256

Prints one JSON object an implementation, page and number of splits: keys and values read, in bytes a second.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_kernels.decode_attention.api import decode_attention
from jaxrl_kernels.dispatch import choose
from jaxrl_kernels.linear_logprob.bench import median_seconds

LAYERS = 8
"""Calls per measurement, each over separate pages, so that no cache holds them."""


def measure_decoding(
    slots: int = 256,
    context: int = 576,
    heads: int = 16,
    kv_heads: int = 8,
    dim: int = 128,
    page: int = 128,
    dtype: str = "bfloat16",
    implementation: str = "auto",
    splits: int | None = None,
    repeat: int = 10,
) -> dict[str, Any]:
    """Measure attention of one token of each slot, on the first device.

    Args:
        context: tokens of the median slot; they vary by a tenth.
    """
    # Contexts vary by a tenth, and pages are in random order, as after many requests.
    rng, row = np.random.default_rng(0), -(-context * 11 // 10 // page)
    lengths = rng.integers(context * 9 // 10, context * 11 // 10 + 1, slots).astype(np.int32)
    count = slots * row
    pages = functools.partial(jax.random.normal, shape=(LAYERS * count, kv_heads, page, dim), dtype=dtype)
    k, v = (jax.jit(pages)(key) for key in jax.random.split(jax.random.key(0)))
    table = jnp.asarray(rng.permutation(count).reshape(slots, row), jnp.int32)
    q = jax.random.normal(jax.random.key(1), (slots, heads, dim), dtype)

    attend = functools.partial(
        decode_attention, scale=dim**-0.5, implementation=implementation, splits=splits
    )

    def layers(q, k, v, table, lengths):
        def layer(q, i):
            return attend(q, k, v, table + i * count, lengths), None

        return jax.lax.scan(layer, q, jnp.arange(LAYERS))[0]

    # Only the pages in use count as bytes read.
    seconds = median_seconds(jax.jit(layers), (q, k, v, table, lengths), repeat) / LAYERS
    moved = 2 * kv_heads * dim * k.dtype.itemsize * int(lengths.sum())
    return {
        "op": "decode_attention",
        "implementation": choose("decode_attention", q, k, table, implementation=implementation)[0],
        "slots": slots,
        "context": context,
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": dim,
        "page": page,
        "splits": splits,
        "dtype": dtype,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "seconds": seconds,
        "gigabytes_per_second": moved / seconds / 1e9,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"slots": 256, "context": 576, "heads": 16, "kv_heads": 8, "dim": 128, "repeat": 10}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--page", type=int, nargs="+", default=[128])
    parser.add_argument("--splits", type=int, nargs="+", default=[None])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--implementation", default="auto")
    given = vars(parser.parse_args(arguments))
    pages, splits = given.pop("page"), given.pop("splits")
    for page in pages:
        for split in splits:
            print(json.dumps(measure_decoding(page=page, splits=split, **given)), flush=True)


if __name__ == "__main__":
    main()
