"""Shapes, configs and trainer that the measured and the compiled parts of benchmarks/gpu.py share."""

from __future__ import annotations

import time
from dataclasses import replace

import jax
import numpy as np
from machine import ROOT

from jaxrl_kernels.flash_attention import bench as attention
from jaxrl_kernels.gated_delta import bench as delta
from jaxrl_llm import models
from jaxrl_llm.algos import grpo
from jaxrl_llm.builders.models import make_stages, trained_config
from jaxrl_llm.builders.sizes import make_meshes
from jaxrl_llm.builders.weights import with_new_adapters
from jaxrl_llm.config import DataConfig, LoraConfig, ModelConfig, RolloutConfig, SourceConfig, TrainConfig
from jaxrl_llm.data.packing import PackItem
from jaxrl_llm.learn.learner import Learner
from jaxrl_llm.models import TransformerConfig
from jaxrl_llm.models.lora import frozen_config
from jaxrl_llm.plan.models import preset
from jaxrl_llm.structs import TrainState

MODEL = ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
EXPERTS = (131_072, 128, 2048, 768)
"""Rows, experts, hidden size and width of an expert of Qwen3-30B-A3B: 16k tokens, eight experts each."""
HEAD = (16_384, 4096, 131_072)
"""Tokens, hidden size and vocabulary of Liger's published measurement."""
GROUPS, GROUPS_SMALL = (4 * 4624, 512, 512), (2 * 592, 64, 64)
"""Tokens of a micro-batch, of a prompt and of a response, of which a row has 8."""
POSITIONS = 2**20
"""`max_position` of the models, whose rows here are longer than Qwen3's."""
QLORA_TRIES = (1.05, 0.95)
"""Shares of `plan`'s longest row that are tried: a row that should not fit, and one that should."""
LONGEST = "longest row by plan, tokens"
"""Name of a result of `gpu.py --compile`, which the part `qlora` starts from."""
ROW_MULTIPLE = 1024
"""Tokens that divide the length of a QLoRA row."""
BFLOAT16 = ("--model.dtype", "bfloat16", "--rollout.dtype", "bfloat16")
SMOLLM2 = ("--config", "grpo_smollm2.py", "--steps", "1", *BFLOAT16)
"""Flags of the part `start`, without the model's path."""
WARM_UP = ("--warm_start.steps", "2", "--eval.every", "0")
FP8_CACHE = ("--rollout.cache", "paged", "--rollout.cache_dtype", "float8_e4m3fn")


def architecture(name: str, small: bool) -> TransformerConfig:
    """Return the shape of a Qwen3, or a tiny one."""
    model = replace(preset(f"Qwen/{name}"), max_position=POSITIONS)
    tiny = dict(vocab_size=512, hidden_size=64, mlp_size=128, num_layers=2, num_heads=4, num_kv_heads=2)
    return replace(model, **tiny, head_dim=16) if small else model


def attention_shapes(small: bool) -> dict[str, attention.Shape]:
    """Return the shapes of attention by the end of a result's name."""
    whole = attention.Shape(1, 256, 4, 2, dtype="float32") if small else attention.Shape()
    return {
        "head_dim 128": whole,
        "head_dim 64": whole._replace(heads=2 * whole.heads, head_dim=64),
        "head_dim 128, 4 sequences a row": whole._replace(packed=4),
    }


def delta_shape(small: bool) -> delta.DeltaShape:
    return delta.DeltaShape(1, 128, 2, 4, key_dim=16, value_dim=16) if small else delta.DeltaShape()


def gpu_recipe(
    model: TransformerConfig, tokens: int, prompt: int, response: int, *, slots: int, prompts: int
) -> TrainConfig:
    """Return the config of a GRPO update of micro-batches of `tokens` tokens, with 8 responses a prompt."""
    return TrainConfig(
        run_dir="runs/gpu",
        algo=grpo.Config(kl_coef=0.0),
        prompts_per_step=prompts,
        responses_per_prompt=8,
        tokens_per_device=tokens,
        max_prompt_tokens=prompt,
        max_response_tokens=response,
        model=ModelConfig(architecture=model, tokenizer="tiny", dtype="bfloat16", remat="dots"),
        rollout=RolloutConfig(slots=slots, dtype="bfloat16"),
        data=DataConfig(train=(SourceConfig(path="task:arithmetic"),)),
    )


