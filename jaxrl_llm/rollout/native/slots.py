"""Slots of the native engine between its programs: their state, and what programs take and return."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.models.decode import PromptCache
from jaxrl_llm.rollout.native.sampling import SamplingParams


class SlotState(NamedTuple):
    """The state of S slots between chunks; the host's copy (numpy) is the master."""

    tokens: np.ndarray  # int32 [S], the next token to read
    positions: np.ndarray  # int32 [S], its position in the sequence = tokens in the cache
    counts: np.ndarray  # int32 [S], tokens generated in this turn
    limits: np.ndarray  # int32 [S], largest count
    active: np.ndarray  # bool [S]
    keys: np.ndarray  # uint32 [S, 2], key data of the turn


class ChunkOutput(NamedTuple):
    """The result of one call of `decode`. Slot s generated tokens[:produced[s], s]."""

    tokens: jax.Array  # int32 [chunk, S]
    logprobs: jax.Array  # float32 [chunk, S], nats
    kept: jax.Array | None  # int32 [chunk, S, K], see `sampling.Sampled`
    routes: jax.Array | None  # [chunk, S, L, K], of the token that was read before each
    produced: jax.Array  # int32 [S]
    active: jax.Array  # bool [S]
    steps: jax.Array  # int32
    drafts: jax.Array | None = None  # int32 [2], draft tokens read, and draft tokens accepted


class PrefillBatch(NamedTuple):
    """The keys and values of one prefill."""

    kv: PromptCache | None
    rows: dict[bytes, int]  # prompt -> its row
    lengths: np.ndarray  # int32 [B]


class StopConditions(NamedTuple):
    """The conditions that end a response or a chunk."""

    token_ids: np.ndarray  # int32 [.], ids that end a response, padded with -1
    max_steps: np.ndarray  # int32, tokens per slot
    min_active: np.ndarray  # int32: the chunk ends when no shard of the slots has more active ones


class ChunkInputs(NamedTuple):
    """The inputs of a chunk besides the slots."""

    uniform: jax.Array  # float32 [chunk, S], of `Programs.uniforms`
    params: SamplingParams
    stop: StopConditions
    table: np.ndarray | None = None  # int32 [S, N], pages of each slot, of the paged cache
    texts: np.ndarray | None = None  # int32 [S, C], see `propose_drafts`
    states: np.ndarray | None = None  # int32 [S], row of each slot's state, of the paged cache


class RowsToExtend(NamedTuple):
    """Rows of tokens that follow the tokens in the pages. The first rows are of the first shard."""

    table: np.ndarray  # int32 [R, N], pages of each row, in order; R is a multiple of the shards
    tokens: np.ndarray  # int32 [R, T], row r has lengths[r] tokens, then padding
    lengths: np.ndarray  # int32 [R]
    starts: np.ndarray  # int32 [R], position of a row's first token
    states: np.ndarray | None = None  # int32 [R], row of each row's state


def empty_slots(num_slots: int, key: np.ndarray) -> SlotState:
    """Return the state of empty slots; `key` is any key data, for its shape."""
    ints = lambda: np.zeros(num_slots, np.int32)
    keys = np.zeros((num_slots, len(key)), key.dtype)
    return SlotState(ints(), ints(), ints(), ints(), active=np.zeros(num_slots, bool), keys=keys)


def make_stop_conditions(stop_ids: Collection[int], max_steps: int, min_active: int) -> StopConditions:
    """Return the arrays; the ids are padded to a multiple of 8, so that shapes are few."""
    padded = np.full(-(-max(len(stop_ids), 1) // 8) * 8, -1, np.int32)
    padded[: len(stop_ids)] = sorted(stop_ids)
    return StopConditions(padded, np.int32(max_steps), np.int32(min_active))
