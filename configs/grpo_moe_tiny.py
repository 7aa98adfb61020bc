"""GRPO of a mixture of experts on the quick start's task: 2 of 8 experts a token replace the feed-forward.

Command:   python -m jaxrl_llm.train --config grpo_moe_tiny.py
Hardware:  any CPU with 2 cores
Time:      about 4 minutes
Expected:  as grpo_tiny.py (seeds 0, 1, 2: from 0.28, 0.10 and 0.05 to 1.00): the experts that a token passes
           have as many weights as its feed-forward
"""

import dataclasses

from jaxrl_llm.config import MoEConfig, TrainConfig
from jaxrl_llm.configs import grpo_tiny


def get_config() -> TrainConfig:
    base = grpo_tiny.get_config()
    moe = MoEConfig(num_experts=8, experts_per_token=2, expert_size=128)
    architecture = dataclasses.replace(base.model.architecture, family="qwen3_moe", moe=moe)
    return dataclasses.replace(
        base,
        run_dir="runs/grpo_moe_tiny",
        model=dataclasses.replace(base.model, architecture=architecture),
    )
