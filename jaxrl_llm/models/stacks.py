"""Stacks of equal layers, and the runs in which a scan passes through them.

The weights of all layers of one kind are one stack, and leading dense layers of a model with experts have
separate stacks. The layers follow a pattern, such as three layers with the delta rule and one with attention:
a run is a pattern that repeats, and one scan.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Int

from jaxrl_llm.models.config import TransformerConfig
from jaxrl_llm.models.global_heads import config_of_layers
from jaxrl_llm.models.mixer_config import ATTENTION, PER_LAYER

_DENSE = "dense_"
_REUSING = "reusing_"  # layers without an indexer, which reuse the choice of an earlier one
_SHARED = "shared_"  # layers that read the keys and values of earlier ones
GLOBAL = "global_layers"
"""Name of the stack of layers without a sliding window, if their heads differ (`global_heads`)."""
MAX_PATTERN = 12
"""Layers of the longest pattern that is looked for; all are compiled, as often as a layer of the run."""


class LayerRun(NamedTuple):
    """Layers of a repeated pattern, which follow each other."""

    pattern: tuple[str, ...]
    """Stack of each layer of the pattern."""
    count: int
    """Repetitions of the pattern."""
    first: int
    """Index of the first layer among those of the scans."""

    @property
    def layers(self) -> slice:
        """Return the layers of the run among those of the scans."""
        return slice(self.first, self.first + self.count * len(self.pattern))


def layer_stacks(c: TransformerConfig) -> dict[str, TransformerConfig]:
    """Return name -> architecture of each stack of equal layers, in the order of their first layers."""
    names = stack_names(c)
    if len(set(names)) == 1:
        return {names[0]: c}

    def stack(name: str) -> TransformerConfig:
        own = [i for i, of in enumerate(names) if of == name]
        pick = lambda values: values and tuple(values[i] for i in own)
        is_sparse = c.moe and not is_dense(name) and (not c.one_branch or c.layer_kinds[own[0]] == "experts")
        moe = dataclasses.replace(c.moe, dense_layers=0) if is_sparse else None
        picked = {field: pick(getattr(c, field)) for field in PER_LAYER}
        norms = c.delta.norms if c.delta and picked["layer_kinds"][0] == "delta" else c.norms
        own_heads = config_of_layers(c, not name.endswith(GLOBAL)) if c.global_heads else c
        # Layers that read another's keys and values may have a wider feed-forward.
        is_shared = name.startswith(_SHARED)
        wider = 2 if is_shared and c.wide_shared_mlp else 1
        if moe:
            moe = dataclasses.replace(moe, shared_size=moe.shared_size * wider)
        return dataclasses.replace(
            own_heads,
            moe=moe,
            norms=norms,
            num_layers=len(own),
            mlp_size=c.mlp_size * wider,
            shared_kv_layers=len(own) if is_shared else 0,
            **picked,
        )

    return {name: stack(name) for name in dict.fromkeys(names)}


def layers_outside(c: TransformerConfig, stages: int) -> int | None:
    """Return how many first layers are computed before a pipeline, by all devices; None = no such pipeline.

    These are the leading dense layers of a model with experts, and as few more as leave equal stages: 6 of 94
    layers for 8 stages.
    """
    names = stack_names(c)
    if stages == 1:
        return len(names)
    if c.shared_kv_layers:  # the last layers read keys and values of earlier ones
        return None
    first = c.moe.dense_layers if c.moe else 0
    are_equal = lambda rest: len(rest) % stages == 0 and rest == stages * rest[: len(rest) // stages]
    return next((n for n in range(first, len(names)) if are_equal(names[n:])), None)


def stages_problem(c: TransformerConfig, stages: int, mesh: str = "--mesh") -> str | None:
    """Return what keeps the layers from being divided among the stages of a pipeline, or None.

    Args:
        mesh: prefix of the mesh's keys, for the message.
    """
    if layers_outside(c, stages) is not None:
        return None
    possible = [n for n in range(1, c.num_layers + 1) if layers_outside(c, n) is not None]
    why = "read keys and values of earlier ones" if c.shared_kv_layers else "have no such division"
    return (
        f"{mesh}.stage is {stages}: stages have equal layers in the same order, and the {c.num_layers} "
        f"layers {why}. Set {mesh}.stage {min(possible, key=lambda n: abs(n - stages))}."
    )


def is_dense(stack: str) -> bool:
    """Return whether a stack is of leading dense layers of a model with experts: "dense_layers", or for
    another kind "dense_conv_layers"."""
    return stack.startswith(_DENSE)


def layer_places(c: TransformerConfig) -> list[tuple[str, int]]:
    """Return (stack, index in it) of each layer."""
    return _places(stack_names(c))


def _places(names: Sequence[str]) -> list[tuple[str, int]]:
    seen: Counter[str] = Counter()
    places = []
    for name in names:
        places.append((name, seen[name]))
        seen[name] += 1
    return places


def layer_runs(names: Sequence[str]) -> list[LayerRun]:
    """Return the runs of the layers in order: each the shortest of the patterns that reach farthest."""
    first, runs = 0, []
    while first < len(names):
        rest = names[first:]
        size = max(range(1, min(MAX_PATTERN, len(rest)) + 1), key=lambda p: (_reach(rest, p), -p))
        runs.append(LayerRun(tuple(rest[:size]), _reach(rest, size) // size, first))
        first = runs[-1].layers.stop
    return runs


def scan_layers(
    c: TransformerConfig,
    weights: dict[str, Any],
    numbers: Callable[[LayerRun], Any],
    step: Callable[..., tuple[Any, Any]],
    *,
    carry: Any,
    names: Sequence[str] | None = None,
) -> tuple[Any, list[tuple[LayerRun, tuple]]]:
    """Apply `step(stack config, carry, weights, numbers) -> (carry, out)` to layers, a scan for each run.

    The weights that `step` gets are a function without arguments, and a tree. A step that is checkpointed
    calls it inside, so that no weights are kept: they may be a slice of the weights of the stack.

    Args:
        weights: stack -> its weights, with a leading dim for the layers of the stack.
        numbers: run -> tree of other inputs, with a leading dim for the layers of the run.
        names: stack of each layer; None = all layers of the model.

    Returns: (carry, outs): for each run the outs of each layer of its pattern, with a leading dim `count`.
    """
    stacks, names, outs = layer_stacks(c), stack_names(c) if names is None else names, []
    for run in layer_runs(names):
        split = lambda x, run=run: x.reshape(run.count, len(run.pattern), *x.shape[1:])
        scanned, weights_of = _weights_of(names, run, weights)

        def repetition(carry, inputs, run=run, weights_of=weights_of):
            layers, others = inputs
            out = []
            for i, name in enumerate(run.pattern):
                own = jax.tree.map(lambda x, i=i: x[i], others)
                carry, one = step(stacks[name], carry, weights_of(i, layers), own)
                out.append(one)
            return carry, tuple(out)

        carry, out = jax.lax.scan(repetition, carry, (scanned, jax.tree.map(split, numbers(run))))
        outs.append((run, out))
    return carry, outs


def collect_layers(outs: list[tuple[LayerRun, tuple]], is_chosen: Callable[[str], bool]) -> Any:
    """Return the outs of `scan_layers` of the stacks with a chosen name, layer by layer; None = no layers."""
    runs = []
    for run, out in outs:
        of_pattern = [x for name, x in zip(run.pattern, out, strict=True) if is_chosen(name)]
        if len(of_pattern) == 1:
            runs += of_pattern
        elif of_pattern:
            join = lambda *xs: jnp.stack(xs, axis=1).reshape(-1, *xs[0].shape[1:])
            runs.append(jax.tree.map(join, *of_pattern))
    return join_layers(runs)


def join_layers(parts: Sequence[Any]) -> Any:
    """Concatenate trees of arrays [L, ...] along the layers; None = no layers."""
    found = [part for part in parts if part is not None]
    if len(found) < 2:
        return found[0] if found else None
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *found)


def cut_layers(
    c: TransformerConfig, part: slice, weights: Callable[[str], Any], routes: Any
) -> tuple[dict[str, Any], Any]:
    """Return (stack -> its weights, routes) of some of the layers.

    Args:
        weights: stack -> its weights, with a leading dim for the layers of the stack.
        routes: [L, ...] of the layers with experts, or None.
    """
    names, stacks = stack_names(c), layer_stacks(c)

    def cut(tree: Any, is_own: Callable[[str], bool]) -> Any:
        first, count = (sum(map(is_own, layers)) for layers in (names[: part.start], names[part]))
        return jax.tree.map(
            lambda x: x if len(x) == count else jax.lax.slice_in_dim(x, first, first + count), tree
        )

    own = {
        name: cut(weights(name), lambda other, name=name: other == name)
        for name in dict.fromkeys(names[part])
    }
    return own, cut(routes, lambda name: bool(stacks[name].moe))


def _weights_of(
    names: Sequence[str], run: LayerRun, weights: dict[str, Any]
) -> tuple[Any, Callable[[int, Any], Callable[[], Any]]]:
    """Return what a scan divides among the repetitions, and a function (place in the pattern, part of one
    repetition) -> the weights of the layer, as `step` of `scan_layers` gets them.

    A scan divides the stacks themselves if each layer of the pattern has its own. Other stacks stay whole,
    and each layer reads its place: slices of the stacks for the scan would be a copy of all weights in each
    call, and their gradients another array beside the buffer to which they are added. Not all stacks are read
    so, as weights that are read are kept, in a copy, where the backward pass recomputes nothing.
    """
    sizes, counts = Counter(names), Counter(run.pattern)
    if all(n == 1 and run.count == sizes[name] for name, n in counts.items()):
        scanned = tuple(weights[name] for name in run.pattern)
        return scanned, lambda i, layers: Partial(_same, layers[i])
    places = _places(names)[run.first : run.first + len(run.pattern)]

    def of_place(i: int, repetition: Int[Array, ""]) -> Callable[[], Any]:
        name, first = places[i]
        return Partial(_read_layer, weights[name], first + counts[name] * repetition)

    return jnp.arange(run.count), of_place


def _same(layer: Any) -> Any:
    return layer


def _read_layer(stack: Any, index: Int[Array, ""]) -> Any:
    """Return the weights of one layer of a stack."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stack)


def _reach(names: Sequence[str], size: int) -> int:
    """Return how many first names whole repetitions of the first `size` names cover; one repetition counts
    only if it is one layer."""
    count = 1
    while list(names[count * size : (count + 1) * size]) == list(names[:size]):
        count += 1
    return count * size if count > 1 or size == 1 else 0


def stack_names(c: TransformerConfig) -> list[str]:
    """Return the stack of each layer."""
    kinds = c.layer_kinds or (ATTENTION,) * c.num_layers
    dense, first_shared = c.moe.dense_layers if c.moe else 0, c.num_layers - c.shared_kv_layers
    of_kind = lambda kind: "layers" if kind == ATTENTION else f"{kind}_layers"
    reuses = [_REUSING * (not own) for own in c.index_layers or (True,) * c.num_layers]
    names = [f"{_DENSE * (i < dense)}{reuses[i]}{of_kind(kind)}" for i, kind in enumerate(kinds)]
    if c.global_heads:
        names = ["layers" if slides else GLOBAL for slides in c.window_layers]
    return [f"{_SHARED * (i >= first_shared)}{name}" for i, name in enumerate(names)]