def row_recipe(
    model: TransformerConfig, row: int, remat: str = "dots", *, lora: LoraConfig | None = None
) -> TrainConfig:
    """Return the config of updates of one row of `row` tokens each, which is one sequence."""
    prompt = min(512, row // 2)
    config = gpu_recipe(model, row, prompt, row - prompt, slots=2, prompts=1)
    return replace(
        config,
        responses_per_prompt=2,
        minibatches_per_step=2,  # of one response
        share_prefixes=False,
        model=replace(config.model, remat=remat),
        lora=lora or LoraConfig(),
    )


def recipes(small: bool) -> dict[str, TrainConfig]:
    """Return the configs of updates and rollouts by part."""
    qwen, larger = architecture("Qwen3-0.6B", small), architecture("Qwen3-4B", small)
    short, long = (128, 512) if small else (16_384, 65_536)
    slots, lengths = (8, (16, 16)) if small else (256, (512, 128))
    lora = LoraConfig(rank=16)
    return {
        "update": gpu_recipe(qwen, *(GROUPS_SMALL if small else GROUPS), slots=slots, prompts=16),
        "rollout": gpu_recipe(qwen, 1024 if small else 16_384, *lengths, slots=slots, prompts=slots // 8),
        "update, rows of 16k": row_recipe(qwen, short),
        "update, rows of 65k": row_recipe(qwen, long, "attention"),
        "LoRA, rows of 16k": row_recipe(larger, short, "attention", lora=lora),
        "LoRA, rows of 65k": row_recipe(larger, long, "attention", lora=lora),
    }


def qlora_rows(planned: int, multiple: int = ROW_MULTIPLE) -> list[int]:
    """Return the tokens of the QLoRA rows that are trained, around the longest one by `plan`."""
    return [round(planned * share / multiple) * multiple for share in QLORA_TRIES]


def bytes_name(row: int) -> str:
    """Return the name of the result of `gpu.py --compile` with the memory of a QLoRA row."""
    return f"a row of {row} tokens by plan, bytes"


def qlora_recipe(row: int, small: bool = False) -> TrainConfig:
    """Return the config of updates of Qwen3-8B with adapters on nf4, one row each."""
    lora = LoraConfig(rank=16, quantize="nf4")
    return row_recipe(architecture("Qwen3-8B", small), row, "full", lora=lora)


class Trainer:
    """A learner with random weights, on the first device."""

    def __init__(self, config: TrainConfig):
        self.config, self.meshes = config, make_meshes(config, jax.devices()[:1])
        self.learner = self.make_learner(config)
        base = frozen_config(self.learner.model)
        with jax.set_mesh(self.learner.mesh):
            params = jax.jit(models.init, static_argnums=0)(base, jax.random.key(0))
        params = with_new_adapters(params, self.learner.model, self.learner.mesh, 0)
        self.state: TrainState = self.learner.init_state(params)

    def make_learner(self, config: TrainConfig) -> Learner:
        model = trained_config(config.model.architecture, config)
        return make_stages(config, model, self.meshes)[-1].policy

    def update(self, items: list[PackItem]) -> float:
        """Apply an update and return its seconds.

        Raises:
            FloatingPointError: the loss is not finite.
        """
        begin = time.perf_counter()
        self.state, metrics = self.learner.update(self.state, [items])
        jax.block_until_ready((self.state, metrics))
        seconds = time.perf_counter() - begin
        if not np.isfinite(float(metrics["loss"])):
            raise FloatingPointError(f"the loss is {float(metrics['loss'])}")
        return seconds


def random_items(config: TrainConfig) -> list[PackItem]:
    """Return the trajectories of one update, all of full length."""
    rng, prompt = np.random.default_rng(0), config.max_prompt_tokens
    ids = lambda count: rng.integers(2, config.model.architecture.vocab_size, count).astype(np.int32)

    def item(first: np.ndarray) -> PackItem:
        tokens = np.r_[first, ids(config.max_response_tokens)]
        mask = (np.arange(len(tokens)) >= prompt).astype(np.float32)
        noise = rng.standard_normal(len(tokens)).astype(np.float32)
        return PackItem(tokens, mask, {"advantages": noise * mask, "rollout_logprobs": -np.abs(noise) * mask})

    prompts = [ids(prompt) for _ in range(config.prompts_per_step)]
    items = [item(first) for first in prompts for _ in range(config.responses_per_prompt)]
    return items[: config.trajectories_per_step // config.minibatches_per_step]
