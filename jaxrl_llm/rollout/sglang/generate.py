"""Responses written by a pool of servers: token ids in, token ids, log-probs and versions out."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.bridge.servers import Json
from jaxrl_llm.errors import ServerError
from jaxrl_llm.rollout.engine import Dialogue, PartialResponse, Reply, SamplingConfig
from jaxrl_llm.rollout.partial import trajectory_of
from jaxrl_llm.rollout.sglang import validate
from jaxrl_llm.rollout.sglang.meter import Meter
from jaxrl_llm.rollout.sglang.pool import Server, ServerPool
from jaxrl_llm.rollout.turns import append_reply, no_reply_error, read_reply, request_reply
from jaxrl_llm.structs import Metrics, Trajectory

ABORT = {"rid": "", "abort_all": True}
ABORT_SECONDS = 10.0
SNAPSHOT_SECONDS = 30.0  # after it, what a server has not given is written again
POLL = 0.05


class Writer:
    """Writes on the servers of a pool.

    Args:
        eos_ids: token ids that end a response.
        versions: label of weights -> policy version, of all that were ever sent.
    """

    def __init__(
        self,
        pool: ServerPool,
        tokenizer: Any,
        eos_ids: Sequence[int],
        versions: dict[str, int],
        vocab_size: int,
    ):
        self.pool, self.tokenizer, self.eos_ids = pool, tokenizer, eos_ids
        self.versions, self.vocab_size = versions, vocab_size
        self.meter = Meter()
        self._heard = 0.0  # when an environment answered last
        self._go = asyncio.Event()
        self._go.set()

    async def write_all(
        self, responses: Sequence[PartialResponse], sampling: SamplingConfig, dialogue: Dialogue | None = None
    ) -> list[Trajectory]:
        """Finish the responses; their responses in order."""
        home: dict[int, Server] = {}
        try:
            async with asyncio.TaskGroup() as group:
                for response in responses:
                    group.create_task(self._finish(response, sampling, home, dialogue))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [trajectory_of(response, self.tokenizer) for response in responses]

    async def _finish(
        self,
        response: PartialResponse,
        sampling: SamplingConfig,
        home: dict[int, Server],
        dialogue: Dialogue | None,
    ) -> None:
        """Write one response, turn by turn; no server's slot is held while the environment thinks."""
        if dialogue and response.observed and not await self._replayed(response, dialogue):
            return
        await self._write(response, sampling, home)
        while dialogue and response.finish == "stop" and await self._answered(response, dialogue):
            await self._write(response, sampling, home)

    async def _replayed(self, response: PartialResponse, dialogue: Dialogue) -> bool:
        """Send a new environment the turns of an earlier run. Returns whether another turn follows.

        As long as its replies are the same the response stays as it was; another reply replaces all that
        followed.
        """
        again = PartialResponse(request=response.request, index=response.index, key=response.key)
        for start, end in response.observed:
            turn = slice(len(again.ids), start)
            again.append(response.ids[turn], response.logprobs[turn], response.versions[turn])
            again.finish = "stop"
            more = await self._answered(again, dialogue)
            if not more or again.ids != response.ids[:end]:
                vars(response).update(vars(again))
                return more
        response.conversation, response.episode = again.conversation, again.episode
        return True

    async def _answered(self, response: PartialResponse, dialogue: Dialogue) -> bool:
        """Append the environment's reply to the turn. Returns whether another turn follows."""
        return append_reply(response, await self._reply(response, dialogue))

    async def _reply(self, response: PartialResponse, dialogue: Dialogue) -> Reply:
        """Waits for as long as any conversation is answered."""
        reply, asked = asyncio.wrap_future(request_reply(dialogue, response)), time.monotonic()
        try:
            while not reply.done():
                patience = dialogue.patience - (time.monotonic() - max(asked, self._heard))
                if patience <= 0:
                    raise no_reply_error(dialogue, 1)
                await asyncio.wait([reply], timeout=patience)
        finally:
            reply.cancel()
        self._heard = time.monotonic()
        return read_reply(reply, response, self.vocab_size)

    async def _write(
        self, response: PartialResponse, sampling: SamplingConfig, home: dict[int, Server]
    ) -> None:
        """Write one turn, continued for as long as servers break it off."""
        request, stalled, breaks = response.request, 0, self.pool.breaks
        while not response.finish:
            room, seed = request.max_tokens - len(response.ids), turn_seed(response)
            body = {
                "input_ids": [*request.prompt_ids.tolist(), *response.ids],
                "sampling_params": self._sampling(sampling, room, seed),
                "return_logprob": True,
                "extra_key": self.pool.label,  # keys cached under older weights are no use
            }
            read = functools.partial(
                validate.read,
                versions=self.versions,
                vocab_size=self.vocab_size,
                most=room,
            )
            async with self.pool.slot:
                await self._go.wait()
                with self.meter:
                    ids, logprobs, versions, finish = await self.pool.generate(
                        body, home, request.prompt_index, read
                    )
            response.append(ids, logprobs, versions)
            stalled = 0 if ids or breaks != self.pool.breaks else stalled + 1
            breaks = self.pool.breaks
            if finish != "abort":
                response.finish = finish
            elif len(response.ids) >= request.max_tokens:
                response.finish = "length"
            elif stalled > self.pool.retries:
                raise ServerError(f"a response was broken off {stalled} times before its first token")

    async def snapshot(self, batches: Sequence[Sequence[PartialResponse]]) -> list[list[PartialResponse]]:
        """What there is of each response. Servers give what they have; they go on afterwards."""
        self._go.clear()
        self.pool.breaks += 1
        deadline = time.monotonic() + SNAPSHOT_SECONDS
        while self.meter.running and time.monotonic() < deadline:  # again: some were on their way
            asked = [
                self.pool.ask(server, "/abort_request", ABORT, ABORT_SECONDS) for server in self.pool.usable
            ]
            await asyncio.gather(*asked, return_exceptions=True)
            await asyncio.sleep(POLL)
        found = [[response.copy() for response in responses] for responses in batches]
        self._go.set()
        return found

    async def usage(self) -> Metrics:
        """How busy the servers were since it was last asked."""
        return self.meter.read(self.pool.slots * len(self.pool.servers)) | self.pool.metrics()

    def _sampling(self, sampling: SamplingConfig, max_tokens: int, seed: int) -> Json:
        return {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "max_new_tokens": max_tokens,
            "stop": list(sampling.stop),
            "stop_token_ids": [] if sampling.ignore_eos else [*self.eos_ids, *sampling.stop_tokens],
            "ignore_eos": sampling.ignore_eos,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "sampling_seed": seed,
        }


def turn_seed(response: PartialResponse) -> int:
    """A seed of its own for each turn; the first one's is the sample's."""
    return (int(response.key[1]) + 0x9E3779B1 * len(response.observed)) & 0x7FFFFFFF
