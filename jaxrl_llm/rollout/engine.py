"""The protocol of rollout engines (prompts in, trajectories out) and the values that pass through it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
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


@dataclass(eq=False)
class PartialResponse:
    """Tokens generated so far of one response. Engines append to it; a checkpoint holds it."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # nats; 0 on observations
    versions: list[int] = field(default_factory=list)  # the policy version that generated each token
    finish: str = ""  # "stop" or "length"; "" = unfinished
    observed: list[tuple[int, int]] = field(default_factory=list)
    """Spans of `ids` that are observations: the environment's replies between the policy's turns."""
    # Not in a checkpoint: `new_responses` sets them for the run that continues it.
    request: Request | None = None
    index: int = 0  # which of the request's responses
    key: np.ndarray | None = None  # uint32 [2], random key data: what is drawn follows from it alone
    conversation: Any = None  # of the environment's last reply
    episode: Episode | None = None

    @property
    def turn_start(self) -> int:
        """The place in `ids` where the present turn begins."""
        return self.observed[-1][1] if self.observed else 0

    @property
    def context(self) -> np.ndarray:
        """Prompt, turns and observations before the present turn, int32 [.]."""
        prompt = np.asarray(self.request.prompt_ids, np.int32)
        return np.concatenate([prompt, np.array(self.ids[: self.turn_start], np.int32)])

    def append(self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int] = ()) -> None:
        """Add tokens of the policy."""
        self.ids += ids
        self.logprobs += logprobs
        self.versions += versions

    def copy(self) -> PartialResponse:
        """Return the response as it is now; the original may grow."""
        lists = {name: [*getattr(self, name)] for name in ("ids", "logprobs", "versions", "observed")}
        return replace(self, **lists)


class Pending(Protocol):
    """Responses that are being generated."""

    def result(self) -> list[Trajectory]:
        """Wait for all of them. A collective, as `generate`."""


class DialogueError(RunError):
    """No conversation can go on: nobody answers, or the chat template rewrites what was said."""


class Reply(NamedTuple):
    """What an environment answers to a turn of the policy."""

    ids: list[int]  # what the policy reads next, up to where its next turn begins
    done: bool  # the conversation has ended; `ids` are not used
    episode: Episode
    conversation: Any = None  # so far, for the next reply


class Dialogue(Protocol):
    """The other side of the conversations of one `generate`."""

    patience: float
    """Seconds without any reply after which none will come."""

    def reply(
        self, prompt_index: int, response_index: int, conversation: Any, ids: Sequence[int], start: int
    ) -> Future[Reply]:
        """The answer to the turn ids[start:] of a response; never waits for it.

        Args:
            conversation: that of the reply before; None for the first turn.
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
        partial: Sequence[PartialResponse] = (),
    ) -> Pending:
        """Begin to generate responses, in order (request, response index).

        Partial responses, one for each if there are any, are continued. A conversation's turns are sent to
        the dialogue again; where its reply differs now, what followed is generated again.

        Sample (p, g) draws its tokens with fold_in(fold_in(key, p), g) alone, so its text does not depend
        on what else is in flight.

        With a dialogue, a turn that ends before `max_tokens` is answered and the next one generated, until
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
        """Return copies of pending responses as they are now, in process 0; generation goes on."""

    def usage(self) -> Metrics:
        """How busy it was since it was last asked."""

    def release_memory(self) -> None:
        """Give memory to the trainer: nothing is generated until the next `publish`."""


def end_ids(tokenizer: Any, more: Sequence[int] = ()) -> tuple[int, ...]:
    """Ids that end a response: the tokenizer's end token, and those of a generation_config.json."""
    own = getattr(tokenizer, "eos_token_id", None)
    return tuple(dict.fromkeys([*([] if own is None else [own]), *more]))


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """What rewards and people read of a response; "" without a tokenizer."""
    if tokenizer is None:
        return ""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
