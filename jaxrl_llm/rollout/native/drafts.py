"""Draft tokens: n-gram speculation that never changes the text.

The next tokens of a slot are guessed by prompt lookup (arXiv 2304.04487, arXiv 2511.13841): the last n-gram
is looked up in earlier text (the response itself, other responses to its prompt, or responses of the previous
epoch); the tokens after its latest match are the draft. `Programs.decode_drafts` reads the last token and the
draft in one forward pass and draws a token at each place. Each token has a separate uniform number, a
function of (sample, position), so the drawn tokens equal those of decoding one at a time; tokens are kept up
to and including the first that differs from the draft. The lookup runs on the device, between the forwards of
a chunk; only texts of other responses come from the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxrl_llm.rollout.engine import PartialResponse
from jaxrl_llm.structs import Metrics

MAX_MATCH = 8
"""Tokens of the longest n-gram that is looked up."""
MAX_MEMORY = 2**26
"""Tokens of earlier epochs that are kept, 4 bytes each."""
MIN_SPEEDUP = 1.5
"""Tokens that a forward with drafts has to yield for each slot; below it, chunks without drafts follow.

On two CPU cores a forward of a model of 135M weights takes 1.2 to 1.5 times as long with 7 draft tokens, for
2 to 8 slots."""
MAX_PAUSE = 8
"""Chunks without drafts that follow at most until drafts are tried again."""


def propose_drafts(
    texts: Int[Array, "S C"], own_start: int, positions: Int[Array, "S"], num_drafts: int
) -> Int[Array, "S n"]:
    """Return what followed the longest, latest earlier occurrence of the last tokens of each slot's text.

    A text that repeats itself with a period shorter than the draft is continued with that period.

    Args:
        texts: texts to look into, each followed by -1; the slot's own is the last, from column own_start > 0
            on, and -1 follows it up to the end of the row.
        positions: of the last token in the slot's own text.

    Returns: int32; -1 = no draft, also at all later places of the row.
    """
    columns = jnp.arange(texts.shape[1])
    last = (own_start + positions)[:, None]
    same, length = jnp.ones(texts.shape, bool), jnp.zeros(texts.shape, jnp.int32)
    for i in range(MAX_MATCH):
        token = jnp.take_along_axis(texts, jnp.maximum(last - i, 0), axis=1)
        before = jnp.pad(texts, ((0, 0), (i, 0)), constant_values=-1)[:, : texts.shape[1]]
        same &= (before == token) & (token >= 0)
        length += same
    follows = jnp.pad(texts[:, 1:], ((0, 0), (0, 1)), constant_values=-1) >= 0
    length = jnp.where(follows, length, 0)  # 0 at the last token, too
    match = jnp.argmax(length * texts.shape[1] + columns, axis=1)[:, None]
    source = match + 1 + jnp.arange(num_drafts) % jnp.maximum(last - match, 1)
    drafts = jnp.take_along_axis(texts, source, axis=1)
    found = jnp.take_along_axis(length, match, axis=1) > 0
    return jnp.where(found & jnp.cumprod(drafts >= 0, axis=1, dtype=bool), drafts, -1)


def accept_drafts(
    state: Any,
    drafts: Int[Array, "S n"],
    drawn: Int[Array, "S n+1"],
    read: Bool[Array, "S n+1"],
    *,
    stop_ids: Int[Array, "."],
) -> tuple[Any, Int[Array, "S"]]:
    """Append the drawn tokens of each slot up to the first that its draft did not have.

    Args:
        state: `slots.SlotState`.
        drawn: the token after the slot's last one, and after each token of the draft.
        read: whether the token before was read; a prefix of each row, empty for inactive slots.
        stop_ids: token ids that end a response.

    Returns: (state, number of appended tokens).
    """
    ended = jnp.any(drawn[..., None] == stop_ids, axis=-1)
    agrees = (drawn[:, :-1] == drafts) & ~ended[:, :-1] & read[:, 1:]
    kept = read[:, 0] + jnp.sum(jnp.cumprod(agrees, axis=1, dtype=jnp.int32), axis=1)
    newest = jnp.maximum(kept - 1, 0)[:, None]
    of_newest = lambda x: jnp.take_along_axis(x, newest, axis=1)[:, 0]
    counts = state.counts + kept
    state = state._replace(
        tokens=jnp.where(state.active, of_newest(drawn), state.tokens),
        positions=state.positions + kept,
        counts=counts,
        active=state.active & ~of_newest(ended) & (counts < state.limits),
    )
    return state, kept


class DraftMemory:
    """The last responses to each prompt, for drafts in the next epoch, as far as they fit into MAX_MEMORY.

    A resumed run starts without them: drafts change its speed, not its text.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._texts: dict[bytes, list[np.ndarray]] = {}

    def recall(self, response: PartialResponse) -> list[np.ndarray]:
        """Return the responses to the same prompt, int32 [.] each."""
        return self._texts.get(prompt_of(response), [])

    def remember(self, responses: Sequence[PartialResponse]) -> None:
        """Keep finished responses in place of earlier ones to their prompts."""
        for prompt, group in by_prompt(responses).items():
            texts = [np.array(response.ids, np.int32) for response in group]
            more = sum(map(len, texts)) - sum(map(len, self._texts.get(prompt, [])))
            if self.num_tokens + more <= MAX_MEMORY:
                self._texts[prompt] = texts
                self.num_tokens += more


