"""Rollout of conversations whose turns are kept (`--rollout.cache auto` and `paged`), against the ring cache.

    python benchmarks/turns.py --save      # minutes on a CPU

Models with random weights talk to an environment that answers each turn at once, with observations of fixed
length. A turn ends at one of several stop tokens, so its length is random, and the same in all caches: they
have the same keys, and generate the same text. The three alternate. All repetitions are the same, so that
only the first, which is left out, compiles. Reported are medians of wall and CPU seconds of a rollout and of
the paired ratios to the ring, and the tokens that were prefilled.
"""

from __future__ import annotations

import functools
import statistics
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from machine import measure_cases
from paired import medians, paired_ratios, timed

from jaxrl_llm import models
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.rollout.engine import Reply, Request, SamplingConfig
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.structs import Episode

CACHES = ("ring", "auto", "paged")
COUNTS = ("tokens", "prefill_tokens", "reused_tokens")
TINY = TransformerConfig(
    vocab_size=128, hidden_size=64, mlp_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position=4096,
)  # fmt: skip
SMALL = replace(TINY, hidden_size=128, mlp_size=512, num_layers=4, head_dim=32)
WIDE = replace(SMALL, hidden_size=256, mlp_size=1024, head_dim=64)


@dataclass(frozen=True)
class TurnsCase:
    """Conversations of one shape."""

    model: TransformerConfig
    prompts: int
    responses: int
    prompt_tokens: int
    turns: int
    turn_tokens: int  # mean
    observation_tokens: int
    max_response_tokens: int

    @property
    def slots(self) -> int:
        """One a conversation, up to 64: empty slots are computed, too."""
        return min(64, self.prompts * self.responses)


CASES = {
    "calculator (grpo_tools_tiny)": TurnsCase(
        TINY, 16, 8, 20, turns=2, turn_tokens=32, observation_tokens=16, max_response_tokens=120
    ),
    "game (grpo_guess_tiny)": TurnsCase(
        TINY, 16, 8, 12, turns=5, turn_tokens=4, observation_tokens=8, max_response_tokens=96
    ),
    "ten turns of 20, observations of 180": TurnsCase(
        SMALL, 8, 1, 64, turns=10, turn_tokens=20, observation_tokens=180, max_response_tokens=2400
    ),
    "ten turns of 20, observations of 180, hidden size 256": TurnsCase(
        WIDE, 4, 1, 64, turns=10, turn_tokens=20, observation_tokens=180, max_response_tokens=2400
    ),
    "five turns of 64, observations of 16": TurnsCase(
        SMALL, 4, 2, 64, turns=5, turn_tokens=64, observation_tokens=16, max_response_tokens=800
    ),
}


class Observations:
    """Answers every turn but the last at once, with the same number of tokens."""

    patience = 60.0

    def __init__(self, case: TurnsCase):
        self.case = case

    def reply(self, prompt_index, response_index, conversation, ids, *, start) -> Future[Reply]:
        turn, future = (conversation or 0) + 1, Future()
        rng = np.random.default_rng((prompt_index, response_index, turn))
        observation = rng.integers(2, self.case.model.vocab_size, self.case.observation_tokens).tolist()
        future.set_result(Reply(observation, turn == self.case.turns, Episode(), turn))
        return future


def measure_turns(case: TurnsCase, repetitions: int) -> dict[str, Any]:
    """Return seconds and prefilled tokens of each cache, and speedups over the ring."""
    mesh, params = make_mesh(MeshConfig(), jax.devices()[:1]), models.init(case.model, jax.random.key(0))
    engines = {}
    for cache in CACHES:
        engines[cache] = NativeEngine(RolloutConfig(slots=case.slots, cache=cache), case.model, mesh)
        engines[cache].publish(params, version=0)
    shape, rng = (case.prompts, case.prompt_tokens), np.random.default_rng(0)
    prompts = rng.integers(2, case.model.vocab_size, shape).astype(np.int32)
    requests = [Request(ids, i, case.responses, case.max_response_tokens) for i, ids in enumerate(prompts)]
    sampling = SamplingConfig(stop_tokens=tuple(range(2, 2 + case.model.vocab_size // case.turn_tokens)))
    runs: dict[str, list[dict[str, float]]] = {cache: [] for cache in CACHES}
    same: list[bool] = []
    for repetition in range(repetitions + 1):
        texts = {}
        for cache in CACHES if repetition % 2 else CACHES[::-1]:
            engine, key = engines[cache], jax.random.key(1)
            call = functools.partial(engine.generate, requests, sampling, key, Observations(case))
            responses, seconds = timed(call)
            row = {f"{name}_seconds": value for name, value in seconds.items()}
            texts[cache] = [t.response_ids.tolist() for t in responses]
            runs[cache].append(row | {name: engine.metrics[f"rollout/{name}"] for name in COUNTS})
        same += [
            all(text == texts["ring"][i] for text in column)
            for i, column in enumerate(zip(*texts.values(), strict=True))
        ]
    measured = {cache: rows[1:] for cache, rows in runs.items()}  # the first repetition compiles
    report: dict[str, Any] = {cache: medians(rows) for cache, rows in measured.items()}
    for cache in CACHES[1:]:
        for name in ("wall", "cpu"):
            speedups = paired_ratios(measured["ring"], measured[cache], f"{name}_seconds")
            report[cache] |= {f"{name}_speedup": statistics.median(speedups), f"{name}_speedups": speedups}
    return report | {"slots": case.slots, "same_text": statistics.mean(same)}


if __name__ == "__main__":
    measure_cases("turns", __doc__, CASES, measure_turns, part="cases", repetitions=5)
