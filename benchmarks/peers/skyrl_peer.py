"""skyrl 0.3.0's JAX backend on the shared work, called as its engine does, without server and database."""

# ruff: noqa: E402  (stdout is taken before anything can print)
from __future__ import annotations

from serve import open_channel

channel = open_channel()

import logging
import math
import os
import tempfile
import warnings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

import jax
import torch
import work
from serve import serve
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.tinker import types
from skyrl.tinker.engine import prepare_model_pass_batch, prepare_sample_batch
from transformers import AutoModelForCausalLM, Qwen3Config
from work import SMALL

POLICY = "policy"
BASE = ""
"""The name of the model without adapters."""
ADAM = types.AdamParams(
    learning_rate=work.LEARNING_RATE,
    beta1=work.B1,
    beta2=work.B2,
    eps=work.EPS,
    weight_decay=work.WEIGHT_DECAY,
)
CLIP = {"clip_low_threshold": 1 - work.CLIP, "clip_high_threshold": 1 + work.CLIP}


def backend(**settings) -> JaxBackend:
    """Return the backend with random weights, which it reads from a folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**work.hf_config(SMALL))).float()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        work.tokenizer().save_pretrained(folder)
        return JaxBackend(folder, JaxBackendConfig(**settings))


def model_input(ids: list[int]) -> types.ModelInput:
    return types.ModelInput(chunks=[types.EncodedTextChunk(tokens=ids)])


def rollout(lengths_of, sequences: int):
    """Return the rollout of the base model: a batch decodes until its longest response has ended.

    The backend needs one adapter, which it computes for the base model, too; it has rank 1 and B = 0.

    Args:
        sequences: of a batch.
    """
    engine = backend(max_lora_adapters=1, max_lora_rank=1, sample_max_num_sequences=sequences)

    def request(ids: list[int], length: int, seed: int) -> types.SampleInput:
        sampling = types.SamplingParams(temperature=1.0, max_tokens=length, seed=seed)
        return types.SampleInput(
            prompt=model_input(ids),
            sampling_params=sampling,
            num_samples=1,
            checkpoint_id="",
            prompt_logprobs=False,
        )

    def run(repetition: int) -> None:
        prompts = [ids for ids in work.prompts(SMALL, repetition) for _ in range(SMALL.group)]
        lengths = lengths_of(repetition)
        requests = {
            str(i): (BASE, request(ids, length, seed=SMALL.batch * repetition + i))
            for i, (ids, length) in enumerate(zip(prompts, lengths, strict=True))
        }
        results = engine.sample(prepare_sample_batch(requests))
        sampled = [result.sequences[0].tokens for result in results.values()]
        assert [len(tokens) for tokens in sampled] == lengths

    return run


def datum(ids: list[int], advantage: float) -> types.Datum:
    """Return a row as Tinker's clients send it: targets are the next tokens, the prompt has no weight."""
    prompt = [0.0] * (SMALL.prompt_tokens - 1)
    response = lambda value: types.TensorData(data=[*prompt, *[value] * SMALL.new_tokens])
    return types.Datum(
        model_input=model_input(ids[:-1]),
        loss_fn_inputs=types.LossFnInputs(
            target_tokens=types.TensorData(data=ids[1:]),
            weights=response(1.0),
            advantages=response(advantage),
            logprobs=response(-math.log(SMALL.vocab)),
        ),
    )


def train_step():
    """Return a step of the adapters: clipped loss, gradient, AdamW; q, k, v share an A, as gate and up do."""
    engine = backend(
        max_lora_adapters=2,  # the first is the base model's
        max_lora_rank=work.LORA_RANK,
        train_micro_batch_size=8,
        loss_chunk_size=0,
    )
    engine.create_model(POLICY, types.LoraConfig(rank=work.LORA_RANK, alpha=work.LORA_ALPHA, seed=0))

    def run(repetition: int) -> None:
        rows = zip(
            work.training_ids(SMALL, repetition), work.training_advantages(SMALL, repetition), strict=True
        )
        step = types.ForwardBackwardInput(
            data=[datum(ids, advantage) for ids, advantage in rows], loss_fn="ppo", loss_fn_config=CLIP
        )
        results = engine.forward_backward(prepare_model_pass_batch({"step": (POLICY, step)}))
        assert len(results["step"].loss_fn_outputs) == SMALL.batch
        out = engine.optim_step(POLICY, types.OptimStepInput(adam_params=ADAM))
        jax.block_until_ready((engine.lora_params, engine.accumulated_grads))
        assert out.metrics["skyrl.ai/grad_norm"] > 0

    return run


if __name__ == "__main__":
    serve(
        channel,
        ("skyrl", "jax", "flax", "optax", "transformers", "torch"),
        {
            "rollout_fixed": lambda: rollout(lambda _: [SMALL.new_tokens] * SMALL.batch, SMALL.batch),
            "rollout_ragged": lambda: rollout(work.ragged_lengths, SMALL.batch // 2),
            "lora_train_step": train_step,
        },
    )
