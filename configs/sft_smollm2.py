"""SFT of SmolLM2-135M-Instruct on answers to the sums of grpo_smollm2.py: a number and nothing else.

Command:   python -m jaxrl_llm.train --config sft_smollm2.py
Hardware:  any CPU with 2 cores and 8 GB
Time:      7 minutes (docs/real.md)
Expected:  held-out accuracy rises from 0.03 to 0.79 (docs/real.md); the result is the teacher
           of gkd_smollm2.py
"""

import dataclasses

from jaxrl_llm.algos import sft
from jaxrl_llm.config import OptimConfig, TrainConfig
from jaxrl_llm.configs import grpo_smollm2


def get_config() -> TrainConfig:
    return dataclasses.replace(
        grpo_smollm2.get_config(),
        run_dir="runs/sft_smollm2",
        algo=sft.Config(),
        prompts_per_step=32,
        optim=OptimConfig(learning_rate=3e-5, warmup_steps=4),
    )
