"""One GRPO step of a full-size Qwen3-0.6B with random weights: does it fit a machine of 24 GB?

Command:   /usr/bin/time -v python -m jaxrl_llm.train --config benchmarks/full_size.py
Hardware:  any CPU, 24 GB of memory, 12 GB of disk
Time:      minutes, see README.md beside this file
Expected:  one step; "Maximum resident set size" under 24 GB. Nothing is learnt.
"""

from jaxrl_llm.algos import grpo
from jaxrl_llm.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    SourceConfig,
    TrainConfig,
    TransformerConfig,
)


def get_config() -> TrainConfig:
    return TrainConfig(
        run_dir="runs/full_size",
        steps=1,
        algo=grpo.Config(kl_coef=0.0),
        prompts_per_step=4,
        responses_per_prompt=8,
        tokens_per_device=512,
        max_prompt_tokens=64,
        max_response_tokens=64,
        model=ModelConfig(architecture=TransformerConfig(), tokenizer="tiny", dtype="float32", remat="full"),
        data=DataConfig(train=(SourceConfig(path="task:arithmetic"),)),
        checkpoint=CheckpointConfig(async_save=False),
    )
