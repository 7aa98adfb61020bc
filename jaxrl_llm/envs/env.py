"""The interfaces of environments and tools, and the built-in environment `guess`."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxrl_llm.data.rows import Example
from jaxrl_llm.errors import UserError

Message = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """One turn of the policy, and the conversation up to it."""

    text: str  # without its end token
    messages: list[Message]  # the conversation up to and with this turn
    number: int  # 1, 2, ...
    last: bool  # no other turn follows: env.max_turns is reached
    read: Callable[[], str]  # gives all text before this turn as the policy read it, control tokens too


@dataclass(frozen=True)
class Step:
    """The reply of an environment to a turn."""

    observation: str | Sequence[Message] = ()  # text is a message of the role `user`
    reward: float | None = None  # a conversation's reward is their sum
    done: bool = False
    raw: bool = False  # the observation follows the turn as it stands, control tokens and all, no template
    tool_calls: int = 0
    tool_errors: int = 0
    timeouts: int = 0
    calls: Sequence[Mapping[str, Any]] = ()  # the tool calls, for logs: JSON with "name" and "arguments"
    state: str | None = None  # key of the state after the turn; None = the observation, "" = the first state


class Env(Protocol):
    """The environment of many conversations at once.

    Data of one conversation belong in its state. An exception ends the one conversation, as failed; so
    does a step that takes longer than --env.tool_timeout, unless the environment has `own_limits = True`.
    """

    async def reset(self, example: Example, seed: int) -> Any:
        """Return the state of a new conversation about this row; step and sample determine the seed."""

    async def step(self, state: Any, turn: Turn) -> Step:
        """Return observation and reward of a turn; may change the state."""


class ToolError(Exception):
    """A tool call that failed; the model reads the text."""


class Tool(Protocol):
    """Something that a model may call. One instance serves many conversations of one event loop.

    A tool that limits its concurrent calls has a semaphore `turn`; the wait for it does not count as time
    of the call.
    """

    schema: dict[str, Any]
    """OpenAI's function schema: {"name", "description", "parameters": a JSON schema}."""

    async def call(self, arguments: dict[str, Any]) -> str:
        """Return the text for the model. `arguments` have been checked against the schema.

        Raises:
            ToolError: the call failed; the model reads the error's text.
        """


def state_key(state: str | Sequence[Any]) -> str:
    """Return a short key of a state: a text, messages or token ids. Of nothing it is "", the first state.

    Of messages roles and contents count, but not the ids of tool calls, which are random.
    """
    if not isinstance(state, str):
        state = [(x["role"], x["content"]) if isinstance(x, dict) else x for x in state]
    return hashlib.sha256(json.dumps(state, default=str).encode()).hexdigest()[:16] if state else ""


@dataclass
class Game:
    """State of `Guess`."""

    number: int
    low: float = -math.inf  # largest guess below the number
    high: float = math.inf  # smallest guess above it


class Guess:
    """A game for rows whose answer is a whole number, such as task:guess: reward 1 once it is guessed."""

    role = "user"

    async def reset(self, example: Example, seed: int) -> Game:
        """Return a game with the number to find."""
        try:
            return Game(int(example.answer))
        except (TypeError, ValueError):
            raise UserError(f"the row's answer {str(example.answer)[:40]!r} is not a whole number") from None

    async def step(self, state: Game, turn: Turn) -> Step:
        """Return whether the number is higher or lower."""
        guess, reply = turn.text.strip(), "a number"
        if guess == str(state.number):
            return Step(reward=1.0, done=True)
        if turn.last:
            return Step(reward=0.0, done=True)
        if guess.isdecimal() and len(guess) < 20:
            reply = "higher" if int(guess) < state.number else "lower"
            if reply == "higher":
                state.low = max(state.low, int(guess))
            else:
                state.high = min(state.high, int(guess))
        return Step(reply, state=f"{state.low} to {state.high}")


ENVS: dict[str, Callable[[], Env]] = {"guess": Guess}
