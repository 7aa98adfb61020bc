"""The native engine: continuous batching in plain JAX, with the layers that training runs."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.paged import NOBODYS
from jaxrl_llm.rollout.checks import check_pages, check_requests
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.rollout.engine import Dialogue, PartialResponse, Request, SamplingConfig, end_ids, text_of
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.native.compile import largest_calls, warm_up
from jaxrl_llm.rollout.native.conversations import Talks
from jaxrl_llm.rollout.native.page_budget import is_paged, pages_that_fit, pages_wanted, weight_bytes
from jaxrl_llm.rollout.native.programs import Programs
from jaxrl_llm.rollout.native.schedule import Generation
from jaxrl_llm.rollout.native.shapes import Sizes, bucket, make_sizes
from jaxrl_llm.rollout.partial import new_responses, trajectory_of
from jaxrl_llm.structs import Metrics, Params, Program, Trajectory


class Later(NamedTuple):
    """Responses that are written when they are asked for."""

    result: Callable[[], list[Trajectory]]


class NativeEngine:
    """Rolls out on the devices of `mesh`: slots divided over data and fsdp, heads and vocabulary over
    tensor. Under several processes each calls every method with the same arguments, runs the same
    schedule and gets all trajectories.

    Args:
        tokenizer: gives `eos_token_id` and `decode(ids)`; None = no end token and no text.
        eos_ids: further ids that end a response (`eos_token_id` of a generation_config.json).
        share: gives every process process 0's value (a collective); only dialogues need it.
        strict: log-probs have every bit of those that strict training finds.
        resident: bytes that the trainer will hold on each device, but does not yet; room that the paged
            cache leaves until the first `publish`.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model: TransformerConfig,
        mesh: Mesh,
        tokenizer: Any = None,
        eos_ids: Sequence[int] = (),
        share: Callable[[Any], Any] = lambda value: value,
        strict: bool = False,
        resident: int = 0,
    ):
        self.config, self.model, self.mesh, self.tokenizer, self.share = config, model, mesh, tokenizer, share
        self.eos_ids = end_ids(tokenizer, eos_ids)
        cache_dtype = config.cache_dtype or config.dtype
        page = config.page if not strict and is_paged(config, model, mesh) else 0
        self.programs = Programs(model, mesh, config.dtype, cache_dtype, config.chunk, strict, page)
        self.metrics: Metrics = {}
        self._published, self._resident = None, resident
        self._sizes = self._make_sizes(1, 1, False)

    def publish(self, params: Params, version: int) -> Metrics:
        """Copy the weights into the layout and type of rollout; the caller may donate its own after."""
        start = time.perf_counter()
        self._published = None  # free the old copy before the new one is made
        with jax.set_mesh(self.mesh):
            weights = jax.block_until_ready(self.programs.publish(params))
        self._published = weights, version
        return {
            "rollout/publish_seconds": time.perf_counter() - start,
            "rollout/publish_bytes": sum(w.nbytes for w in jax.tree.leaves(weights)),
        }

    def start(
        self,
        requests: list[Request],
        sampling: SamplingConfig,
        key: jax.Array,
        dialogue: Dialogue | None = None,
        partial: Sequence[PartialResponse] = (),
    ) -> Later:
        """The same devices train: they write when the result is asked for."""
        assert not partial, "no response is ever partial here"
        return Later(lambda: self.generate(requests, sampling, key, dialogue))

    def generate(
        self,
        requests: list[Request],
        sampling: SamplingConfig,
        key: jax.Array,
        dialogue: Dialogue | None = None,
    ) -> list[Trajectory]:
        """Responses in order (request, response index); token i of sample (p, g) is drawn with
        fold_in(fold_in(fold_in(key, p), g), i) alone, those of later turns with keys of the turn
        (keys.py). `self.metrics` describes the last call.

        Raises:
            ValueError: no weights published, an impossible request or sampling setting.
            DialogueError: no conversation can go on.
        """
        check_requests(requests, sampling, self.model, self.tokenizer)
        if self._published is None:
            raise ValueError("rollout: no weights; call publish(params, version) before generate")
        weights, version = self._published
        self._grow_sizes(requests, turns=dialogue is not None)
        if self.programs.page:
            check_pages(requests, self.programs.page, self._sizes.pages)
        responses = new_responses(requests, key)
        with jax.set_mesh(self.mesh):
            talks = Talks(dialogue, responses, self.share) if dialogue else None
            generation = Generation(
                self.config.chunk,
                self._sizes,
                self.programs,
                weights,
                responses,
                self._stops(sampling),
                talks,
            )
            self.metrics = generation.run(sampling, functools.partial(text_of, self.tokenizer))
        for response in responses:
            response.versions = [version] * len(response.ids)
        return [trajectory_of(response, self.tokenizer) for response in responses]

    def snapshot(self, pending: Sequence[Later]) -> list[list[PartialResponse]]:
        """Return nothing: a call of `generate` ends with all responses finished."""
        return [[] for _ in pending]

    def usage(self) -> Metrics:
        """Of the last call of `generate`."""
        return self.metrics

    def check_logprobs(self, params: Params, trajectories: Sequence[Trajectory]) -> list[int]:
        """Return nothing: the reported log-probs are computed here, by the trainer's model code."""
        return []

    def release_memory(self) -> None:
        """Free the copy of the weights; with the trainer's own it could not share, which donates them."""
        self._published = None

    def warm_up(
        self,
        max_prompt_tokens: int,
        max_response_tokens: int,
        samplings: Sequence[SamplingConfig] = (SamplingConfig(),),
        turns: bool = False,
    ) -> None:
        """Compile all that prompts and responses of at most these lengths may need, in any number.

        After it `generate` compiles nothing. Without it, or beyond these lengths, programs are compiled
        when they are first needed. Needs no weights; makes as many zeros, and frees them.

        Args:
            samplings: those that `generate` will be given (filters are programs of their own).
            turns: whether it will be given a dialogue.
        """
        self._sizes = self._make_sizes(max_prompt_tokens, max_response_tokens, turns)
        key = sample_keys(jax.random.key(0), np.zeros((0, 2), np.int32))
        stops = max((self._stops(sampling) for sampling in samplings), key=len)
        with jax.set_mesh(self.mesh):
            weights = self._published[0] if self._published else self.programs.zero_weights()
            warm_up(self.programs, self._sizes, weights, samplings, stops, key[0])

    def largest_calls(
        self,
        params: Params,
        max_prompt_tokens: int,
        max_response_tokens: int,
        prompts: int,
        sampling: SamplingConfig,
        turns: bool,
    ) -> dict[str, Program]:
        """What a run with such prompts and responses calls, by program, in the largest size.

        Args:
            params: the trainer's weights, abstract.
            prompts: of one call of `generate`.
        """
        if not self.config.warm_up:  # sizes then grow in buckets
            max_prompt_tokens, max_response_tokens = (
                bucket(length, least=32) for length in (max_prompt_tokens, max_response_tokens)
            )
        sizes = self._make_sizes(max_prompt_tokens, max_response_tokens, turns)
        return largest_calls(self.programs, sizes, params, prompts, sampling, self._stops(sampling))

    def compile_count(self) -> int:
        """Programs compiled so far; stands still after warm-up."""
        return self.programs.traces

    def _make_sizes(self, max_prompt: int, max_response: int, turns: bool) -> Sizes:
        ways, config = self.programs.ways, self.config
        self._sized_for = max_prompt, max_response, turns
        sizes = make_sizes(max_prompt, max_response, config.slots, ways, config.prefill_tokens, turns)
        if not self.programs.page:
            return sizes
        pages = pages_wanted(sizes, ways, self.programs.page)
        to_come = 0 if self._published else self._resident + weight_bytes(self.programs)
        most = config.pages or self.share(pages_that_fit(self.programs, to_come))
        return dataclasses.replace(sizes, pages=NOBODYS + 1 + min(pages, most or pages))

    def _grow_sizes(self, requests: list[Request], turns: bool) -> None:
        """Make room for these; in buckets, so that the next longer request does not change all sizes."""
        prompt = max((len(r.prompt_ids) for r in requests), default=1)
        response = max((r.max_tokens for r in requests), default=1)
        known = self._sized_for
        if prompt > known[0] or response > known[1] or turns > known[2]:
            wider = known[0] if prompt <= known[0] else bucket(prompt, least=32)
            longer = known[1] if response <= known[1] else bucket(response, least=32)
            self._sizes = self._make_sizes(wider, longer, turns or known[2])

    def _stops(self, sampling: SamplingConfig) -> tuple[int, ...]:
        ids = () if sampling.ignore_eos else (*self.eos_ids, *sampling.stop_tokens)
        return tuple(dict.fromkeys(ids))  # their number is part of a program's shape
