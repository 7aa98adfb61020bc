"""The ladder of compiled shapes: the few sizes that the programs of the native engine come in.

Every shape is a compilation, and one in the middle of a run stalls it. So batch sizes, cache lengths and
prompt lengths are rounded up to the rungs of short ladders below the longest prompt and response of the run
(as JetStream's prefill buckets and vLLM's graph capture sizes); all can be compiled ahead of time.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_LENGTH = 32  # tokens: the multiple that rungs are of; half of it for short ones
MAX_COPIES = 32  # pages of a shard that one call copies: a prefill batch is followed by a few
MAX_TEXTS = 8  # of other responses, as long as the longest sequence, that drafts are looked up in


@dataclass(frozen=True)
class ProgramShapes:
    """The ladders of one run, each ascending."""

    max_prompt_tokens: int
    max_response_tokens: int
    slot_counts: tuple[int, ...]
    """Numbers of slots; new sequences enter only while all slots are there."""
    cache_lengths: tuple[int, ...]
    """Tokens that a slot of the ring cache, or a row of the page table, holds."""
    prefill: tuple[tuple[int, tuple[int, ...]], ...]
    """(prompt length, numbers of rows) of the batches that one prefill reads."""
    extend: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(tokens, numbers of rows) of the batches that are prefilled after the kept pages of conversations."""
    num_pages: int = 0
    """Pages of the paged cache in each shard of the slots."""
    draft_tokens: int = 0
    """Draft tokens that a slot reads with its last one (`drafts.py`); 0 = none."""
    draft_slots: int = 0
    """Largest number of slots that are decoded with drafts."""
    decode_threads: int = 1
    """Schedulers that run at once, each in these shapes (`decode_threads.py`)."""

    @property
    def max_prefill_length(self) -> int:
        """Return the length of the longest prefill rows."""
        return self.prefill[-1][0]

    @property
    def max_draft_texts(self) -> int:
        """Return the tokens of other responses that the drafts of a slot are looked up in."""
        return MAX_TEXTS * self.cache_lengths[-1]

    def has_drafts(self, num_slots: int) -> bool:
        """Return whether so many slots are decoded with drafts."""
        return self.draft_tokens > 0 and num_slots <= self.draft_slots


def make_shapes(
    max_prompt: int,
    max_response: int,
    slots: int,
    num_shards: int,
    *,
    prefill_tokens: int,
    turns: bool = False,
    draft_tokens: int = 0,
    draft_slots: int = 0,
) -> ProgramShapes:
    """Return the ladders of a run.

    Args:
        max_prompt, max_response: longest prompt and response in tokens.
        slots: sequences decoded at once, rounded up to a multiple of `num_shards`.
        prefill_tokens: tokens of one prefill batch, padding included, unless it is a single prompt.
        turns: conversations are possible: each turn prefills all tokens before it, so a prefill may be as
            long as prompt and response together; and turns come back, so the number of slots never falls.
        draft_tokens: of a slot.
        draft_slots: maximum slots with drafts, rounded up as `slots`; a separate rung.
    """
    per_shard = -(-slots // num_shards)
    parts = (1,) if turns else (1, 2, 4, 8)  # batches below an eighth save little more
    counts = {-(-per_shard // part) for part in parts}
    with_drafts = -(-draft_slots // num_shards)
    if draft_tokens and with_drafts < per_shard and not turns:
        counts.add(with_drafts)
    # Widths of prefill, with and without earlier turns.
    longest = max_prompt + max_response * turns
    lengths = ladder(longest - 1, MIN_LENGTH, 2 if turns else 4)  # decode reads the last prompt token
    multiples = lambda counts: tuple(sorted({-(-n // num_shards) * num_shards for n in counts}))
    widths = (MIN_LENGTH // 2, *ladder(longest - 1, MIN_LENGTH, 1.5)) if turns else ()
    rows = lambda width: min(prefill_tokens // width, per_shard * num_shards)  # of different conversations
    shortest = max(2 * MIN_LENGTH, max_response // 5)  # short prompts do not pay for the longest one
    return ProgramShapes(
        max_prompt,
        max_response,
        tuple(n * num_shards for n in sorted(counts)),
        ladder(max_prompt + max_response, shortest, 1.5),
        prefill=tuple((length, row_counts(prefill_tokens // length)) for length in lengths),
        extend=tuple((width, multiples(row_counts(rows(width)))) for width in widths),
        draft_tokens=draft_tokens,
        draft_slots=with_drafts * num_shards,
    )


def pages_for(num_tokens: int, page_size: int) -> int:
    """Return the number of pages that hold so many tokens."""
    return -(-num_tokens // page_size)


def max_pages_for(num_tokens: int, page_size: int) -> int:
    """Return the pages that a sequence of so many tokens, prompt included, needs in an empty cache.

    The last page of the prompt exists twice (the shared one and the sequence's own copy), and the last token
    is never read, so never written.
    """
    return pages_for(num_tokens - 1, page_size) + 1


def num_copies(num_slots: int, num_shards: int) -> int:
    """Return the pages that one call of `Programs.copy_pages` copies, of all shards."""
    return num_shards * min(MAX_COPIES, num_slots // num_shards)


def state_rows(num_slots: int, num_shards: int) -> int:
    """Return the states that a paged cache holds, of all shards: one for each slot, one for each of their
    prompts or for a conversation that waits, and a null row in each shard."""
    return 2 * num_slots + num_shards


def ladder(top: int, lowest: int, factor: float) -> tuple[int, ...]:
    """Return `top`, `top` / factor, ... down to `lowest`, ascending: multiples of MIN_LENGTH, or of half of
    it for short lengths, for which padding matters."""
    unit = lambda size: MIN_LENGTH if size > 4 * MIN_LENGTH else MIN_LENGTH // 2
    rounded = lambda size: -int(-size // unit(size)) * unit(size)
    sizes, size = set(), rounded(max(top, 1))
    while size >= lowest or not sizes:
        sizes.add(rounded(size))
        size /= factor
    return tuple(sorted(sizes))


def row_counts(max_rows: int) -> tuple[int, ...]:
    """Return `max_rows` (at least 1), a quarter of it, ..., ascending: the smaller ones powers of two, as the
    numbers of prompts mostly are."""
    counts = [max(max_rows, 1)]
    while counts[-1] >= 4:
        counts.append(1 << (counts[-1] // 4).bit_length() - 1)
    return tuple(reversed(counts))


def round_up(sizes: tuple[int, ...], size: int) -> int:
    """Return the smallest of the ascending `sizes` that is >= size."""
    return next(one for one in sizes if one >= size)
