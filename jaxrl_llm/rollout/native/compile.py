"""Ahead-of-time compilation: all programs of a rollout in all shapes, or their largest calls for `plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl_llm.models.decode import DecodeWeights
from jaxrl_llm.models.paged import PagedCache
from jaxrl_llm.rollout.config import SamplingConfig
from jaxrl_llm.rollout.native.kept import max_copies
from jaxrl_llm.rollout.native.programs import Programs
from jaxrl_llm.rollout.native.sampling import filters_of, make_params
from jaxrl_llm.rollout.native.shapes import ProgramShapes, num_copies, pages_for, round_up, state_rows
from jaxrl_llm.rollout.native.slots import (
    ChunkInputs,
    RowsToExtend,
    empty_slots,
    make_stop_conditions,
)
from jaxrl_llm.sharding.compile import ParallelCompiler, Program
from jaxrl_llm.structs import Params


class AbstractCalls:
    """`Programs` whose calls run nothing.

    Args:
        call: gets a program's name, the jitted function and the arguments of one call; returns the abstract
            results.
    """

    def __init__(self, programs: Programs, call: Callable[..., Any]):
        self._programs, self._call = programs, call

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._programs, name)
        if isinstance(value, Programs):
            return AbstractCalls(value, self._call)
        return partial(self._call, name, value) if isinstance(value, jax.stages.Wrapped) else value


def call_all(
    programs: AbstractCalls,
    shapes: ProgramShapes,
    weights: DecodeWeights,
    samplings: Collection[SamplingConfig],
    *,
    eos_ids: Sequence[int],
) -> None:
    """Call every program once in every shape that a `Scheduler` can need, with empty slots.

    Args:
        samplings: settings of the run; filters and numbers of stop tokens make `decode` another program.
        eos_ids: end tokens of the model and its tokenizer.
    """
    max_slots = shapes.slot_counts[-1]
    stops = [make_stop_conditions(sampling.stop_ids(eos_ids), 0, 0) for sampling in samplings]
    variants = {
        (filters_of(s), stop.token_ids.size): (s, stop) for s, stop in zip(samplings, stops, strict=True)
    }

    def decode(cache, num_slots, table=None):
        state = empty_slots(num_slots, np.zeros(2, np.uint32))
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


def _call_kept(programs: AbstractCalls, shapes: ProgramShapes, weights: DecodeWeights) -> None:
    kept, max_slots = programs.kept, shapes.slot_counts[-1]
    pages = kept.empty_cache(*_sizes(kept, shapes))
    pages = _call_extend(kept, shapes, weights, pages)
    for length in shapes.cache_lengths:
        ring = programs.empty_cache(max_slots, length)
        ring = kept.read(
            ring,
            pages,
            _zeros(max_slots, pages_for(length, kept.page_size)),
            _zeros(max_slots),
            np.zeros(max_slots, bool),
            _rows(kept, max_slots),
        )
        pages = kept.write(ring, pages, np.int32(0), *_no_copies(kept, shapes))


def _call_extend(programs: AbstractCalls, shapes: ProgramShapes, weights: DecodeWeights, cache) -> PagedCache:
    for width, counts in shapes.extend:
        for count in counts:
            table = _zeros(count, _columns(programs, shapes))
            rows = RowsToExtend(
                table, _zeros(count, width), _zeros(count), _zeros(count), _rows(programs, count)
            )
            cache, _ = programs.extend(weights, cache, rows)
    return cache


def _call_paged(programs: AbstractCalls, shapes: ProgramShapes, weights: DecodeWeights, decode) -> None:
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
    for columns in sorted({pages_for(length, programs.page_size) for length in shapes.cache_lengths}):
        for num_slots in shapes.slot_counts:
            cache = decode(cache, num_slots, _zeros(num_slots, columns))


def compile_all(
    programs: Programs,
    shapes: ProgramShapes,
    samplings: Collection[SamplingConfig],
    *,
    eos_ids: Sequence[int],
) -> None:
    """Compile every program in every shape that a `Scheduler` can need."""
    with jax.set_mesh(programs.mesh), ParallelCompiler() as compiler:
        calls = AbstractCalls(programs, lambda name, *call, **static: compiler.start(*call, **static))
        call_all(calls, shapes, programs.abstract_weights(), samplings, eos_ids=eos_ids)


def largest_calls(
    programs: Programs,
    shapes: ProgramShapes,
    params: Params,
    num_prompts: int,
    *,
    sampling: SamplingConfig,
    eos_ids: Sequence[int],
) -> dict[str, Program]:
    """Return the largest call of each program in these shapes, with abstract arguments.

    Args:
        params: the trainer's weights, abstract.
        num_prompts: different prompts of one call of `generate`.
    """
    largest: dict[str, Program] = {}

    def keep(name: str, program: Any, *args: Any, **static: Any) -> Any:
        largest[{"read": "read_kept", "write": "write_kept"}.get(name, name)] = Program(program, args, static)
        return program.eval_shape(*args, **static)

    # Only the largest shapes are called, in ascending order: the last call of a program is its largest.
    (width, counts), slot_counts = shapes.prefill[-1], shapes.slot_counts
    with_drafts = [count for count in slot_counts if shapes.has_drafts(count)]
    top = dataclasses.replace(
        shapes,
        prefill=((width, (round_up(counts, min(num_prompts, counts[-1])),)),),
        extend=tuple((width, counts[-1:]) for width, counts in shapes.extend[-1:]),
        slot_counts=tuple(sorted({*with_drafts[-1:], slot_counts[-1]})),
        cache_lengths=shapes.cache_lengths[-2:],
    )
    calls = AbstractCalls(programs, keep)
    with jax.set_mesh(programs.mesh):
        call_all(calls, top, calls.publish(params), (sampling,), eos_ids=eos_ids)
    return {name: call for name, call in largest.items() if name not in ("empty_cache", "uniforms")}


def _no_copies(kept: AbstractCalls, shapes: ProgramShapes) -> tuple[np.ndarray | None, ...]:
    """Return the copies of `Programs.write`, of no turn."""
    slots = shapes.slot_counts[-1]
    copies = _zeros(max_copies(slots, shapes.cache_lengths, kept.page_size), 3)
    return copies, _zeros(kept.num_shards), _rows(kept, slots)


def _sizes(programs: AbstractCalls, shapes: ProgramShapes) -> tuple[int, int, int]:
    """Return the arguments of `Programs.empty_cache` for pages."""
    rows = state_rows(shapes.slot_counts[-1], programs.num_shards)
    return programs.num_shards * shapes.num_pages, programs.page_size, rows


def _rows(programs: AbstractCalls, count: int) -> np.ndarray | None:
    """Return so many null rows of states; None if the model has no states."""
    return _zeros(count) if programs.has_states else None


def _null_copies(programs: AbstractCalls, shapes: ProgramShapes) -> tuple[np.ndarray | None, ...]:
    """Return sources and targets of `Programs.copy_pages`, of pages and of states, null all."""
    count = num_copies(shapes.slot_counts[-1], programs.num_shards)
    return _zeros(count), _zeros(count), _rows(programs, count), _rows(programs, count)


def _no_texts(programs: AbstractCalls, shapes: ProgramShapes, table: np.ndarray) -> np.ndarray:
    """Return the texts of `Programs.decode_drafts` of slots without any."""
    num_slots, columns = table.shape
    return np.full((num_slots, shapes.max_draft_texts + columns * programs.page_size), -1, np.int32)


def _columns(programs: AbstractCalls, shapes: ProgramShapes) -> int:
    """Return the width of the longest page table."""
    return pages_for(shapes.cache_lengths[-1], programs.page_size)


def _zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)
