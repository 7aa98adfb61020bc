"""Stop strings: found in the text, cut in the ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def stop_end(
    ids: Sequence[int],
    checked: int,
    stops: Sequence[str],
    decode_fn: Callable[[Sequence[int]], str],
    first: int = 0,
) -> int | None:
    """How many of `ids` to keep: up to and with the token that completes a stop string; None = no stop.

    Args:
        ids: the response so far.
        checked: leading ids known to hold no stop string; only text around later ones is decoded.
        first: where the present turn begins: what was said before it does not end it.
    """
    # A stop string of n characters spans at most 4 n byte tokens, plus what decodes to nothing.
    start = max(first, checked - 4 * max(map(len, stops)) - 4)
    found = lambda end: any(stop in text for text in (decode_fn(ids[start:end]),) for stop in stops)
    if not found(len(ids)):
        return None
    return next(end for end in range(checked + 1, len(ids) + 1) if found(end))
