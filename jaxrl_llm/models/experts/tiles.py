"""The experts of a layer in plain JAX: an expert computes a whole tile of rows while the tile is in the
cache.

With three grouped products, each would read a tile of rows, mask it, and read the expert's matrix for every
tile; on a CPU this takes as long as the products.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxrl_kernels.grouped_matmul.api import SAVED
from jaxrl_kernels.grouped_matmul.tiled import for_each_group, rows_of_tile
from jaxrl_llm.models.experts.weights import (
    ExpertWeights,
    Gate,
    dense_expert,
    merge_codes,
    product_with,
    without_codes,
)

Projections = tuple[Float[Array, "N F"], ...]
"""Projections of each row that `Gate` reads."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def experts_in_tiles(
    per_token: int,
    gated: Gate,
    tokens: Float[Array, "T D"],
    shares: Float[Array, " M"],
    experts: ExpertWeights,
    order: Int[Array, " M"],
    sizes: Int[Array, " X"],
) -> Float[Array, "T D"]:
    """Return the sum over the assignments of each token of share x output of the expert, float32.

    Args:
        per_token: assignments per token: assignment m belongs to token m // per_token.
        shares: weight of each assignment.
        order: assignments sorted by expert; assignments without an expert are last.
        sizes: assignments of each expert.
    """
    out, _ = _forward(per_token, gated, (tokens, shares, experts, order, sizes), keep=False)
    return _sum_by_token(out, jnp.argsort(order), per_token)


def _experts_forward(per_token, gated, *operands):
    _, _, _, order, _ = operands
    out, projections = _forward(per_token, gated, operands, keep=True)
    projections = tuple(checkpoint_name(x, SAVED) for x in projections)
    return _sum_by_token(out, jnp.argsort(order), per_token), (operands, projections)


def _experts_backward(per_token, gated, residuals, gradient):
    (tokens, shares, experts, order, sizes), projections = residuals
    tile = rows_of_tile(len(order), len(sizes))
    padded = jnp.pad(order, (0, tile))

    def step(group, carry):
        dense = _expert(experts, group.number, tokens)
        real = without_codes(experts, dense)

        def visit(row, inside, carry):
            d_rows, d_shares, sums = carry
            picks = _slice(padded, row, tile)
            share = jnp.where(inside, shares[picks], 0)
            x, d_out = (_rows(of, picks // per_token, inside) for of in (tokens, gradient))
            kept = tuple(_slice(y, row, tile) for y in projections)
            output = lambda kept, share, real: _output(gated, kept, share, merge_codes(real, dense))
            d_kept, d_share, of_output = jax.vjp(output, kept, share, real)[1](d_out)
            project = lambda x, real: _projections(x, merge_codes(real, dense))
            d_x, of_projections = jax.vjp(project, x, real)[1](d_kept)
            sums = jax.tree.map(lambda *parts: sum(parts), sums, of_output, of_projections)
            return _store(d_rows, d_x.astype(jnp.float32), row), _store(d_shares, d_share, row), sums

        d_rows, d_shares, of_experts = carry
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), real)
        d_rows, d_shares, sums = group.for_each_tile(tile, visit, (d_rows, d_shares, zeros))
        write = lambda stack, total: stack.at[group.number].set(total.astype(stack.dtype))
        return d_rows, d_shares, jax.tree.map(write, of_experts, sums)

    # Quantized matrices have no gradient.
    rows, trained = len(padded), without_codes(experts, experts)
    zeros = jnp.zeros((rows, tokens.shape[-1])), jnp.zeros(rows), jax.tree.map(jnp.zeros_like, trained)
    d_rows, d_shares, of_experts = for_each_group(sizes, step, zeros)
    places = jnp.argsort(order)
    d_tokens = _sum_by_token(d_rows, places, per_token).astype(tokens.dtype)
    return d_tokens, d_shares[places].astype(shares.dtype), of_experts, None, None


experts_in_tiles.defvjp(_experts_forward, _experts_backward)


def _forward(
    per_token: int, gated: Gate, operands: tuple, keep: bool
) -> tuple[Float[Array, "N D"], Projections | tuple[()]]:
    """Return the outputs of the sorted rows, N = M + a tile, and the projections if `keep`."""
    tokens, shares, experts, order, sizes = operands
    tile = rows_of_tile(len(order), len(sizes))
    padded = jnp.pad(order, (0, tile))

    def step(group, carry):
        expert = _expert(experts, group.number, tokens)

        def visit(row, inside, carry):
            out, kept = carry
            picks = _slice(padded, row, tile)
            projections = _projections(_rows(tokens, picks // per_token, inside), expert)
            y = _output(gated, projections, jnp.where(inside, shares[picks], 0), expert)
            kept = tuple(_store(stack, x, row) for stack, x in zip(kept, projections, strict=keep))
            return _store(out, y, row), kept

        return group.for_each_tile(tile, visit, carry)

    features = jax.eval_shape(lambda: _projections(tokens, _expert(experts, 0, tokens)))
    kept = tuple(jnp.zeros((len(padded), x.shape[1]), x.dtype) for x in features) if keep else ()
    return for_each_group(sizes, step, (jnp.zeros((len(padded), tokens.shape[-1])), kept))


def _sum_by_token(rows: Float[Array, "N D"], places: Int[Array, " M"], per_token: int) -> Float[Array, "T D"]:
    """Return each token's sum over its assignments, whose rows are at `places`, float32. Gathers once per
    assignment of a token, since `sum` over so short an axis is slow on a CPU.
    """
    places = places.reshape(-1, per_token)
    return sum((rows[places[:, k]] for k in range(1, per_token)), rows[places[:, 0]])


def _expert(experts: ExpertWeights, number: Int[Array, ""] | int, like: Array) -> ExpertWeights:
    """Return one expert, its codes dequantized to the type of `like`."""
    return dense_expert(jax.tree.map(lambda x: x[number], experts), like)


def _rows(x: Float[Array, "T D"], picks: Int[Array, " N"], inside: Bool[Array, " N"]) -> Float[Array, "N D"]:
    return jnp.where(inside[:, None], x[picks], 0)


def _slice(x: Array, row: Int[Array, ""], tile: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, row, tile)


def _store(x: Array, tile: Array, row: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, tile, row, 0)


def _projections(x: Float[Array, "N D"], expert: ExpertWeights) -> Projections:
    return tuple(product_with(x, *projection) for projection in expert.inputs)


def _output(
    gated: Gate, projections: Projections, share: Float[Array, " N"], expert: ExpertWeights
) -> Float[Array, "N D"]:
    """Return share x output, float32. The share multiplies the hidden state: its gradient needs no output."""
    hidden, share = gated(*projections), share[:, None]
    bias = None if expert.down_bias is None else share * expert.down_bias
    return product_with((share * hidden).astype(hidden.dtype), expert.down, bias, jnp.float32)
