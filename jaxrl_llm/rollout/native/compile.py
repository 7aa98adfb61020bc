"""Compile all programs of a run before it starts; or only say with which arguments they are called."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import jax
import numpy as np

from jaxrl_llm.models.decode import DecodeWeights, RingCache
from jaxrl_llm.models.paged import PagedCache
from jaxrl_llm.rollout.engine import SamplingConfig
from jaxrl_llm.rollout.native.programs import Programs
from jaxrl_llm.rollout.native.schedule import empty_slots, is_filtered, make_draw, make_ends
from jaxrl_llm.rollout.native.shapes import Sizes, at_least, pages_of
from jaxrl_llm.sharding.rules import with_shardings
from jaxrl_llm.structs import Params, Program


def warm_up(
    programs: Programs,
    sizes: Sizes,
    weights: DecodeWeights,
    samplings: Collection[SamplingConfig],
    stop_ids: Collection[int],
    key: np.ndarray,
) -> None:
    """Program every program once in every size that a `Generation` may ask for, on nothing.

    Args:
        samplings: those that will be used; filters are programs of their own.
        stop_ids: as many as will end a response.
        key: any key data, for its shape.
    """
    most = sizes.slots[-1]
    filters = {is_filtered(sampling): sampling for sampling in samplings}

    def decode(cache, slots, *table):
        state = empty_slots(slots, key)
        uniform = programs.uniforms(state)
        for filtered, sampling in filters.items():
            draw, ends = make_draw(sampling), make_ends(stop_ids, 0, 0)
            cache, _ = programs.decode(weights, cache, state, uniform, draw, ends, *table, filtered=filtered)
        return cache

    if programs.page:
        _warm_up_paged(programs, sizes, weights, decode)
        return
    for width, counts in sizes.prompts:
        for count in counts:
            tokens, lengths = np.zeros((count, width), np.int32), np.zeros(count, np.int32)
            prompts = programs.prefill(weights, tokens, lengths)
            prompts = programs.spread(prompts, np.zeros(most, np.int32), width=sizes.width)
    for i, length in enumerate(sizes.lengths):
        cache = programs.empty_cache(most, length)
        cache = programs.insert(cache, prompts, np.zeros(most, bool))
        for slots in reversed(sizes.slots):
            if slots < most:
                cache = programs.resize(cache, np.zeros(slots, np.int32), length=length)
            for longer in sizes.lengths[i + 1 : i + 2]:
                programs.resize(cache, np.zeros(slots, np.int32), length=longer)
            cache = decode(cache, slots)
        jax.block_until_ready(cache)


def _warm_up_paged(programs: Programs, sizes: Sizes, weights: DecodeWeights, decode) -> None:
    cache = programs.empty_cache(programs.ways * sizes.pages, programs.page)
    for width, counts in sizes.prompts:
        for count in counts:
            lengths = _nobodys(count)
            prompts = programs.prefill(weights, _nobodys(count, width), lengths)
            numbers = _nobodys(programs.ways * count, pages_of(width, programs.page))
            cache = programs.write(cache, prompts, lengths, numbers)
    cache = programs.copy(cache, _nobodys(sizes.slots[-1]), _nobodys(sizes.slots[-1]))
    for columns in {pages_of(length, programs.page) for length in sizes.lengths}:
        for slots in sizes.slots:
            cache = decode(cache, slots, _nobodys(slots, columns))
    jax.block_until_ready(cache)


def largest_calls(
    programs: Programs,
    sizes: Sizes,
    params: Params,
    prompts: int,
    sampling: SamplingConfig,
    stop_ids: Collection[int],
) -> dict[str, Program]:
    """Each program's largest call under these sizes, on abstract arguments.

    Args:
        params: the weights as the trainer holds them, abstract.
        prompts: different ones that are read in one go at most.
    """
    lay, most = programs.layouts, sizes.slots[-1]
    key = np.zeros(2, np.uint32)
    width, counts = sizes.prompts[-1]
    rows = at_least(counts, min(prompts, counts[-1]))
    tokens, lengths = _nobodys(rows, width), _nobodys(rows)
    state = empty_slots(most, key)
    with jax.set_mesh(programs.mesh):
        weights = with_shardings(jax.eval_shape(programs.publish, params), lay["weights"])
        read = with_shardings(jax.eval_shape(programs.prefill, weights, tokens, lengths), lay["prompts"])
        uniform = with_shardings(jax.eval_shape(programs.uniforms, state), lay["everywhere"])
        cache, calls = (_paged_calls if programs.page else _ring_calls)(programs, sizes, read, lengths)
    drawn = state, uniform, make_draw(sampling), make_ends(stop_ids, 0, 0)
    table = (_nobodys(most, pages_of(sizes.lengths[-1], programs.page)),) if programs.page else ()
    options = {"filtered": is_filtered(sampling)}
    return {
        "publish": Program(programs.publish, (params,), {}),
        "prefill": Program(programs.prefill, (weights, tokens, lengths), {}),
        **calls,
        "decode": Program(programs.decode, (weights, cache, *drawn, *table), options),
    }


def _ring_calls(programs: Programs, sizes: Sizes, read, lengths) -> tuple[RingCache, dict[str, Program]]:
    """The cache, and what else is done with it."""
    lay, most, width = programs.layouts["cache"], sizes.slots[-1], sizes.width
    chosen = _nobodys(most)
    spread = with_shardings(jax.eval_shape(partial(programs.spread, width=width), read, chosen), lay[:2])
    caches = [
        with_shardings(jax.eval_shape(partial(programs.empty_cache, most, length)), lay)
        for length in sizes.lengths[-2:]
    ]
    calls = {
        "spread": Program(programs.spread, (read, chosen), {"width": width}),
        "insert": Program(programs.insert, (caches[-1], spread, np.zeros(most, bool)), {}),
    }
    if len(caches) > 1:
        calls["lengthen"] = Program(programs.resize, (caches[0], chosen), {"length": sizes.lengths[-1]})
    return caches[-1], calls


def _paged_calls(programs: Programs, sizes: Sizes, read, lengths) -> tuple[PagedCache, dict[str, Program]]:
    make = partial(programs.empty_cache, programs.ways * sizes.pages, programs.page)
    cache = with_shardings(jax.eval_shape(make), programs.layouts["cache"])
    numbers = _nobodys(programs.ways * len(lengths), pages_of(sizes.width, programs.page))
    chosen = _nobodys(sizes.slots[-1])
    return cache, {
        "write": Program(programs.write, (cache, read, lengths, numbers), {}),
        "copy": Program(programs.copy, (cache, chosen, chosen), {}),
    }


def _nobodys(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)
