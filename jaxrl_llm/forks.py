"""Turns of a conversation, where its history was rewritten, and the contexts that the policy read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


class Fork(NamedTuple):
    """The point at which a context was rewritten. Tokens are numbered from the prompt's first one."""

    first: int  # the first token that follows the kept ones in the new context
    keep: int  # leading tokens of the context before that the new context keeps


@dataclass(frozen=True)
class TurnRecord:
    """An environment's record of one turn of the policy, for logs."""

    end: int  # tokens of the response up to the end of the turn
    message: int  # number of the turn in `Episode.messages`
    after: int  # number of the turn that it continues; -1 = it begins a conversation
    reward: float | None = None  # of the step that answered it
    calls: tuple[dict[str, Any], ...] = ()  # tool calls: "name", "arguments", "id"; or "text" and "error"
    opening: dict[str, Any] = field(default_factory=dict)
    """Of a conversation that a program begins: "messages" and "tools"."""


class Context(NamedTuple):
    """Tokens that the policy read in succession, and its turns among them."""

    read: np.ndarray  # int64 [c], numbers of the tokens, in the order in which they are read
    keep: int  # leading tokens that the context before has as well; the others are in no context before


def contexts(num_tokens: int, forks: Sequence[Fork] = ()) -> list[Context]:
    """Return the contexts of a conversation, one more than it has forks.

    The tokens of context i are tokens[read]; read[keep:] are consecutive numbers, and each token of the
    conversation is among them in one context: the context that it was sampled or observed in.

    Args:
        num_tokens: of prompt and response.
    """
    read, keep, first = np.zeros(0, np.int64), 0, 0
    found = []
    for end, next_keep in [*forks, (num_tokens, 0)]:
        read = np.concatenate([read[:keep], np.arange(first, end)])
        found.append(Context(read, keep))
        keep, first = next_keep, end
    return found


def common_length(equal: np.ndarray) -> int:
    """Return the number of leading tokens that two texts have in common.

    Args:
        equal: bool [n], whether their tokens are equal at each place that both have.
    """
    return len(equal) if equal.all() else int(np.argmin(equal))
