"""Compile all programs of a run before it starts; or only say with which arguments they are called."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import jax
import numpy as np

from jaxrl_llm.models.decode import DecodeWeights
from jaxrl_llm.rollout.engine import SamplingConfig
from jaxrl_llm.rollout.generation import empty_slots, is_filtered, make_draw, make_ends
from jaxrl_llm.rollout.programs import Programs
from jaxrl_llm.rollout.sizes import Sizes, at_least
from jaxrl_llm.sharding.rules import laid_out
from jaxrl_llm.structs import Call, Params


def warm_up(
    programs: Programs,
    sizes: Sizes,
    weights: DecodeWeights,
    samplings: Collection[SamplingConfig],
    stop_ids: Collection[int],
    key: np.ndarray,
) -> None:
    """Call every program once in every size that a `Generation` may ask for, on nothing.

    Args:
        samplings: those that will be used; filters are programs of their own.
        stop_ids: as many as will end a response.
        key: any key data, for its shape.
    """
    most = sizes.slots[-1]
    for width, counts in sizes.prompts:
        for count in counts:
            tokens, lengths = np.zeros((count, width), np.int32), np.zeros(count, np.int32)
            prompts = programs.prefill(weights, tokens, lengths)
            prompts = programs.spread(prompts, np.zeros(most, np.int32), width=sizes.width)
    filters = {is_filtered(sampling): sampling for sampling in samplings}
    for i, length in enumerate(sizes.lengths):
        cache = programs.empty_cache(most, length)
        cache = programs.insert(cache, prompts, np.zeros(most, bool))
        for slots in reversed(sizes.slots):
            if slots < most:
                cache = programs.resize(cache, np.zeros(slots, np.int32), length=length)
            for longer in sizes.lengths[i + 1 : i + 2]:
                programs.resize(cache, np.zeros(slots, np.int32), length=longer)
            state = empty_slots(slots, key)
            uniform = programs.uniforms(state)
            for filtered, sampling in filters.items():
                draw, ends = make_draw(sampling), make_ends(stop_ids, 0, 0)
                cache, _ = programs.decode(weights, cache, state, uniform, draw, ends, filtered=filtered)
        jax.block_until_ready(cache)


def largest_calls(
    programs: Programs,
    sizes: Sizes,
    params: Params,
    prompts: int,
    sampling: SamplingConfig,
    stop_ids: Collection[int],
) -> dict[str, Call]:
    """Each program's largest call under these sizes, on abstract arguments.

    Args:
        params: the weights as the trainer holds them, abstract.
        prompts: different ones that are read in one go at most.
    """
    lay, most = programs.layouts, sizes.slots[-1]
    key = np.zeros(2, np.uint32)
    width, counts = sizes.prompts[-1]
    rows = at_least(counts, min(prompts, counts[-1]))
    tokens, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
    state, chosen = empty_slots(most, key), np.zeros(most, np.int32)
    with jax.set_mesh(programs.mesh):
        shape = lambda fn, *args, **kwargs: jax.eval_shape(partial(fn, **kwargs), *args)
        weights = laid_out(shape(programs.publish, params), lay["weights"])
        read = laid_out(shape(programs.prefill, weights, tokens, lengths), lay["prompts"])
        spread = laid_out(shape(programs.spread, read, chosen, width=width), lay["cache"][:2])
        caches = [
            laid_out(jax.eval_shape(partial(programs.empty_cache, most, length)), lay["cache"])
            for length in sizes.lengths[-2:]
        ]
        uniform = laid_out(shape(programs.uniforms, state), lay["everywhere"])
    calls = {
        "publish": Call(programs.publish, (params,), {}),
        "prefill": Call(programs.prefill, (weights, tokens, lengths), {}),
        "spread": Call(programs.spread, (read, chosen), {"width": width}),
        "insert": Call(programs.insert, (caches[-1], spread, np.zeros(most, bool)), {}),
        "decode": Call(
            programs.decode,
            (weights, caches[-1], state, uniform, make_draw(sampling), make_ends(stop_ids, 0, 0)),
            {"filtered": is_filtered(sampling)},
        ),
    }
    if len(caches) > 1:
        calls["lengthen"] = Call(programs.resize, (caches[0], chosen), {"length": sizes.lengths[-1]})
    return calls
