"""Conversations of the native engine whose turn has ended, until they are answered."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.rollout.engine import Dialogue, DialogueError, PartialResponse, Reply
from jaxrl_llm.rollout.keys import turn_keys
from jaxrl_llm.rollout.turns import append_reply, no_reply_error, request_reply

LINGER = 0.002  # seconds without a reply after which those that came together are taken to be complete


class Talks:
    """Turns go to the dialogue in process 0; all processes get the replies, in one order.

    Args:
        samples: all of the call, in an order that every process has.
        share: gives every process process 0's value (a collective).
    """

    def __init__(self, dialogue: Dialogue, samples: Sequence[PartialResponse], share: Callable[[Any], Any]):
        self.dialogue, self.samples, self.share = dialogue, samples, share
        self.waiting = 0  # turns without a reply
        self._number = {id(sample): i for i, sample in enumerate(samples)}
        self._keys = [sample.key for sample in samples]  # of the present turn
        self._arrived: queue.SimpleQueue = queue.SimpleQueue()

    def key_of(self, sample: PartialResponse) -> np.ndarray:
        """Return the random key data of the sample's present turn, uint32 [2]."""
        return self._keys[self._number[id(sample)]]

    def ask(self, sample: PartialResponse) -> None:
        """The sample's turn has ended; `collect` gives it back if it goes on."""
        self.waiting += 1
        if jax.process_index() == 0:
            number = self._number[id(sample)]
            replied = request_reply(self.dialogue, sample)
            replied.add_done_callback(lambda future: self._arrived.put((number, future)))

    def collect(self, block: bool) -> list[PartialResponse]:
        """The samples that have been answered and go on; with `block` it waits for a reply, within a limit.

        Raises:
            DialogueError: no conversation can go on.
        """
        if not self.waiting:
            return []
        found = self.share(self._drain(block) if jax.process_index() == 0 else None)
        if isinstance(found, DialogueError):
            raise found
        self.waiting -= len(found)
        more = [self.samples[i] for i, reply in found if append_reply(self.samples[i], reply)]
        keys = turn_keys(np.array([s.key for s in more]), [len(s.observed) for s in more])
        for sample, key in zip(more, keys, strict=True):
            self._keys[self._number[id(sample)]] = key
        return more

    def _drain(self, block: bool) -> list[tuple[int, Reply]] | DialogueError:
        """What has arrived, by the samples' numbers."""
        found: list[tuple[int, Reply]] = []
        patience = self.dialogue.patience
        try:
            while len(found) < self.waiting:
                timeout = LINGER if found else patience
                number, future = self._arrived.get(block, timeout if block else None)
                reply = future.result()
                self.samples[number].conversation = reply.conversation  # stays here: may not be picklable
                found.append((number, reply._replace(conversation=None)))
        except queue.Empty:
            return found if found or not block else no_reply_error(self.dialogue, self.waiting)
        except DialogueError as error:
            return error
        return found
