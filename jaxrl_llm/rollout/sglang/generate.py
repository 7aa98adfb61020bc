"""Responses written by a pool of servers: token ids in, token ids, log-probs and versions out."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_llm.bridge.servers import Json
from jaxrl_llm.errors import ServerError
from jaxrl_llm.rollout.engine import Dialogue, PartialResponse, Reply, Request, SamplingConfig, text_of
from jaxrl_llm.rollout.sglang import validate
from jaxrl_llm.rollout.sglang.meter import Meter
from jaxrl_llm.rollout.sglang.pool import Server, ServerPool
from jaxrl_llm.rollout.turns import answer_of, ask, follow, mask_of, silent
from jaxrl_llm.structs import Episode, Metrics, Trajectory

ABORT = {"rid": "", "abort_all": True}
ABORT_SECONDS = 10.0
SNAPSHOT_SECONDS = 30.0  # after it, what a server has not given is written again
POLL = 0.05


@dataclass
class Draft:
    """A response in the making: what the servers have written of it."""

    request: Request
    index: int  # which of the request's responses
    seed: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = ""  # "" = not done
    observed: list[tuple[int, int]] = field(default_factory=list)  # which of `ids` the environment said
    talk: Any = None
    episode: Episode | None = None

    def append(self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """What the policy wrote."""
        self.ids += ids
        self.logprobs += logprobs
        self.versions += versions

    def written(self) -> PartialResponse:
        """A copy of what there is."""
        per_token = tuple(self.ids), tuple(self.logprobs), tuple(self.versions)
        return PartialResponse(*per_token, self.finish, tuple(self.observed))

    def go_on_from(self, written: PartialResponse) -> None:
        """Take over what an earlier run had of it."""
        self.ids, self.logprobs, self.versions = map(list, written[:3])
        self.observed = list(written.observed)
        self.finish = written.finish or ("length" if len(self.ids) >= self.request.max_tokens else "")


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
        self, drafts: Sequence[Draft], sampling: SamplingConfig, dialogue: Dialogue | None = None
    ) -> list[Trajectory]:
        """Finish the drafts; their responses in order."""
        home: dict[int, Server] = {}
        try:
            async with asyncio.TaskGroup() as group:
                for draft in drafts:
                    group.create_task(self._finish(draft, sampling, home, dialogue))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [self._trajectory(draft) for draft in drafts]

    async def _finish(
        self, draft: Draft, sampling: SamplingConfig, home: dict[int, Server], dialogue: Dialogue | None
    ) -> None:
        """Write one response, turn by turn; no server's slot is held while the environment thinks."""
        if dialogue and draft.observed and not await self._retold(draft, dialogue):
            return
        await self._write(draft, sampling, home)
        while dialogue and draft.finish == "stop" and await self._answered(draft, dialogue):
            await self._write(draft, sampling, home)

    async def _retold(self, draft: Draft, dialogue: Dialogue) -> bool:
        """Tell a new environment the turns that an earlier run's has heard. Returns whether it goes on.

        As long as it gives the same answers, the draft stays as it was; another answer takes the place of
        all that followed.
        """
        old = draft.written()
        draft.observed = []
        for start, end in old.observed:
            draft.ids, draft.logprobs, draft.versions = (list(each[:start]) for each in old[:3])
            draft.finish = "stop"
            if not await self._answered(draft, dialogue):
                return False
            if tuple(draft.ids) != old.ids[:end]:
                return True
        draft.go_on_from(old)
        return True

    async def _answered(self, draft: Draft, dialogue: Dialogue) -> bool:
        """Append what the environment says to the turn. Returns whether another turn follows."""
        goes_on = follow(draft, await self._reply(draft, dialogue))
        if goes_on:
            draft.versions += draft.versions[-1:] * (len(draft.ids) - len(draft.versions))
            draft.finish = ""
        return goes_on

    async def _reply(self, draft: Draft, dialogue: Dialogue) -> Reply:
        """Waits for as long as any conversation is answered."""
        reply, asked = asyncio.wrap_future(ask(dialogue, draft)), time.monotonic()
        try:
            while not reply.done():
                patience = dialogue.patience - (time.monotonic() - max(asked, self._heard))
                if patience <= 0:
                    raise silent(dialogue, 1)
                await asyncio.wait([reply], timeout=patience)
        finally:
            reply.cancel()
        self._heard = time.monotonic()
        return reply.result()

    async def _write(self, draft: Draft, sampling: SamplingConfig, home: dict[int, Server]) -> None:
        """Write one turn, continued for as long as servers break it off."""
        request, stalled, breaks = draft.request, 0, self.pool.breaks
        while not draft.finish:
            room, seed = request.max_tokens - len(draft.ids), turn_seed(draft)
            body = {
                "input_ids": [*request.prompt_ids.tolist(), *draft.ids],
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
            draft.append(ids, logprobs, versions)
            stalled = 0 if ids or breaks != self.pool.breaks else stalled + 1
            breaks = self.pool.breaks
            if finish != "abort":
                draft.finish = finish
            elif len(draft.ids) >= request.max_tokens:
                draft.finish = "length"
            elif stalled > self.pool.retries:
                raise ServerError(f"a response was broken off {stalled} times before its first token")

    async def snapshot(self, batches: Sequence[Sequence[Draft]]) -> list[list[PartialResponse]]:
        """What there is of each draft. Servers give what they have; they go on afterwards."""
        self._go.clear()
        self.pool.breaks += 1
        deadline = time.monotonic() + SNAPSHOT_SECONDS
        while self.meter.running and time.monotonic() < deadline:  # again: some were on their way
            asked = [
                self.pool.ask(server, "/abort_request", ABORT, ABORT_SECONDS) for server in self.pool.usable
            ]
            await asyncio.gather(*asked, return_exceptions=True)
            await asyncio.sleep(POLL)
        found = [[draft.written() for draft in drafts] for drafts in batches]
        self._go.set()
        return found

    async def usage(self) -> Metrics:
        """How busy the servers were since it was last asked."""
        return self.meter.read(self.pool.slots * len(self.pool.servers)) | self.pool.metrics()

    def _trajectory(self, draft: Draft) -> Trajectory:
        return Trajectory(
            prompt_ids=np.asarray(draft.request.prompt_ids, np.int32),
            response_ids=np.array(draft.ids, np.int32),
            logprobs=np.array(draft.logprobs, np.float32),
            mask=mask_of(draft),
            versions=np.array(draft.versions, np.int32),
            prompt_index=draft.request.prompt_index,
            response_index=draft.index,
            finish=draft.finish,
            text=text_of(self.tokenizer, draft.ids),
            answer=answer_of(draft, self.tokenizer),
            episode=draft.episode,
        )

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


def turn_seed(draft: Draft) -> int:
    """A seed of its own for each turn; the first one's is the sample's."""
    return (draft.seed + 0x9E3779B1 * len(draft.observed)) & 0x7FFFFFFF
