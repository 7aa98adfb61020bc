"""Log-probabilities of a vocabulary without ever holding [B, T, V]."""

from __future__ import annotations

import functools
import importlib
import math
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Num

from jaxrl_kernels import target
from jaxrl_kernels.linear_logprob import chunked
from jaxrl_kernels.linear_logprob.reference import Spec, merge

IMPLEMENTATIONS = ("reference", "chunked", "pallas_tpu", "pallas_gpu")
"""Modules here. They are imported when first asked for: one chip's kernels may need what another lacks."""
FAR_ABOVE = 1e30
"""The log-sum-exp of a token that is not wanted: exp(logit - it) is 0."""
PIECE = 512
"""Tokens whose logits exist at once on one device, at most: fills its matrix units, stays near its caches."""


@functools.partial(
    jax.jit,
    static_argnames=("temperature", "softcap", "chunk", "with_entropy", "layout", "implementation"),
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
    layout: tuple[PartitionSpec, PartitionSpec] | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "B T"], Float[Array, "B T"] | None]:
    """log softmax(hidden head^T / temperature) at the targets, and its entropy, some tokens at a time.

    The backward pass computes logits again, from the saved log-sum-exp: 8 B T D V FLOPs in all. The work is
    that of the tokens in the mask: each device brings its own together and leaves out the rest.

    Args:
        targets: 0..V-1; any other has log-prob 0.
        mask: above 0 = wanted; elsewhere the results and their gradients are 0. None = all are wanted.
        softcap: c first turns the logits into c * tanh(logit / c).
        chunk: tokens of a row whose logits exist at once ("chunked"; the kernels keep logits on the chip in
            the forward pass, and in the backward pass as many as take half of the head's float32 gradient).
        layout: how hidden and head are divided over the mesh of `jax.set_mesh`: each device then works on
            its own tokens and rows of the head; what is summed over devices is a few numbers a token,
            d_hidden and d_head. D of the head is gathered. None = one device.
        implementation: "auto" or one of IMPLEMENTATIONS (see `choose`).

    Returns: (log-prob, entropy), float32, nats; entropy is None without `with_entropy`.

    Raises:
        ValueError: an implementation that cannot do this, or a temperature not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be more than 0, got {temperature}")
    name, _ = choose(hidden.shape[-1], hidden.dtype, implementation)
    if layout is not None:  # a PartitionSpec may be shorter than its array's shape
        layout = _Layout(*(PartitionSpec(*spec, *(None,) * (3 - len(spec))) for spec in layout))
    settings = _Settings(Spec(temperature, softcap, with_entropy), name, chunk, layout)
    logprob, entropy = _logprob(settings, hidden, head, targets, mask)
    wanted = lambda x: x if mask is None else jnp.where(mask > 0, x, 0.0)
    return wanted(logprob), wanted(entropy) if with_entropy else None


def choose(dim: int, dtype, implementation: str = "auto") -> tuple[str, str]:
    """(implementation, why) for hidden states of this size and type on the devices of the current mesh.

    Raises:
        ValueError: the named implementation does not exist or cannot do it.
    """

    def refusal(name: str) -> str:
        wrong = name.startswith("pallas") and _module(name).unsupported(dim, jnp.dtype(dtype))
        return f"{name} {wrong}" if wrong else ""

    if implementation != "auto":
        if implementation not in IMPLEMENTATIONS:
            known = ", ".join(("auto", *IMPLEMENTATIONS))
            raise ValueError(f"linear_logprob: no implementation {implementation!r}; known: {known}")
        if wrong := refusal(implementation):
            raise ValueError(f"linear_logprob: {wrong}. Use implementation='chunked'.")
        return implementation, "asked for"
    name, why = target.kernels()
    problem = refusal(name) if name else why
    return ("chunked", problem) if problem else (name, why)


def _module(implementation: str) -> ModuleType:
    return importlib.import_module(f"jaxrl_kernels.linear_logprob.{implementation}")


class _Layout(NamedTuple):
    hidden: PartitionSpec
    head: PartitionSpec

    @property
    def tokens(self) -> PartitionSpec:
        return PartitionSpec(*self.hidden[:2])

    @property
    def vocab(self) -> str | tuple[str, ...] | None:
        """Mesh axes over which the rows of the head are divided."""
        return self.head[0]

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Those over which the tokens are."""
        return _names(*self.tokens)

    @property
    def scattered(self) -> tuple[str, ...]:
        """Those of them over which the head's D is too: its gradient is summed there part by part."""
        embed = _names(self.head[1])
        return embed if set(embed) <= set(self.token_axes) else ()


def _names(*entries) -> tuple[str, ...]:
    each = [(entry,) if isinstance(entry, str) else entry for entry in entries if entry]
    return tuple(name for names in each for name in names)


