"""Supervised fine-tuning on generated sums: the model of grpo_tiny.py shown the answers.

Command:   python -m jaxrl_llm.train --config sft_tiny.py
Hardware:  any CPU with 2 cores
Time:      under 5 minutes
Expected:  held-out accuracy rises from 0; compare with grpo_tiny.py, which is shown almost none
"""

from jaxrl_llm.algos import sft
from jaxrl_llm.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    SourceConfig,
    TrainConfig,
    TransformerConfig,
)


def get_config() -> TrainConfig:
    return TrainConfig(
        run_dir="runs/sft_tiny",
        steps=400,
        algo=sft.Config(),
        prompts_per_step=64,
        tokens_per_device=4096,
        max_prompt_tokens=32,
        max_response_tokens=16,
        model=ModelConfig(
            architecture=TransformerConfig(
                vocab_size=128,
                hidden_size=128,
                mlp_size=384,
                num_layers=3,
                num_heads=4,
                num_kv_heads=2,
                head_dim=32,
                max_position=256,
            ),
            tokenizer="tiny",
            dtype="float32",
        ),
        optim=OptimConfig(learning_rate=1e-3, schedule="cosine", warmup_steps=20),
        data=DataConfig(train=(SourceConfig(path="task:arithmetic"),)),
        eval=EvalConfig(every=50, prompts=128),
        checkpoint=CheckpointConfig(every=100),
    )
