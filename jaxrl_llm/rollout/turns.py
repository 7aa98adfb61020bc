"""Conversations of several turns: what both engines do when a turn has ended."""

from __future__ import annotations

from concurrent.futures import Future

from jaxrl_llm.rollout.engine import Dialogue, DialogueError, PartialResponse, Reply


def request_reply(dialogue: Dialogue, response: PartialResponse) -> Future[Reply]:
    """Send the turn that has just ended to the environment."""
    return dialogue.reply(
        response.request.prompt_index,
        response.index,
        response.conversation,
        response.ids,
        response.turn_start,
    )


def append_reply(response: PartialResponse, reply: Reply) -> bool:
    """Append the environment's reply to the response. Returns whether another turn follows."""
    response.conversation = reply.conversation or response.conversation
    response.episode = reply.episode
    if reply.done:
        return False
    start, end = len(response.ids), len(response.ids) + len(reply.ids)
    if end >= response.request.max_tokens:
        response.finish = "length"
        return False
    response.append(reply.ids, [0.0] * len(reply.ids), response.versions[-1:] * len(reply.ids))
    response.observed.append((start, end))
    response.finish = ""
    return True


def no_reply_error(dialogue: Dialogue, waiting: int) -> DialogueError:
    """Return what to raise when no reply comes."""
    return DialogueError(
        f"no environment has answered for {dialogue.patience:g} s, and {waiting} conversation(s) wait: does "
        "an async step block (time.sleep, requests)? Use await there, or plain functions, which get threads"
    )
