"""What a rollout engine is: prompts in, trajectories out."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxrl_llm.errors import RunError
from jaxrl_llm.structs import Episode, Metrics, Params, Trajectory


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn. Reported log-probs are of the full softmax at `temperature`."""

    temperature: float = 1.0
    """0 = greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 = all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this probability (nucleus)."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the likeliest."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; kept in it."""
    stop_tokens: tuple[int, ...] = ()
    """Token ids that end a response, besides the tokenizer's end token; kept in it."""
    ignore_eos: bool = False
    """Run to max_tokens whatever is written (benchmarks)."""


class Request(NamedTuple):
    """One prompt and how many responses it wants."""

    prompt_ids: np.ndarray  # int32 [.]
    prompt_index: int  # names the group, and with the response index the random key of each sample
    num_responses: int
    max_tokens: int  # response tokens at most


class PartialResponse(NamedTuple):
    """What there is of a response; it can be continued."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: str  # "" = not done
    observed: tuple[tuple[int, int], ...] = ()  # which of `ids` the environment said


class Pending(Protocol):
    """Responses that are being written."""

    def result(self) -> list[Trajectory]:
        """Wait for all of them. A collective, as `generate`."""


class DialogueError(RunError):
    """No conversation can go on: nobody answers, or the chat template rewrites what was said."""


class Reply(NamedTuple):
    """What an environment answers to a turn of the policy."""

    ids: list[int]  # what the policy reads next, up to where its next turn begins
    done: bool  # the conversation has ended; `ids` are not used
    episode: Episode
    talk: Any = None  # the conversation so far, for the next reply


class Dialogue(Protocol):
    """The other side of the conversations of one `generate`."""

    patience: float
    """Seconds without any reply after which none will come."""

    def reply(
        self, prompt_index: int, response_index: int, talk: Any, ids: Sequence[int], start: int
    ) -> Future[Reply]:
        """The answer to the turn ids[start:] of a response; never waits for it.

        Args:
            talk: that of the reply before; None for the first turn.
            ids: the response so far, earlier turns and replies included.

        Raises (the future):
            DialogueError: no conversation can go on. What is wrong with one alone is in its Episode.
        """


class Engine(Protocol):
    """The native engine and a pool of servers look the same to the loop."""

    def publish(self, params: Params, version: int) -> Metrics:
        """Roll out with these weights from now on."""

    def start(
        self,
        requests: list[Request],
        sampling: SamplingConfig,
        key: jax.Array,
        dialogue: Dialogue | None = None,
        written: Sequence[PartialResponse] = (),
    ) -> Pending:
        """Begin to write responses in order (request, response index); `written`, if any, is continued.
        A conversation's turns are told to the dialogue again; where it now says something else, what
        followed is written anew.

        Sample (p, g) draws its tokens with fold_in(fold_in(key, p), g) alone, so its text does not depend
        on what else is in flight.

        With a dialogue, a turn that ends before `max_tokens` is answered and the next one written, until
        the dialogue is done or all of `max_tokens`, replies included, are used up (finish "length"). A
        reply's tokens have mask 0 and log-prob 0. A slow reply holds up its own conversation alone.
        """

    def generate(
        self,
        requests: list[Request],
        sampling: SamplingConfig,
        key: jax.Array,
        dialogue: Dialogue | None = None,
    ) -> list[Trajectory]:
        """`start`, and wait."""

    def snapshot(self, pending: Sequence[Pending]) -> list[list[PartialResponse]]:
        """What there is of pending responses, in process 0; their writing goes on."""

    def usage(self) -> Metrics:
        """How busy it was since it was last asked."""

    def rest(self) -> None:
        """Nothing is generated until the next `publish`: memory may go to the trainer."""


def end_ids(tokenizer: Any, more: Sequence[int] = ()) -> tuple[int, ...]:
    """Ids that end a response: the tokenizer's end token, and those of a generation_config.json."""
    own = getattr(tokenizer, "eos_token_id", None)
    return tuple(dict.fromkeys([*([] if own is None else [own]), *more]))


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """What rewards and people read of a response; "" without a tokenizer."""
    if tokenizer is None:
        return ""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
