"""Responses of several turns: what both engines do when a turn has ended."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from jaxrl_llm.rollout.engine import Dialogue, DialogueError, Reply, Request, text_of
from jaxrl_llm.structs import Episode


class Response(Protocol):
    """A response in the making, as both engines have it."""

    request: Request
    index: int  # which of the request's responses
    ids: list[int]
    logprobs: list[float]
    finish: str
    observed: list[tuple[int, int]]  # which of `ids` are replies of the environment
    talk: Any  # of the last reply
    episode: Episode | None


def turn_start(response: Response) -> int:
    """Where in its ids the present turn begins."""
    return response.observed[-1][1] if response.observed else 0


def ask(dialogue: Dialogue, response: Response) -> Future[Reply]:
    """The reply to the turn that has just ended."""
    prompt_index, start = response.request.prompt_index, turn_start(response)
    return dialogue.reply(prompt_index, response.index, response.talk, response.ids, start)


def follow(response: Response, reply: Reply) -> bool:
    """Put a reply into the response. Returns whether the policy writes another turn."""
    response.talk, response.episode = reply.talk or response.talk, reply.episode
    if reply.done:
        return False
    start, end = len(response.ids), len(response.ids) + len(reply.ids)
    if end >= response.request.max_tokens:
        response.finish = "length"
        return False
    response.ids += reply.ids
    response.logprobs += [0.0] * len(reply.ids)
    response.observed.append((start, end))
    return True


def mask_of(response: Response) -> np.ndarray:
    """int8 [R'], 0 on what the environment said."""
    mask = np.ones(len(response.ids), np.int8)
    for start, end in response.observed:
        mask[start:end] = 0
    return mask


def answer_of(response: Response, tokenizer: Any) -> str | None:
    """Text of the last turn, where there are several."""
    return text_of(tokenizer, response.ids[turn_start(response) :]) if response.observed else None


def silent(dialogue: Dialogue, waiting: int) -> DialogueError:
    """What to raise when no reply comes."""
    return DialogueError(
        f"no environment has answered for {dialogue.patience:g} s, and {waiting} conversation(s) wait: does "
        "an async step block (time.sleep, requests)? Use await there, or plain functions, which get threads"
    )
