"""Compile all programs of a run before it starts."""

from __future__ import annotations

from collections.abc import Collection

import jax
import numpy as np

from jaxrl_llm.models.decode import DecodeWeights
from jaxrl_llm.rollout.engine import SamplingConfig
from jaxrl_llm.rollout.generation import empty_slots, is_filtered, make_draw, make_ends
from jaxrl_llm.rollout.programs import Programs
from jaxrl_llm.rollout.sizes import Sizes


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
