"""What an environment is: it answers turns of the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxrl_llm.data.rows import Example

Message = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What the policy wrote, and when."""

    text: str  # without its end token
    messages: list[Message]  # the conversation up to and with this turn
    number: int  # 1, 2, ...
    last: bool  # no other turn follows: env.max_turns is reached
    read: Callable[[], str]  # gives all text before this turn as the policy read it, control tokens too


@dataclass(frozen=True)
class Step:
    """What an environment answers."""

    says: str | Sequence[Message] = ()  # text is a message of the role `user`
    reward: float | None = None  # a conversation's reward is their sum
    done: bool = False
    raw: bool = False  # `says` follows the turn as it stands, control tokens and all, without a template
    tool_calls: int = 0
    tool_errors: int = 0
    timeouts: int = 0


class Env(Protocol):
    """The other side of many conversations at once.

    What belongs to one of them lives in its state. An exception ends the one conversation, as failed; so
    does a step that takes longer than --env.tool_timeout, unless the environment says `own_limits = True`.
    """

    async def reset(self, example: Example, seed: int) -> Any:
        """The state of a new conversation about this row; the seed is a function of step and sample."""

    async def step(self, state: Any, turn: Turn) -> Step:
        """The answer to a turn; may change the state."""
