"""The protocol of rollout engines (prompts in, trajectories out) and the values that pass through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxrl_llm.errors import RunError
from jaxrl_llm.ranges import LARGEST, CountOrZero, Fraction, Range
from jaxrl_llm.structs import Episode, Metrics, Params, Trajectory

MIN_TEMPERATURE = 0.01  # below it logits / temperature overflow
MAX_STOP_LENGTH = 1000  # characters; the text after each chunk is searched for all stop strings
MAX_STOPS = 256


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are sampled. Reported log-probs are of the full softmax at `temperature`."""

    temperature: Annotated[float, Range(0.0, 100.0, usual="1.0 is usual for training, 0 is greedy")] = 1.0
    """0 = greedy."""
    top_k: CountOrZero = 0
    """Keep the k likeliest tokens; 0 = all."""
    top_p: Annotated[float, Range(0.0, 1.0, open_low=True, usual="1.0 keeps all tokens")] = 1.0
    """Keep the smallest set of tokens with at least this probability (nucleus)."""
    min_p: Fraction = 0.0
    """Drop tokens less likely than this times the likeliest."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; kept in it."""
    stop_tokens: tuple[Annotated[int, Range(0, LARGEST)], ...] = ()
    """Token ids that end a response, besides the tokenizer's end token; kept in it."""
    ignore_eos: bool = False
    """Generate max_tokens tokens, whatever they are (benchmarks)."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, what is wrong with it)."""
        if 0 < self.temperature < MIN_TEMPERATURE:
            yield (
                "temperature",
                f"is {self.temperature:g}: it must be 0 (greedy) or at least {MIN_TEMPERATURE}.",
            )
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_LENGTH:
                yield (
                    "stop",
                    f"has a string of {len(text)} characters: each must have 1 to {MAX_STOP_LENGTH}.",
                )
        for name in ("stop", "stop_tokens"):
            if len(getattr(self, name)) > MAX_STOPS:
                yield name, f"has {len(getattr(self, name))} entries: at most {MAX_STOPS} are allowed."


class Request(NamedTuple):
    """One prompt and the number of responses to generate."""

    prompt_ids: np.ndarray  # int32 [.]
    prompt_index: int  # identifies the group; with the response index, the random key of each response
    num_responses: int
    max_tokens: int  # most tokens of a response, observations included


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
    conversation: Any = None  # of the environment's last reply; None before it
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
        """Wait for all of them and return them as `Engine.generate` does. A collective."""


class DialogueError(RunError):
    """No conversation can go on: no environment replies, or the chat template rewrites earlier turns."""


class Reply(NamedTuple):
    """The environment's reply to a turn of the policy."""

    ids: list[int]  # the observation: what the policy reads next, up to the start of its next turn
    done: bool  # the conversation has ended; `ids` are not used
    episode: Episode
    conversation: Any = None  # so far, for the next reply; None = as before


class Dialogue(Protocol):
    """The environments of all conversations of one `generate`."""

    patience: float
    """Seconds without any reply after which the run ends."""

    def reply(
        self, prompt_index: int, response_index: int, conversation: Any, ids: Sequence[int], start: int
    ) -> Future[Reply]:
        """Return a future of the reply to the turn ids[start:] of a response, without waiting for it.

        Args:
            conversation: that of the reply before; None for the first turn.
            ids: the response so far, earlier turns and observations included.

        Raises (the future):
            DialogueError: no conversation can go on. What is wrong with one alone is in its Episode; any
                other exception ends this conversation alone.
        """


class Engine(Protocol):
    """The interface of the native engine and of a pool of SGLang servers.

    With several processes each calls every method, in the same order and with the same arguments (they are
    collectives), and gets the same results.
    """

    def publish(self, params: Params, version: int) -> Metrics:
        """Generate with these weights from now on. A collective.

        Args:
            params: the trainer's weights, sharded as it has them; copied, so it may donate them afterwards.
            version: policy version of the tokens that they generate (`Trajectory.versions`).

        Returns: metrics rollout/publish_seconds, rollout/publish_bytes and the engine's own.

        Raises:
            ServerError: no server could take the weights.
        """

    def start(
        self,
        requests: list[Request],
        sampling: SamplingConfig,
        key: jax.Array,
        dialogue: Dialogue | None = None,
        partial: Sequence[PartialResponse] = (),
    ) -> Pending:
        """Begin to generate responses, and return at once. A collective.

        Response g to prompt p is sampled with keys derived from fold_in(fold_in(key, p), g) (`keys.py`), so
        its text does not depend on other responses, their number or order.

        With a dialogue, a turn that ends before `max_tokens` gets a reply and the next turn is generated,
        until the dialogue is done or `max_tokens`, observations included, are used up (finish "length"). An
        observation's tokens have mask 0 and log-prob 0. A slow reply delays its own conversation alone.

        Args:
            requests: prompts of different `prompt_index`.
            key: of this call; scalar typed key.
            dialogue: the environments, where there are several turns.
            partial: responses to continue, one for each (request, response index) in order, or none. The
                turns of a conversation are sent to the dialogue again; where its reply differs, what
                followed is generated again.

        Raises:
            UserError: an impossible prompt or sampling setting, or nothing published.
        """

    def generate(
        self,
        requests: list[Request],
        sampling: SamplingConfig,
        key: jax.Array,
        dialogue: Dialogue | None = None,
    ) -> list[Trajectory]:
        """Call `start` and wait for the result. A collective.

        Returns: a trajectory for each (request, response index), in order.

        Raises:
            UserError: as `start`.
            DialogueError: no conversation can go on.
            ServerError: no server can be used any more.
        """

    def snapshot(self, pending: Sequence[Pending]) -> list[list[PartialResponse]]:
        """Return copies of pending responses as they are now, for a checkpoint. A collective.

        Generation goes on. Returns: a list for each of `pending`, in order; in process 0 alone they are
        filled.
        """

    def usage(self) -> Metrics:
        """Return throughput and utilisation metrics since the previous call."""

    def release_memory(self) -> None:
        """Free device memory that the trainer shares with the engine. A collective.

        `start` needs a `publish` before it then. Servers on devices of their own go on generating.
        """


def end_ids(tokenizer: Any, more: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the ids that end a response: the tokenizer's end token, and `more` (generation_config.json)."""
    own = getattr(tokenizer, "eos_token_id", None)
    return tuple(dict.fromkeys([*([] if own is None else [own]), *more]))


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode a response as rewards and people read it; "" without a tokenizer."""
    if tokenizer is None:
        return ""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
