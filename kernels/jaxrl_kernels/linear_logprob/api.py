"""Log-probs and entropy of a linear head over the vocabulary; [B, T, V] is never in memory."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Num

from jaxrl_kernels.dispatch import choose, device, load_implementation
from jaxrl_kernels.linear_logprob import chunked
from jaxrl_kernels.linear_logprob.reference import LogprobSpec, merge_shards

SKIPPED_LSE = 1e30
"""The log-sum-exp of a token outside the mask: exp(logit - lse) is 0."""
CPU_CHUNK, MAX_CHUNK = 128, 512
"""Maximum tokens whose logits are in memory at once on one device, on a CPU and elsewhere: enough to fill
its matrix units. Logits of more do not fit a CPU's cache, and more of the last chunk is outside the mask."""

SCATTERED_ROWS = 1024
"""On a TPU the rows of the head's gradient are padded to a multiple of this. If their number has a large
prime factor (Qwen: 151,936 = 128 x 1,187), the compiler uses all-reduce, which sends twice as much."""


@functools.partial(
    jax.jit,
    static_argnames=("temperature", "softcap", "chunk", "with_entropy", "partition_specs", "implementation"),
)
def linear_logprob(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    mask: Num[Array, "B T"] | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int = 128,
    with_entropy: bool = True,
    partition_specs: tuple[PartitionSpec, PartitionSpec] | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "B T"], Float[Array, "B T"] | None]:
    """Compute log softmax(hidden head^T / temperature) at the targets, and its entropy, in chunks of tokens.

    The backward pass recomputes logits from the saved log-sum-exp: 8 B T D V FLOPs in all. Only tokens in the
    mask cost work: each device moves its own to the front and skips the rest.

    Args:
        targets: 0..V-1; any other has log-prob 0.
        mask: tokens above 0 are computed; other results and their gradients are 0. None = all.
        softcap: c first turns the logits into c * tanh(logit / c).
        chunk: tokens of a row whose logits are in memory at once ("chunked"; the kernels keep logits on the
            chip in the forward pass, and in the backward pass as many as take half of the head's float32
            gradient).
        partition_specs: of hidden and head over the mesh of `jax.set_mesh`: each device then computes its own
            tokens and vocabulary shard; a few numbers a token, d_hidden and d_head are summed over devices. D
            of the head is gathered. None = one device.
        implementation: "auto" or one of `dispatch.OPERATIONS`.

    Returns: (log-prob, entropy), float32, nats; entropy is None without `with_entropy`.

    Raises:
        ValueError: the implementation does not support these inputs, or the temperature is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be more than 0, got {temperature}")
    name, _ = choose("linear_logprob", hidden.shape[-1], hidden.dtype, implementation=implementation)
    specs = None
    if partition_specs is not None:  # a PartitionSpec may be shorter than its array's shape
        specs = _Specs(*(PartitionSpec(*spec, *(None,) * (3 - len(spec))) for spec in partition_specs))
        head = jax.lax.with_sharding_constraint(head, partition_specs[1])  # casts stay before the gather
    static = _Static(LogprobSpec(temperature, softcap, with_entropy), name, chunk, specs)
    logprob, entropy = _logprob(static, hidden, head, targets, mask)
    masked = lambda x: x if mask is None else jnp.where(mask > 0, x, 0.0)
    return masked(logprob), masked(entropy) if with_entropy else None


class _Specs(NamedTuple):
    """Sharding of hidden states and head."""

    hidden: PartitionSpec
    head: PartitionSpec

    @property
    def tokens(self) -> PartitionSpec:
        return PartitionSpec(*self.hidden[:2])

    @property
    def vocab(self) -> str | tuple[str, ...] | None:
        """Mesh axes of the vocabulary shards."""
        return self.head[0]

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Mesh axes of the tokens."""
        return _names(*self.tokens)

    @property
    def scattered(self) -> tuple[str, ...]:
        """Mesh axes of both the tokens and the head's D: its gradient is reduce-scattered over them."""
        embed = _names(self.head[1])
        return embed if set(embed) <= set(self.token_axes) else ()


def _names(*entries) -> tuple[str, ...]:
    each = [(entry,) if isinstance(entry, str) else entry for entry in entries if entry]
    return tuple(name for names in each for name in names)


