"""Ahead-of-time compilation: all programs of a rollout in all shapes, or their largest calls for `plan`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl_llm.models.decode import DecodeWeights, RingCache
from jaxrl_llm.models.paged import PagedCache
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.native.kept import max_copies
from jaxrl_llm.rollout.native.programs import Programs
from jaxrl_llm.rollout.native.sampling import filters_of, make_params
from jaxrl_llm.rollout.native.shapes import ProgramShapes, num_copies, pages_for, round_up, state_rows
from jaxrl_llm.rollout.native.slots import (
    ChunkInputs,
    RowsToExtend,
    SlotState,
    empty_slots,
    make_stop_conditions,
)
from jaxrl_llm.sharding.compile import ParallelCompiler, Program
from jaxrl_llm.sharding.rules import with_shardings
from jaxrl_llm.structs import Params


class CompiledCalls:
    """`Programs` whose calls compile a program instead of running it, and return abstract results."""

    def __init__(self, programs: Programs, compiler: ParallelCompiler):
        self._programs, self._compiler = programs, compiler

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._programs, name)
        if isinstance(value, Programs):
            return CompiledCalls(value, self._compiler)
        return partial(self._compiler.start, value) if isinstance(value, jax.stages.Wrapped) else value


def call_all(
    programs: Programs | CompiledCalls,
    shapes: ProgramShapes,
    weights: DecodeWeights,
    samplings: Collection[SamplingConfig],
    *,
    eos_ids: Sequence[int],
    key: np.ndarray,
) -> None:
    """Call every program once in every shape that a `Scheduler` can need, with empty slots.

    Args:
        weights: or their shapes, if the calls only compile.
        samplings: settings of the run; filters and numbers of stop tokens make `decode` another program.
        eos_ids: end tokens of the model and its tokenizer.
        key: any key data, for its shape.
    """
    max_slots = shapes.slot_counts[-1]
    stops = [make_stop_conditions(sampling.stop_ids(eos_ids), 0, 0) for sampling in samplings]
    variants = {
        (filters_of(s), stop.token_ids.size): (s, stop) for s, stop in zip(samplings, stops, strict=True)
    }

    def decode(cache, num_slots, table=None):
        state = empty_slots(num_slots, key)
        uniform = programs.uniforms(state)
        for (filters, _), (sampling, stop) in variants.items():
            params, static = make_params(sampling), {"filters": filters}
            inputs = ChunkInputs(uniform, params, stop, table)
            inputs = inputs if table is None else inputs._replace(states=_rows(programs, num_slots))
            cache, _ = programs.decode(weights, cache, state, inputs, **static)
            if shapes.has_drafts(num_slots):
                inputs = inputs._replace(texts=_no_texts(programs, shapes, table))
                static["num_drafts"] = shapes.draft_tokens
                cache, _ = programs.decode_drafts(weights, cache, state, inputs, **static)
        return cache

    if programs.page_size:
        _call_paged(programs, shapes, weights, decode)
        return
    for width, counts in shapes.prefill:
        for count in counts:
            prompts, _ = programs.prefill(weights, _zeros(count, width), _zeros(count))
            prompts = programs.gather(prompts, _zeros(max_slots), length=shapes.max_prefill_length)
    # The ring: decode every batch at every length.
    for i, length in enumerate(shapes.cache_lengths):
        cache = programs.empty_cache(max_slots, length)
        cache = programs.insert(cache, prompts, np.zeros(max_slots, bool))
        for num_slots in reversed(shapes.slot_counts):
            if num_slots < max_slots:
                cache = programs.resize(cache, _zeros(num_slots), length=length)
            for longer in shapes.cache_lengths[i + 1 : i + 2]:
                programs.resize(cache, _zeros(num_slots), length=longer)
            cache = decode(cache, num_slots)
    if shapes.extend and programs.kept and shapes.num_pages:
        _call_kept(programs, shapes, weights)


def _call_kept(programs: Programs | CompiledCalls, shapes: ProgramShapes, weights: DecodeWeights) -> None:
    kept, max_slots = programs.kept, shapes.slot_counts[-1]
    pages = kept.empty_cache(*_sizes(kept, shapes))
    pages = _call_extend(kept, shapes, weights, pages)
    for length in shapes.cache_lengths:
        ring = programs.empty_cache(max_slots, length)
        slots = _zeros(max_slots, pages_for(length, kept.page_size)), _zeros(max_slots)
        ring = kept.read(ring, pages, *slots, np.zeros(max_slots, bool), _rows(kept, max_slots))
        pages = kept.write(ring, pages, np.int32(0), *_no_copies(kept, shapes))


def _call_extend(
    programs: Programs | CompiledCalls, shapes: ProgramShapes, weights: DecodeWeights, cache
) -> PagedCache:
    for width, counts in shapes.extend:
        for count in counts:
            table = _zeros(count, _columns(programs, shapes))
            tokens = _zeros(count, width), _zeros(count), _zeros(count)
            rows = RowsToExtend(table, *tokens, _rows(programs, count))
            cache, _ = programs.extend(weights, cache, rows)
    return cache


def _call_paged(
    programs: Programs | CompiledCalls, shapes: ProgramShapes, weights: DecodeWeights, decode
) -> None:
    cache = programs.empty_cache(*_sizes(programs, shapes))
    for width, counts in shapes.prefill:
        for count in counts:
            lengths = _zeros(count)
            prompts, _ = programs.prefill(weights, _zeros(count, width), lengths)
            tables = _zeros(programs.num_shards * count, pages_for(width, programs.page_size))
            rows = _rows(programs, len(tables))
            cache = programs.write_pages(cache, prompts, lengths, tables, rows)
    cache = _call_extend(programs, shapes, weights, cache)
    cache = programs.copy_pages(cache, *_null_copies(programs, shapes))
    for columns in {pages_for(length, programs.page_size) for length in shapes.cache_lengths}:
        for num_slots in shapes.slot_counts:
            cache = decode(cache, num_slots, _zeros(num_slots, columns))


def largest_calls(
    programs: Programs,
    shapes: ProgramShapes,
    params: Params,
    num_prompts: int,
    *,
    sampling: SamplingConfig,
    stop_ids: Collection[int],
) -> dict[str, Program]:
    """Return the largest call of each program in these shapes, with abstract arguments.

    Args:
        params: the trainer's weights, abstract.
        num_prompts: different prompts of one call of `generate`.
    """
    shardings, max_slots = programs.shardings, shapes.slot_counts[-1]
    # Abstract arguments of the largest shapes.
    width, counts = shapes.prefill[-1]
    rows = round_up(counts, min(num_prompts, counts[-1]))
    tokens, lengths = _zeros(rows, width), _zeros(rows)
    state = empty_slots(max_slots, np.zeros(2, np.uint32))
    with jax.set_mesh(programs.mesh):
        weights = with_shardings(jax.eval_shape(programs.publish, params), shardings["weights"])
        prompts, _ = jax.eval_shape(programs.prefill, weights, tokens, lengths)
        prompts = with_shardings(prompts, shardings["prompts"])
        uniform = with_shardings(jax.eval_shape(programs.uniforms, state), shardings["replicated"])
        calls_of = _paged_calls if programs.page_size else _ring_calls
        cache, calls = calls_of(programs, shapes, prompts, lengths)
    settings = make_params(sampling), make_stop_conditions(stop_ids, 0, 0)
    inputs, static = ChunkInputs(uniform, *settings), {"filters": filters_of(sampling)}
    if programs.page_size:
        table = _zeros(max_slots, _columns(programs, shapes))
        inputs = inputs._replace(table=table, states=_rows(programs, max_slots))
        calls |= _largest_extend(programs, shapes, weights, cache)
    elif shapes.extend and programs.kept and shapes.num_pages:
        calls |= _kept_calls(programs.kept, shapes, weights, cache)
    with_drafts = [count for count in shapes.slot_counts if shapes.has_drafts(count)]
    if with_drafts:
        args = _draft_inputs(programs, shapes, with_drafts[-1], settings)
        drafts = {"num_drafts": shapes.draft_tokens}
        calls["decode_drafts"] = Program(programs.decode_drafts, (weights, cache, *args), drafts | static)
    return {
        "publish": Program(programs.publish, (params,), {}),
        "prefill": Program(programs.prefill, (weights, tokens, lengths), {}),
        **calls,
        "decode": Program(programs.decode, (weights, cache, state, inputs), static),
    }


def _largest_extend(
    programs: Programs, shapes: ProgramShapes, weights: DecodeWeights, pages: PagedCache
) -> dict[str, Program]:
    """Return the largest prefill after kept pages; {} without conversations."""
    if not shapes.extend:
        return {}
    width, (*_, rows) = shapes.extend[-1]
    table = _zeros(rows, _columns(programs, shapes))
    args = RowsToExtend(table, _zeros(rows, width), _zeros(rows), _zeros(rows), _rows(programs, rows))
    return {"extend": Program(programs.extend, (weights, pages, args), {})}


def _kept_calls(
    kept: Programs, shapes: ProgramShapes, weights: DecodeWeights, ring: RingCache
) -> dict[str, Program]:
    """Return the programs of conversations that are kept beside the ring."""
    make = partial(kept.empty_cache, *_sizes(kept, shapes))
    pages, slots = with_shardings(jax.eval_shape(make), kept.shardings["cache"]), shapes.slot_counts[-1]
    chosen = _zeros(slots, _columns(kept, shapes)), _zeros(slots), np.zeros(slots, bool), _rows(kept, slots)
    return _largest_extend(kept, shapes, weights, pages) | {
        "read_kept": Program(kept.read, (ring, pages, *chosen), {}),
        "write_kept": Program(kept.write, (ring, pages, np.int32(0), *_no_copies(kept, shapes)), {}),
    }


def _no_copies(kept: Programs | CompiledCalls, shapes: ProgramShapes) -> tuple[np.ndarray | None, ...]:
    """Return the copies of `Programs.write`, of no turn."""
    slots = shapes.slot_counts[-1]
    copies = _zeros(max_copies(slots, shapes.cache_lengths, kept.page_size), 3)
    return copies, _zeros(kept.num_shards), _rows(kept, slots)


def _sizes(programs: Programs | CompiledCalls, shapes: ProgramShapes) -> tuple[int, int, int]:
    """Return the arguments of `Programs.empty_cache` for pages."""
    rows = state_rows(shapes.slot_counts[-1], programs.num_shards)
    return programs.num_shards * shapes.num_pages, programs.page_size, rows


def _rows(programs: Programs | CompiledCalls, count: int) -> np.ndarray | None:
    """Return so many null rows of states; None if the model has no states."""
    return _zeros(count) if programs.has_states else None


def _ring_calls(
    programs: Programs, shapes: ProgramShapes, prompts, lengths
) -> tuple[RingCache, dict[str, Program]]:
    """Return the ring cache and the programs that fill and resize it."""
    sharding, width = programs.shardings["cache"], shapes.max_prefill_length
    num_slots = shapes.slot_counts[-1]
    rows = _zeros(num_slots)
    gathered = jax.eval_shape(partial(programs.gather, length=width), prompts, rows)
    gathered = with_shardings(gathered, programs.shardings["gathered"])
    caches = [
        with_shardings(jax.eval_shape(partial(programs.empty_cache, num_slots, length)), sharding)
        for length in shapes.cache_lengths[-2:]
    ]
    calls = {
        "gather": Program(programs.gather, (prompts, rows), {"length": width}),
        "insert": Program(programs.insert, (caches[-1], gathered, np.zeros(num_slots, bool)), {}),
    }
    if len(caches) > 1:
        calls["resize"] = Program(programs.resize, (caches[0], rows), {"length": shapes.cache_lengths[-1]})
    return caches[-1], calls


def _paged_calls(
    programs: Programs, shapes: ProgramShapes, prompts, lengths
) -> tuple[PagedCache, dict[str, Program]]:
    """Return the paged cache and the programs that fill it."""
    make = partial(programs.empty_cache, *_sizes(programs, shapes))
    cache = with_shardings(jax.eval_shape(make), programs.shardings["cache"])
    tables = _zeros(
        programs.num_shards * len(lengths), pages_for(shapes.max_prefill_length, programs.page_size)
    )
    return cache, {
        "write_pages": Program(
            programs.write_pages, (cache, prompts, lengths, tables, _rows(programs, len(tables))), {}
        ),
        "copy_pages": Program(programs.copy_pages, (cache, *_null_copies(programs, shapes)), {}),
    }


def _null_copies(programs: Programs | CompiledCalls, shapes: ProgramShapes) -> tuple[np.ndarray | None, ...]:
    """Return sources and targets of `Programs.copy_pages`, of pages and of states, null all."""
    count = num_copies(shapes.slot_counts[-1], programs.num_shards)
    return _zeros(count), _zeros(count), _rows(programs, count), _rows(programs, count)


def _draft_inputs(
    programs: Programs, shapes: ProgramShapes, num_slots: int, settings
) -> tuple[SlotState, ChunkInputs]:
    """Return the arguments of `Programs.decode_drafts` after the cache, for this many slots."""
    state = empty_slots(num_slots, np.zeros(2, np.uint32))
    table = _zeros(num_slots, _columns(programs, shapes))
    uniform = with_shardings(jax.eval_shape(programs.uniforms, state), programs.shardings["replicated"])
    texts = _no_texts(programs, shapes, table)
    return state, ChunkInputs(uniform, *settings, table, texts, _rows(programs, num_slots))


def _no_texts(programs: Programs | CompiledCalls, shapes: ProgramShapes, table: np.ndarray) -> np.ndarray:
    """Return the texts of `Programs.decode_drafts` of slots without any."""
    num_slots, columns = table.shape
    return np.full((num_slots, shapes.max_draft_texts + columns * programs.page_size), -1, np.int32)


def _columns(programs: Programs | CompiledCalls, shapes: ProgramShapes) -> int:
    """Return the width of the longest page table."""
    return pages_for(shapes.cache_lengths[-1], programs.page_size)


def _zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)
