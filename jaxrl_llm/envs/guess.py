"""Guess the number: the environment says whether it is higher or lower."""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl_llm.data.rows import Example
from jaxrl_llm.envs.env import Step, Turn


@dataclass
class Secret:
    """One game."""

    number: int


class Guess:
    """A game for rows whose answer is a whole number, such as task:guess: 1 if it is found, else 0."""

    role = "user"

    async def reset(self, example: Example, seed: int) -> Secret:
        return Secret(int(example.answer))

    async def step(self, state: Secret, turn: Turn) -> Step:
        guess = turn.text.strip()
        if guess == str(state.number):
            return Step(reward=1.0, done=True)
        if turn.last:
            return Step(reward=0.0, done=True)
        if not guess.isdecimal():
            return Step("a number")
        return Step("higher" if int(guess) < state.number else "lower")