class _Static(NamedTuple):
    """Static arguments of `_logprob`."""

    spec: LogprobSpec
    implementation: str
    chunk: int
    specs: _Specs | None

    def shard_map(self, fn, inputs: str, outputs: str):
        """Map fn over shards: t = of arrays [B, T, ...], w = of the head, g = of its gradient."""
        if self.specs is None:
            return fn
        kinds = {
            "t": self.specs.tokens,
            "w": PartitionSpec(self.specs.vocab),
            "g": PartitionSpec(self.specs.vocab, self.specs.scattered or None),
        }
        specs = [tuple(kinds[kind] for kind in names) for names in (inputs, outputs)]
        return jax.shard_map(fn, in_specs=specs[0], out_specs=specs[1], check_vma=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprob(static: _Static, hidden, head, targets, mask):
    """Compute (log-prob, entropy), each [B, T]; arbitrary outside the mask, where cotangents must be 0."""
    return _forward(static, hidden, head, targets, mask)[0]


def _forward(static, hidden, head, targets, mask):
    local = functools.partial(_local_forward, static)
    *outputs, lse = static.shard_map(local, "twtt", "ttt")(hidden, head, targets, mask)
    return tuple(outputs), (hidden, head, targets, mask, lse, outputs[1])


def _backward(static, residuals, cotangents):
    hidden, head, targets, mask, lse, entropy = residuals
    local = functools.partial(_local_backward, static)
    d_hidden, d_head = static.shard_map(local, "twtttttt", "tg")(
        hidden, head, targets, mask, lse, entropy, *cotangents
    )
    return d_hidden, d_head, None, None


_logprob.defvjp(_forward, _backward)


def _local_forward(s: _Static, hidden, head, targets, mask):
    """Compute (log-prob, entropy, lse) of a device's tokens."""
    (hidden, targets), count, restore = _masked_first(mask, hidden, targets)
    targets, has_target = _shard_targets(s, head, targets)
    run = load_implementation("linear_logprob", s.implementation).forward
    if s.implementation == "chunked":
        run = functools.partial(run, chunk=tokens_at_once("chunked", restore.shape, hidden.shape[1], s.chunk))
    outputs = run(s.spec, hidden, head, targets, count)
    if s.specs and s.specs.vocab:
        outputs = merge_shards(outputs, has_target, s.specs.vocab)
    if mask is not None:  # tokens outside may not have been computed
        computed = jnp.arange(targets.size) < count
        outputs = [
            None if x is None else jnp.where(computed, x, fill)
            for x, fill in zip(outputs, (0.0, 0.0, SKIPPED_LSE), strict=True)
        ]
    return tuple(restore(x) for x in outputs)


def _local_backward(s: _Static, hidden, head, targets, mask, *columns):
    """Compute (d_hidden of a device's tokens, d_head of its shard)."""
    (hidden, targets, *columns), count, restore = _masked_first(mask, hidden, targets, *columns)
    targets, _ = _shard_targets(s, head, targets)
    module = load_implementation("linear_logprob", s.implementation)
    chunk = tokens_at_once(s.implementation, restore.shape, hidden.shape[1], s.chunk)
    d_hidden, d_head = chunked.backward(
        s.spec, hidden, head, targets, count, *columns,
        chunk=chunk, d_logits=module.d_logits,
    )  # fmt: skip
    if at := s.specs:
        if at.vocab:
            d_hidden = jax.lax.psum(d_hidden.astype(jnp.float32), at.vocab).astype(hidden.dtype)
        if at.scattered:
            d_head = _scatter(s.implementation, d_head, at.scattered)
        d_head = jax.lax.psum(d_head, tuple(x for x in at.token_axes if x not in at.scattered))
    return restore(d_hidden), d_head.astype(head.dtype)


def _scatter(implementation: str, d_head: Float[Array, "V D"], axes: tuple[str, ...]) -> Array:
    """Return the sum over the devices of these mesh axes of a device's slice of D, [V, D / devices]."""
    rows = len(d_head)
    if implementation == "pallas_tpu":
        d_head = jnp.pad(d_head, ((0, -rows % SCATTERED_ROWS), (0, 0)))
    return jax.lax.psum_scatter(d_head, axes, scatter_dimension=1, tiled=True)[:rows]


def tokens_at_once(implementation: str, shape: tuple[int, int], dim: int, chunk: int) -> int:
    """Return the number of a device's tokens whose logits are in memory at once.

    Args:
        shape: rows of the device and tokens of each.
        dim: size of the hidden states.
        chunk: as of `linear_logprob`.
    """
    tokens = math.prod(shape)
    if implementation == "reference":
        return tokens
    if implementation == "chunked":
        most = CPU_CHUNK if device()[0] == "cpu" else MAX_CHUNK
        return min(chunk * shape[0], most, tokens)
    # Half of the bytes of d_head: with fewer tokens, adding to d_head would cost more than the products.
    return min(-(-dim // 256) * 256, tokens)


class _Restore(NamedTuple):
    """The inverse of `_masked_first`: [M, ...] to [B, T, ...]."""

    shape: tuple[int, int]
    order: Int[Array, "M"] | None

    def __call__(self, x: Array | None) -> Array | None:
        if x is None:
            return None
        x = x if self.order is None else x[jnp.argsort(self.order)]
        return x.reshape(*self.shape, *x.shape[1:])


def _masked_first(mask, *arrays):
    """Return ([B, T, ...] as [M, ...] with the tokens of the mask first, their number, `_Restore`)."""
    shape = arrays[0].shape[:2]
    flat = [None if x is None else x.reshape(math.prod(shape), *x.shape[2:]) for x in arrays]
    if mask is None:
        return flat, math.prod(shape), _Restore(shape, None)
    selected = mask.reshape(-1) > 0
    order = jnp.argsort(~selected)
    flat = [None if x is None else x[order] for x in flat]
    return flat, jnp.sum(selected), _Restore(shape, order)


def _shard_targets(s: _Static, head, targets):
    """Return (index of each target in the device's vocabulary shard, whether the shard has the target)."""
    if s.specs and s.specs.vocab:
        targets = targets - jax.lax.axis_index(s.specs.vocab) * head.shape[0]
    return targets, (targets >= 0) & (targets < head.shape[0])
