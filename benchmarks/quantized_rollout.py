"""Mismatch of rollouts with 8-bit weights, activations and caches: SmolLM2-135M on a CPU.

    python benchmarks/quantized_rollout.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf

writes benchmarks/results/quantized_rollout.json, in about 15 minutes on 2 quiet cores. Everything is computed
in float32 after rounding to 8 bits: the error is an 8-bit error, the speed is not. "fp8 weights" are the
weights that `--servers.quantization fp8` sends, in the native engine. "fp8 activations" rounds the inputs of
linear layers as SGLang does on a GPU, in groups of 128 with a scale each. Every case has the same prompts
(sums of two numbers) and keys; its log-probs are compared with the log-probs of the weights as they are.

Probe: mean differences of the log-probs of the probe's tokens, nats.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from machine import report_head

from jaxrl_llm import models
from jaxrl_llm.bridge import fp8
from jaxrl_llm.bridge.probe import probe_tokens
from jaxrl_llm.hf.config import read_config
from jaxrl_llm.hf.load import load_params
from jaxrl_llm.hf.resolve import resolve_model
from jaxrl_llm.hf.tokenizer import generation_end_ids, load_tokenizer
from jaxrl_llm.learn.scoring import sequence_scorer
from jaxrl_llm.models import linear
from jaxrl_llm.rollout.config import RolloutConfig
from jaxrl_llm.rollout.engine import Request, SamplingConfig
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.placement import MeshConfig, make_mesh
from jaxrl_llm.sharding.rules import TRAIN

RESULT = Path(__file__).parent / "results/quantized_rollout.json"
CASES = {
    "float32": {},
    "int8 cache": {"cache_dtype": "int8"},
    "fp8 cache": {"cache_dtype": "float8_e4m3fn"},
    "fp8 weights": {},
    "fp8 weights and activations": {},
}
"""Case -> settings of the rollout."""
PROMPTS, RESPONSES, TOKENS = 24, 2, 24
CAP = 2.0  # of truncated importance weights
AS_SERVED = functools.partial(fp8.rounded_params, dtype="float32")


@contextlib.contextmanager
def fp8_inputs():
    """Round the input of each linear layer to float8_e4m3fn in groups of 128, with a scale each."""
    multiply = linear.multiply

    def quantized(w, name, x):
        rows = x.reshape(*x.shape[:2], -1)
        size = rows.shape[-1]
        groups = jnp.pad(rows, ((0, 0), (0, 0), (0, -size % fp8.BLOCK))).reshape(*x.shape[:2], -1, fp8.BLOCK)
        scales = jnp.maximum(jnp.abs(groups).max(-1, keepdims=True), 1e-10) / fp8.LARGEST
        codes = jnp.clip(groups / scales, -fp8.LARGEST, fp8.LARGEST).astype(jnp.float8_e4m3fn)
        groups = codes.astype(x.dtype) * scales
        return multiply(w, name, groups.reshape(*x.shape[:2], -1)[..., :size].reshape(x.shape))

    with mock.patch.object(linear, "multiply", quantized):
        yield


def sums(tokenizer) -> list[Request]:
    """Return requests for sums of two numbers."""
    numbers = np.random.default_rng(0).integers(1, 100, (PROMPTS, 2))
    requests = []
    for i, (a, b) in enumerate(numbers):
        messages = [{"role": "user", "content": f"Calculate {a} + {b}."}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        requests.append(Request(ids, i, RESPONSES, TOKENS))
    return requests


def mismatch(own: Sequence[np.ndarray], reported: Sequence[np.ndarray]) -> dict[str, float]:
    """Return distances of the log-probs of all tokens; named as metrics."""
    d = np.concatenate(own) - np.concatenate(reported)
    weights = np.minimum(np.exp(d), CAP)
    return {
        "mismatch/mean_abs": float(np.abs(d).mean()),
        "mismatch/max_abs": float(np.abs(d).max()),
        "mismatch/kl": float(-d.mean()),
        "mismatch/k3_kl": float((np.expm1(d) - d).mean()),
        "weights at the cap": float((np.exp(d) > CAP).mean()),
        "effective sample size": float(weights.mean() ** 2 / (weights**2).mean()),
    }


def run_case(case: str, model: str) -> dict:
    """Generate responses, score them with the weights as they are, and return metrics."""
    folder = resolve_model(model)
    config, mesh = read_config(folder), make_mesh(MeshConfig())
    params = load_params(folder, config, models.shardings(config, mesh, TRAIN), jnp.float32)
    tokenizer = load_tokenizer(folder, config)
    rollout = RolloutConfig(slots=PROMPTS * RESPONSES, cache="paged", **CASES[case])
    engine = NativeEngine(rollout, config, mesh, tokenizer, eos_ids=generation_end_ids(folder))
    with fp8_inputs() if "activations" in case else contextlib.nullcontext():
        engine.publish(AS_SERVED(params) if "weights" in case else params, 0)
        made = engine.generate(sums(tokenizer), SamplingConfig(), jax.random.key(0))
    score = sequence_scorer("float32", mesh)
    own = [
        score(params, np.concatenate([t.prompt_ids, t.response_ids]))[len(t.prompt_ids) - 1 :] for t in made
    ]
    result = mismatch(own, [t.logprobs for t in made])
    return result | (probe_differences(params, mesh) if "activations" in case else {})


def probe_differences(params, mesh) -> dict[str, float]:
    """Return the mean differences of the log-probs of the probe's tokens, nats."""
    make = functools.partial(sequence_scorer, "float32", mesh)
    ids = probe_tokens(params.config)
    plain, weights = make()(params, ids), make(AS_SERVED)(params, ids)
    with fp8_inputs():
        both = make(AS_SERVED)(params, ids)
    gap = lambda a, b: float(np.abs(a - b).mean())
    return {"probe, weights": gap(weights, plain), "probe, activations": gap(both, weights)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--case", choices=CASES, help="runs it alone and prints its result")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_case(args.case, args.model)))
        return
    report = {
        **report_head(computes=False),
        "arithmetic": "float32, 8 bits in storage",
        "responses": PROMPTS * RESPONSES,
    }
    for case in CASES:  # a process each, so that no case has another's compiled programs
        command = [sys.executable, __file__, "--model", args.model, "--case", case]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        report[case] = json.loads(output.splitlines()[-1])
        RESULT.write_text(json.dumps(report, indent=2) + "\n")
        print(case, report[case], flush=True)


if __name__ == "__main__":
    main()
