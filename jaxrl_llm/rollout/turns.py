"""The end of a turn, for both engines: stop strings, and the environment's reply."""

from __future__ import annotations

import bisect
import dataclasses
import numbers
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from jaxrl_llm.forks import Fork
from jaxrl_llm.models.experts.router import unknown_route
from jaxrl_llm.rollout.engine import Dialogue, DialogueError, PartialResponse, Reply
from jaxrl_llm.structs import Episode

Detokenize = Callable[[Sequence[int]], str]


def stop_end(
    ids: Sequence[int], checked: int, stops: Sequence[str], detokenize: Detokenize, *, turn_start: int = 0
) -> int | None:
    """Return how many of `ids` to keep: up to the token that completes a stop string; None = no stop string.

    Args:
        ids: the response so far.
        checked: leading ids known to hold no stop string; only text around later ones is decoded.
        turn_start: start of the present turn; text before it does not end it.
    """
    start = max(turn_start, checked - max_stop_tokens(stops))
    holds_stop = lambda end: any(stop in text for text in (detokenize(ids[start:end]),) for stop in stops)
    if not holds_stop(len(ids)):
        return None
    ends = range(checked + 1, len(ids) + 1)
    return ends[bisect.bisect_left(ends, True, key=holds_stop)]  # longer texts contain it too


def cut_at_stop(
    response: PartialResponse, checked: int, stops: Sequence[str], detokenize: Detokenize
) -> bool:
    """Cut a turn at its first stop string, one of `stops` or of its own; return whether it has one.

    Args:
        checked: as of `stop_end`.
    """
    stops, start = (*stops, *response.turn_stop), response.turn_start
    end = stop_end(response.ids, checked, stops, detokenize, turn_start=start) if stops else None
    if end is not None:
        response.truncate(end)
    return end is not None


def max_stop_tokens(stops: Sequence[str]) -> int:
    """Return the most tokens that one of the stop strings spans.

    One of n characters has at most 4 n tokens of a byte each, and a few special ones that decode to nothing.
    """
    return 4 * max(map(len, stops)) + 4


def request_reply(dialogue: Dialogue, response: PartialResponse) -> Future[Reply]:
    """Send the turn that has just ended to the environment."""
    start = response.turn_start
    more = {"logprobs": response.logprobs[start:]} if response.request.opens else {}
    return dialogue.reply(
        response.request.prompt_index,
        response.index,
        response.conversation,
        response.ids,
        start=start,
        **more,
    )


def end_conversation(dialogue: Dialogue | None, response: PartialResponse) -> None:
    """Tell a dialogue that opens conversations that one has ended."""
    if dialogue and response.request.opens:
        dialogue.end(response.request.prompt_index, response.index)


def read_reply(future: Future[Reply] | Any, response: PartialResponse, vocab_size: int) -> Reply:
    """Return the reply of a finished future (of `concurrent.futures` or asyncio).

    A reply that is an error, has wrong types or ids outside the vocabulary ends this conversation with
    `Episode.failure`, so that its trajectory is masked; the others continue.

    Raises:
        DialogueError: no conversation can continue.
    """
    try:
        reply = future.result()
    except DialogueError:
        raise
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    else:
        failure = _reply_problem(reply, response, vocab_size)
    if not failure:
        return reply
    episode = response.episode or Episode()
    return Reply([], True, dataclasses.replace(episode, turns=episode.turns + 1, failure=failure))


def append_reply(response: PartialResponse, reply: Reply) -> bool:
    """Append a reply that `read_reply` has checked. Returns whether another turn follows."""
    if reply.conversation is not None:
        response.conversation = reply.conversation
    response.episode = reply.episode
    response.turn_tokens, response.turn_stop = reply.max_tokens, reply.stop
    if reply.done:
        response.finish = response.finish or "stop"
        return False
    if not response.ids:  # the request opens
        response.prompt_ids = list(reply.ids)
        response.request = response.request._replace(prompt_ids=np.array(reply.ids, np.int32))
        return True
    ids, keep = reply.ids, response.num_present if reply.keep is None else int(reply.keep)
    if keep < response.num_present and not ids:  # a fork has a token of its own
        keep, ids = keep - 1, response.present[keep - 1 : keep].tolist()
    start, end = len(response.ids), len(response.ids) + len(ids)
    if end >= response.request.max_tokens:
        response.finish = "length"
        return False
    if keep < response.num_present:
        _fork(response, keep)
    response.append(ids, [0.0] * len(ids), response.versions[-1:] * len(ids))
    response.observed.append((start, end))
    response.finish = ""
    return True


def _fork(response: PartialResponse, keep: int) -> None:
    """Let the next token follow the first `keep` tokens of the present context."""
    first = len(response.request.prompt_ids) + len(response.ids)
    response.forks.append(Fork(first, keep))
    if response.routes:  # the last token sampled is never read
        unknown = np.full_like(response.routes[0], unknown_route(response.routes[0].dtype))
        response.routes += [unknown] * (first - len(response.routes))


def _reply_problem(reply: Any, response: PartialResponse, vocab_size: int) -> str:
    """Return the problem with a reply, or ""."""
    if not isinstance(reply, Reply) or not isinstance(reply.episode, Episode):
        return f"the reply is {type(reply).__name__}, not a Reply with an Episode"
    if not isinstance(reply.done, bool):
        return f"the reply's done is {reply.done!r:.100}, not True or False"
    if reply.done:
        return ""
    if not isinstance(reply.ids, list) or not all(isinstance(i, numbers.Integral) for i in reply.ids):
        return f"the reply's ids are not a list of integers: {reply.ids!r:.100}"
    if reply.keep is not None:
        keep, least, most = reply.keep, 0 if reply.ids else 1, response.num_present
        is_count = isinstance(keep, numbers.Integral) and not isinstance(keep, bool)
        if not is_count or not least <= keep <= most:
            return f"the reply's keep is {keep!r:.100}, not {least} to {most} tokens of the context"
    wrong = next((i for i in reply.ids if not 0 <= i < vocab_size), None)
    return "" if wrong is None else f"the reply's token id {wrong} is outside the vocabulary of {vocab_size}"


def no_reply_error(dialogue: Dialogue, waiting: int) -> DialogueError:
    """Return the error of a dialogue without replies."""
    return DialogueError(
        f"no environment has answered for {dialogue.patience:g} s, and {waiting} conversation(s) wait: does "
        "an async step block (time.sleep, requests)? Use await there, or plain functions, which get threads"
    )
