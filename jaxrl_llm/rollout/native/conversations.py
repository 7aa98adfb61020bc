"""Conversations of the native engine: turns that wait for the environment's reply."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.rollout.engine import Dialogue, DialogueError, PartialResponse, Reply
from jaxrl_llm.rollout.keys import turn_keys
from jaxrl_llm.rollout.turns import append_reply, end_conversation, no_reply_error, read_reply, request_reply

BATCH_WINDOW = 0.002  # seconds without another reply before the received ones form a batch


class TurnQueue:
    """Turns are sent to the dialogue by process 0; all processes get the replies, in one order.

    Args:
        responses: all of the call, in an order that every process has.
        share: gives every process process 0's value (a collective).
        vocab_size: of the model; a reply with other ids ends its conversation.
    """

    def __init__(
        self,
        dialogue: Dialogue,
        responses: Sequence[PartialResponse],
        share: Callable[[Any], Any],
        vocab_size: int,
    ):
        self.dialogue, self.responses = dialogue, responses
        self.share, self.vocab_size = share, vocab_size
        self.num_waiting = 0  # turns without a reply
        self._number = {id(response): i for i, response in enumerate(responses)}
        self._keys = [response.key for response in responses]  # of the present turn
        self._arrived: queue.SimpleQueue = queue.SimpleQueue()

    def open(self, responses: Sequence[PartialResponse]) -> list[PartialResponse]:
        """Ask for the prompts that the dialogue gives; return the responses that have one already."""
        for response in responses:
            if response.request.opens:
                self.send(response)
        return [response for response in responses if not response.request.opens]

    def key_of(self, response: PartialResponse) -> np.ndarray:
        """Return the random key data of the response's present turn, uint32 [2]."""
        return self._keys[self._number[id(response)]]

    def send(self, response: PartialResponse) -> None:
        """Send the turn that has just ended; `collect` returns the response once it has a reply."""
        self.num_waiting += 1
        if jax.process_index() == 0:
            number = self._number[id(response)]
            future = request_reply(self.dialogue, response)
            future.add_done_callback(lambda future: self._arrived.put((number, future)))

    def end(self, response: PartialResponse) -> None:
        """Tell the dialogue that a conversation has ended."""
        if jax.process_index() == 0:
            end_conversation(self.dialogue, response)

    def collect(self, block: bool) -> tuple[list[PartialResponse], list[PartialResponse]]:
        """Return responses with a reply: (responses that continue, responses that ended). A collective.

        Args:
            block: wait for a reply, at most as long as the dialogue's patience.

        Raises:
            DialogueError: no conversation can continue.
        """
        if not self.num_waiting:
            return [], []
        replies = self.share(self._receive(block) if jax.process_index() == 0 else None)
        if isinstance(replies, DialogueError):
            raise replies
        self.num_waiting -= len(replies)
        continued, ended = [], []
        for i, reply in replies:
            response = self.responses[i]
            (continued if append_reply(response, reply) else ended).append(response)
        for response in ended:
            self.end(response)
        later = [response for response in continued if response.observed]
        keys = turn_keys(np.array([r.key for r in later]), [len(r.observed) for r in later])
        for response, key in zip(later, keys, strict=True):
            self._keys[self._number[id(response)]] = key
        return continued, ended

    def _receive(self, block: bool) -> list[tuple[int, Reply]] | DialogueError:
        """Return the replies that have arrived, with the numbers of their responses."""
        replies: list[tuple[int, Reply]] = []
        patience = self.dialogue.patience
        try:
            while len(replies) < self.num_waiting:
                timeout = BATCH_WINDOW if replies else patience
                number, future = self._arrived.get(block, timeout if block else None)
                response = self.responses[number]
                reply = read_reply(future, response, self.vocab_size)
                if reply.conversation is not None:
                    response.conversation = reply.conversation  # stays here: may not be picklable
                replies.append((number, reply._replace(conversation=None)))
        except queue.Empty:
            return replies if replies or not block else no_reply_error(self.dialogue, self.num_waiting)
        except DialogueError as error:
            return error
        return replies
