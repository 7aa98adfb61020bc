"""GRPO on generated sums: a small Qwen3 from random weights, on a laptop's CPU.

Command:   python -m jaxrl_llm.train --config grpo_tiny.py
Hardware:  any CPU with 2 cores
Time:      about 2 minutes
Expected:  held-out accuracy under 0.5 after the SFT warm-up, at least 0.9 at the end

The demonstrations of the SFT warm-up are flawed: 70% of the sums are one too large on purpose. The model
learns to add and to make that mistake; GRPO then removes it by the reward.
"""

from jaxrl_llm.algos import grpo
from jaxrl_llm.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    SourceConfig,
    TrainConfig,
    TransformerConfig,
    WarmStartConfig,
)


def get_config() -> TrainConfig:
    return TrainConfig(
        run_dir="runs/grpo_tiny",
        steps=100,
        algo=grpo.Config(kl_coef=0.0, aggregation="token"),
        prompts_per_step=32,
        responses_per_prompt=8,
        tokens_per_device=1536,
        max_prompt_tokens=16,
        max_response_tokens=8,
        model=ModelConfig(
            architecture=TransformerConfig(
                vocab_size=128,
                hidden_size=64,
                mlp_size=256,
                num_layers=2,
                num_heads=4,
                num_kv_heads=2,
                head_dim=16,
                max_position=256,
            ),
            tokenizer="tiny",
            dtype="float32",
            remat="dots",  # on a CPU, keeping less is faster
        ),
        optim=OptimConfig(learning_rate=5e-4, schedule="linear", b2=0.99),
        data=DataConfig(
            train=(SourceConfig(path="task:arithmetic", options='{"digits": 1, "terms": 3, "noise": 0.7}'),)
        ),
        eval=EvalConfig(every=10, prompts=256),
        checkpoint=CheckpointConfig(every=100),
        warm_start=WarmStartConfig(steps=600, learning_rate=2e-3, examples_per_step=64),
    )
