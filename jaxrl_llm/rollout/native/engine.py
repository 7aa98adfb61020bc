"""The native engine: continuous batching in plain JAX, with the layers of training."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import ranges
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.decode import DecodeWeights
from jaxrl_llm.models.paged import NULL_PAGE
from jaxrl_llm.rollout.checks import check_requests
from jaxrl_llm.rollout.config import RolloutConfig, SamplingConfig
from jaxrl_llm.rollout.engine import (
    Dialogue,
    Engine,
    GenerationCall,
    PartialResponse,
    Request,
    eos_ids_of,
    text_of,
)
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.native.compile import compile_all, largest_calls
from jaxrl_llm.rollout.native.conversations import TurnQueue
from jaxrl_llm.rollout.native.decode_threads import divide, num_decode_threads, run_decode_threads
from jaxrl_llm.rollout.native.drafts import DraftMemory
from jaxrl_llm.rollout.native.kept import kept_programs, make_programs
from jaxrl_llm.rollout.native.page_memory import check_pages, pages_in_free_memory, pages_required
from jaxrl_llm.rollout.native.ring_cache import ring_bytes
from jaxrl_llm.rollout.native.schedule import Scheduler, throughput
from jaxrl_llm.rollout.native.shapes import MIN_LENGTH, ProgramShapes, make_shapes
from jaxrl_llm.rollout.native.transfer import WeightTransfer
from jaxrl_llm.rollout.partial import new_responses, trajectory_of
from jaxrl_llm.sharding.compile import Program, bucket
from jaxrl_llm.sharding.placement import devices_of
from jaxrl_llm.sharding.rules import bytes_per_device
from jaxrl_llm.structs import Metrics, Params, Trajectory


class DeferredGeneration(NamedTuple):
    """A generation that runs when its result is requested."""

    result: Callable[[], list[Trajectory]]


class NativeEngine(Engine):
    """Engine on the devices of `mesh`: slots are sharded over data and fsdp, heads and vocabulary over
    tensor. With several processes, each runs the same schedule and gets all trajectories.

    Args:
        tokenizer: gives `eos_token_id` and `decode(ids)`; None = no end token and no text.
        eos_ids: further ids that end a response (`eos_token_id` of a generation_config.json).
        share: gives every process process 0's value (a collective); for dialogues and the number of pages.
        strict: log-probs are bit-equal to strict training.
        resident: bytes that the trainer will hold on each device later; the paged cache leaves them free
            until the first `publish`.
        routes: trajectories have routes.

    Raises:
        ConfigError: a field of `config` is out of its range.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model: TransformerConfig,
        mesh: Mesh,
        tokenizer: Any = None,
        *,
        eos_ids: Sequence[int] = (),
        share: Callable[[Any], Any] = lambda value: value,
        strict: bool = False,
        resident: int = 0,
        routes: bool = False,
    ):
        for field, problem in ranges.problems(config):
            raise ConfigError(f"rollout.{field} {problem}")
        self.config, self.model, self.mesh, self.tokenizer, self.share = config, model, mesh, tokenizer, share
        self.eos_ids = eos_ids_of(tokenizer, eos_ids)
        self.programs = make_programs(config, model, mesh, strict, routes=routes)
        self.metrics: Metrics = {}
        self.memory = DraftMemory()
        self.transfer = WeightTransfer(self.programs)
        self._published, self._resident, self._shares_devices = None, resident, True
        self._pages: int | None = None  # that each device has memory for
        self._shapes: ProgramShapes | None = self._make_shapes(1, 1, False)

    def publish(self, params: Params, version: int) -> Metrics:
        """Copy the weights into the sharding and type of the rollout; the caller may donate its own after."""
        start = time.perf_counter()
        self._published = None  # free the old copy before the new one is made
        self._shares_devices = not (own := devices_of(params)) or not own.isdisjoint(self.mesh.devices.flat)
        if self.transfer.is_needed(params):
            weights = jax.block_until_ready(self.transfer(params))
            sent = self.transfer.num_bytes
        else:
            with jax.set_mesh(self.mesh):
                weights = jax.block_until_ready(self.programs.publish(params))
            sent = sum(w.nbytes for w in jax.tree.leaves(weights))
        self._published = weights, version
        return {"rollout/publish_seconds": time.perf_counter() - start, "rollout/publish_bytes": sent}

    @property
    def published(self) -> tuple[DecodeWeights, int] | None:
        """Return the weights that are used from now on, and their version."""
        return self._published

    def start(self, call: GenerationCall) -> DeferredGeneration:
        """Return the generation, to be run when its result is requested: the same devices train."""
        assert not call.partial, "the native engine leaves no partial responses"
        return DeferredGeneration(lambda: self._generate(call))

    def _generate(self, call: GenerationCall) -> list[Trajectory]:
        check_requests(call.requests, call.sampling, self.model, self.tokenizer)
        if self._published is None:
            raise ValueError("rollout: no weights; call publish(params, version) before generate")
        responses = new_responses(call.requests, call.key)
        self.metrics = self.finish(responses, *self._published, call.sampling, dialogue=call.dialogue)
        ends = call.sampling.stop_ids(self.eos_ids)
        return [trajectory_of(response, self.tokenizer, ends) for response in responses]

    def finish(
        self,
        responses: Sequence[PartialResponse],
        weights: DecodeWeights,
        version: int,
        sampling: SamplingConfig,
        *,
        dialogue: Dialogue | None,
        before_chunk: Callable[[], None] = lambda: None,
    ) -> Metrics:
        """Generate empty responses with these weights; return the metrics of the call.

        Args:
            before_chunk: called before each chunk of tokens; an exception ends the call.
        """
        requests = list({id(response.request): response.request for response in responses}.values())
        self._fit_shapes(requests, turns=dialogue is not None)
        if self.programs.page_size:
            check_pages(requests, self.programs.page_size, self._shapes.num_pages)
        # Each thread decodes a part of the responses.
        turns = TurnQueue(dialogue, responses, self.share, self.model.vocab_size) if dialogue else None
        shapes, memory, stop_ids = self._shapes, self.memory, sampling.stop_ids(self.eos_ids)
        start, detokenize = time.perf_counter(), functools.partial(text_of, self.tokenizer)

        def run(part: Sequence[PartialResponse], before_chunk: Callable[[], None]) -> Scheduler:
            with jax.set_mesh(self.mesh):
                scheduler = Scheduler(
                    shapes, self.programs, weights, part, stop_ids=stop_ids, turns=turns, memory=memory
                )
                scheduler.run(sampling, detokenize, before_chunk)
            return scheduler

        schedulers = run_decode_threads(divide(responses, shapes.decode_threads), run, before_chunk)
        for response in responses:
            response.versions = [version] * len(response.ids)
        drafts = schedulers[0].drafts.finish() if shapes.draft_tokens else {}
        return drafts | throughput(schedulers, time.perf_counter() - start)

    def snapshot(self, pending: Sequence[DeferredGeneration]) -> list[list[PartialResponse]]:
        """Return empty lists: responses are generated within one call."""
        return [[] for _ in pending]

    def usage(self) -> Metrics:
        """Return the metrics of the last call of `generate`."""
        return self.metrics

    def release_memory(self) -> None:
        """Free the copy of the weights, unless no device of the rollout trains."""
        if self._shares_devices:
            self._published = None
            self.transfer.free()

    def set_lengths(self, max_prompt_tokens: int, max_response_tokens: int, turns: bool = False) -> None:
        """Choose the shapes for prompts and responses of at most these lengths; nothing is compiled.

        Without it, or beyond these lengths, shapes grow with the longest ones so far: the last bits of
        log-probs then depend on earlier calls, which a resumed run has not made.

        Args:
            turns: whether `generate` will be given a dialogue.
        """
        self._limits = max_prompt_tokens, max_response_tokens, turns
        self._shapes = None  # made at the first call, when the free memory is known

    def warm_up(
        self,
        max_prompt_tokens: int,
        max_response_tokens: int,
        samplings: Sequence[SamplingConfig] = (SamplingConfig(),),
        turns: bool = False,
    ) -> None:
        """Compile all programs for any number of prompts and responses of at most these lengths.

        After it `generate` compiles nothing. Without it, or beyond these lengths, programs are compiled
        when they are first needed. Needs no weights, and runs nothing.

        Args:
            samplings: settings for `generate` (filters change the program).
            turns: whether `generate` gets a dialogue.
        """
        self._shapes = self._make_shapes(max_prompt_tokens, max_response_tokens, turns)
        compile_all(self.programs, self._shapes, samplings, eos_ids=self.eos_ids)
        sample_keys(jax.random.key(0), np.zeros((0, 2), np.int32))  # a block, for `new_responses`

    def largest_calls(
        self,
        params: Params,
        max_prompt_tokens: int,
        max_response_tokens: int,
        prompts: int,
        *,
        sampling: SamplingConfig,
        turns: bool,
    ) -> dict[str, Program]:
        """Return the largest call of each program in a run with such prompts and responses.

        Args:
            params: the trainer's weights, abstract.
            prompts: of one call of `generate`.
        """
        shapes = self._make_shapes(max_prompt_tokens, max_response_tokens, turns, divided=False)
        calls = largest_calls(self.programs, shapes, params, prompts, sampling=sampling, eos_ids=self.eos_ids)
        return calls | ({"publish": self.transfer.program(params)} if self.transfer.is_needed(params) else {})

    def compile_count(self) -> int:
        """Return the number of programs compiled so far; it is constant after `warm_up`."""
        programs = self.programs
        return programs.compile_count + (programs.kept.compile_count if programs.kept else 0)

    def _make_shapes(
        self, max_prompt: int, max_response: int, turns: bool, divided: bool = True
    ) -> ProgramShapes:
        """Return the shapes of a decode thread; one decodes where conversations or responses share pages.

        Args:
            divided: among decode threads, as a run is.
        """
        num_shards, config = self.programs.num_shards, self.config
        self._limits = max_prompt, max_response, turns
        alone = turns or self.programs.page_size or not divided
        decode_threads = 1 if alone else num_decode_threads(self.mesh, config.slots)
        shapes = make_shapes(
            max_prompt,
            max_response,
            slots=-(-config.slots // decode_threads),
            num_shards=num_shards,
            prefill_tokens=config.prefill_tokens,
            turns=turns,
            draft_tokens=config.draft_tokens,
            draft_slots=config.draft_slots,
        )
        shapes = dataclasses.replace(shapes, decode_threads=decode_threads)
        # Pages: of the cache, or of conversations that wait.
        paged = self.programs if self.programs.page_size else None
        if paged is None and turns:
            paged = kept_programs(self.programs, max_prompt + max_response)
        if paged is None:
            return shapes
        required = pages_required(shapes, num_shards, paged.page_size)
        if turns and config.pages:  # the others hold conversations that wait for a slot
            required = max(required, config.pages)
        if self._pages is None or not config.max_staleness:  # later the free memory depends on the time
            reserved = config.max_staleness * self.transfer.bytes_of_version()  # of versions still in use
            reserved += (
                0 if self._published else self._resident + bytes_per_device(self.programs.abstract_weights())
            )
            reserved += 0 if paged is self.programs else ring_bytes(self.programs, shapes)
            self._pages = config.pages or self.share(pages_in_free_memory(paged, shapes, reserved))
        return dataclasses.replace(shapes, num_pages=NULL_PAGE + 1 + min(required, self._pages or required))

    def _fit_shapes(self, requests: list[Request], turns: bool) -> None:
        """Make the shapes large enough; in buckets, so that not every longer request changes them all."""
        prompt = max((len(r.prompt_ids) for r in requests), default=1)
        response = max((r.max_tokens for r in requests), default=1)
        max_prompt, max_response, with_turns = self._limits
        if self._shapes is None or prompt > max_prompt or response > max_response or turns > with_turns:
            longer_prompt = max_prompt if prompt <= max_prompt else bucket(prompt, MIN_LENGTH)
            longer_response = max_response if response <= max_response else bucket(response, MIN_LENGTH)
            self._shapes = self._make_shapes(longer_prompt, longer_response, turns or with_turns)
