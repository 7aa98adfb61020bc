"""The few shapes that rollout's programs come in.

Every shape is a compilation, and one in the middle of a run stalls it. So sizes come from short ladders
below the longest prompt and response of the run, all of which can be compiled before it starts.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST = 32  # columns; less saves nothing


@dataclass(frozen=True)
class Sizes:
    """Ladders of one run, each ascending."""

    max_prompt_tokens: int
    max_response_tokens: int
    slots: tuple[int, ...]
    """Sequences decoded side by side; new samples only enter when all slots are there."""
    lengths: tuple[int, ...]
    """Tokens that a slot of the cache holds."""
    prompts: tuple[tuple[int, tuple[int, ...]], ...]
    """(width, numbers of rows) of the prompts that one prefill reads."""
    pages: int = 0
    """Of each device share of the slots, in the paged cache."""

    @property
    def width(self) -> int:
        """Of the widest prompts."""
        return self.prompts[-1][0]


def make_sizes(
    max_prompt: int, max_response: int, slots: int, ways: int, prefill_tokens: int, turns: bool = False
) -> Sizes:
    """Sizes of a run.

    Args:
        max_prompt, max_response: tokens at most.
        slots: sequences side by side, rounded up to a multiple of `ways`, the devices that share them.
        prefill_tokens: prompt tokens that one prefill reads, padding included, if more than one prompt.
        turns: what has been said so far is read again before each turn, so prompts may be as long.
    """
    share = -(-slots // ways)
    shares = {-(-share // part) for part in (1, 2, 4, 8)}  # below an eighth there is little left to save
    longest = max_prompt + max_response * turns
    widths = ladder(longest - 1, LEAST, 2 if turns else 4)  # decode reads the last one
    return Sizes(
        max_prompt,
        max_response,
        tuple(n * ways for n in sorted(shares)),
        ladder(max_prompt + max_response, 2 * LEAST, 1.5)[-5:],
        tuple((width, row_counts(prefill_tokens // width)) for width in widths),
    )


def pages_of(tokens: int, page: int) -> int:
    """Pages that so many tokens take."""
    return -(-tokens // page)


def most_pages(tokens: int, page: int) -> int:
    """Pages that a sample of so many tokens, its prompt included, needs when nobody else is there: the last
    page of its prompt is there twice, and its last token is never read."""
    return pages_of(tokens - 1, page) + 1


def ladder(top: int, least: int, factor: float) -> tuple[int, ...]:
    """`top`, `top` / factor, ... while at least `least`; multiples of LEAST; ascending."""
    rounded = lambda size: -int(-size // LEAST) * LEAST
    sizes, size = set(), rounded(max(top, 1))
    while size >= least or not sizes:
        sizes.add(rounded(size))
        size /= factor
    return tuple(sorted(sizes))


def row_counts(most: int) -> tuple[int, ...]:
    """`most` rows (at least 1), a quarter, ...; ascending."""
    counts = [max(most, 1)]
    while counts[-1] >= 4:
        counts.append(counts[-1] // 4)
    return tuple(reversed(counts))


def at_least(sizes: tuple[int, ...], wanted: int) -> int:
    """The smallest that is >= wanted."""
    return next(size for size in sizes if size >= wanted)


def bucket(length: int, least: int) -> int:
    """The smallest of least * (1, 1.5, 2, 3, 4, 6, 8, ...) that is >= length, where no maximum is known."""
    size = least
    while size < length:
        size = size * 3 // 2 if (size // least).bit_count() == 1 and size * 3 // 2 >= length else size * 2
    return size