class _Settings(NamedTuple):
    spec: Spec
    implementation: str
    chunk: int
    layout: _Layout | None

    def on_each_device(self, fn, inputs: str, outputs: str):
        """fn of each device's part: t = of arrays [B, T, ...], w = of the head, g = of its gradient."""
        if self.layout is None:
            return fn
        at = self.layout
        kinds = {
            "t": at.tokens,
            "w": PartitionSpec(at.vocab),
            "g": PartitionSpec(at.vocab, at.scattered or None),
        }
        specs = [tuple(kinds[kind] for kind in names) for names in (inputs, outputs)]
        return jax.shard_map(fn, in_specs=specs[0], out_specs=specs[1], check_vma=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprob(settings: _Settings, hidden, head, targets, mask):
    """(log-prob, entropy), each [B, T]; any numbers where the mask is 0, and their cotangents must be 0."""
    return _forward(settings, hidden, head, targets, mask)[0]


def _forward(settings, hidden, head, targets, mask):
    local = functools.partial(_local_forward, settings)
    *found, lse = settings.on_each_device(local, "twtt", "ttt")(hidden, head, targets, mask)
    return tuple(found), (hidden, head, targets, mask, lse, found[1])


def _backward(settings, kept, cotangents):
    hidden, head, targets, mask, lse, entropy = kept
    local = functools.partial(_local_backward, settings)
    d_hidden, d_head = settings.on_each_device(local, "twtttttt", "tg")(
        hidden, head, targets, mask, lse, entropy, *cotangents
    )
    return d_hidden, d_head, None, None


_logprob.defvjp(_forward, _backward)


def _local_forward(s: _Settings, hidden, head, targets, mask):
    """(log-prob, entropy, lse) of a device's tokens."""
    (hidden, targets), count, back = _together(mask, hidden, targets)
    targets, has_target = _own(s, head, targets)
    run = _module(s.implementation).forward
    if s.implementation == "chunked":
        run = functools.partial(run, chunk=_piece(s, back.shape, hidden.shape))
    found = run(s.spec, hidden, head, targets, count)
    if s.layout and s.layout.vocab:
        found = merge(found, has_target, s.layout.vocab)
    if mask is not None:  # some of the others were not computed
        computed = jnp.arange(targets.size) < count
        found = [
            None if x is None else jnp.where(computed, x, fill)
            for x, fill in zip(found, (0.0, 0.0, FAR_ABOVE), strict=True)
        ]
    return tuple(back(x) for x in found)


def _local_backward(s: _Settings, hidden, head, targets, mask, *columns):
    """(d_hidden of a device's tokens, d_head of its rows, or of a part of their columns)."""
    (hidden, targets, *columns), count, back = _together(mask, hidden, targets, *columns)
    targets, _ = _own(s, head, targets)
    d_hidden, d_head = chunked.backward(
        s.spec, hidden, head, targets, count, *columns,
        chunk=_piece(s, back.shape, hidden.shape), d_logits=_module(s.implementation).d_logits,
    )  # fmt: skip
    if at := s.layout:
        if at.vocab:
            d_hidden = jax.lax.psum(d_hidden.astype(jnp.float32), at.vocab).astype(hidden.dtype)
        if at.scattered:
            d_head = jax.lax.psum_scatter(d_head, at.scattered, scatter_dimension=1, tiled=True)
        d_head = jax.lax.psum(d_head, tuple(x for x in at.token_axes if x not in at.scattered))
    return back(d_hidden), d_head.astype(head.dtype)


def _piece(s: _Settings, shape: tuple[int, int], flat: tuple[int, int]) -> int:
    """Tokens whose logits exist at once."""
    tokens, dim = flat
    if s.implementation == "reference":
        return tokens
    if s.implementation == "chunked":
        return min(s.chunk * shape[0], PIECE, tokens)
    # In two bytes, what half of d_head takes in four; fewer than that, and adding to d_head costs more than
    # the products do.
    return min(-(-dim // 256) * 256, tokens)


class _Back(NamedTuple):
    """[M, ...] to [B, T, ...] as they were."""

    shape: tuple[int, int]
    order: Int[Array, "M"] | None

    def __call__(self, x: Array | None) -> Array | None:
        if x is None:
            return None
        x = x if self.order is None else x[jnp.argsort(self.order)]
        return x.reshape(*self.shape, *x.shape[1:])


def _together(mask, *arrays):
    """([B, T, ...] as [M, ...] with the wanted tokens first, how many those are, and the way back)."""
    shape = arrays[0].shape[:2]
    flat = [None if x is None else x.reshape(math.prod(shape), *x.shape[2:]) for x in arrays]
    if mask is None:
        return flat, math.prod(shape), _Back(shape, None)
    wanted = mask.reshape(-1) > 0
    order = jnp.argsort(~wanted)
    flat = [None if x is None else x[order] for x in flat]
    return flat, jnp.sum(wanted), _Back(shape, order)


def _own(s: _Settings, head, targets):
    """(which of the device's rows of the head each target is, whether it is one)."""
    if s.layout and s.layout.vocab:
        targets = targets - jax.lax.axis_index(s.layout.vocab) * head.shape[0]
    return targets, (targets >= 0) & (targets < head.shape[0])