class DraftTexts:
    """The texts for the drafts of one call of `generate`, and whether drafts are worth it.

    Args:
        memory: responses of earlier calls.
        responses: all of the call; they grow.
        max_tokens: of the texts of other responses that a slot looks into.
    """

    def __init__(self, memory: DraftMemory, responses: Sequence[PartialResponse], max_tokens: int):
        self.memory, self.max_tokens = memory, max_tokens
        self._arrays: dict[int, np.ndarray] = {}  # id of a response -> its tokens
        self._responses, self._drafted, self.accepted = responses, 0, 0
        self._failures = self._pause = 0  # chunks in a row that were of little use; chunks without drafts

    @functools.cached_property
    def _groups(self) -> dict[bytes, list[PartialResponse]]:
        return by_prompt(self._responses)

    def texts(self, running: Sequence[PartialResponse | None], width: int) -> np.ndarray:
        """Return the rows of `propose_drafts`, int32 [S, max_tokens + width]; own_start is max_tokens.

        Args:
            running: response of each slot.
            width: columns of a slot's own text.
        """
        rows = np.full((len(running), self.max_tokens + width), -1, np.int32)
        for row, response in zip(rows, running, strict=True):
            if response is None:
                continue
            group = self._groups[prompt_of(response)]
            others = self.memory.recall(response) + [self._ids(one) for one in group if one is not response]
            joined = np.concatenate([np.append(ids, np.int32(-1)) for ids in others] or [row[:0]])
            joined = joined[-self.max_tokens :]
            row[self.max_tokens - len(joined) : self.max_tokens] = joined
            own = np.concatenate([response.request.prompt_ids, self._ids(response)])
            own = (response.present if response.forks else own)[:width]
            row[self.max_tokens :][: len(own)] = own
        return rows

    def use(self) -> bool:
        """Return whether the next chunk uses drafts: not for a while after drafts of little use."""
        self._pause -= 1
        return self._pause < 0

    def record(self, tokens: int, drafted: int, accepted: int) -> None:
        """Count the tokens of a chunk with drafts.

        Args:
            tokens: generated by all slots; `accepted` of them in addition to one per forward pass.
        """
        self._drafted += drafted
        self.accepted += accepted
        useful = tokens >= MIN_SPEEDUP * (tokens - accepted)
        self._failures = 0 if useful else self._failures + 1
        self._pause = min(2**self._failures - 1, MAX_PAUSE)

    def finish(self) -> Metrics:
        """Remember the responses; return the draft tokens that were read, and the share that was accepted."""
        self.memory.remember(self._responses)
        share = self.accepted / max(self._drafted, 1)
        return {"rollout/draft_tokens": self._drafted, "rollout/draft_accepted": share}

    def _ids(self, response: PartialResponse) -> np.ndarray:
        """Return the tokens of a response; only new ones are converted."""
        known = self._arrays.get(id(response), np.zeros(0, np.int32))[: len(response.ids)]
        self._arrays[id(response)] = np.append(known, np.array(response.ids[len(known) :], np.int32))
        return self._arrays[id(response)]


def prompt_of(response: PartialResponse) -> bytes:
    """Return equal bytes for responses to equal prompts."""
    return np.asarray(response.request.prompt_ids, np.int32).tobytes()


def by_prompt(responses: Sequence[PartialResponse]) -> dict[bytes, list[PartialResponse]]:
    """Return the responses to each prompt, in order."""
    groups: dict[bytes, list[PartialResponse]] = {}
    for response in responses:
        groups.setdefault(prompt_of(response), []).append(response)
    return groups
