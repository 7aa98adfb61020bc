"""PPO with a critic on generated sums: the quick start's task, a second small model as the critic.

Command:   python -m jaxrl_llm.train --config ppo_tiny.py
Hardware:  any CPU with 2 cores
Time:      about 3 minutes
Expected:  as grpo_tiny.py; critic/value_error falls towards the spread that the sampling leaves
"""

import dataclasses

from jaxrl_llm.algos import ppo
from jaxrl_llm.config import CriticConfig, OptimConfig, TrainConfig
from jaxrl_llm.configs import grpo_tiny


def get_config() -> TrainConfig:
    return dataclasses.replace(
        grpo_tiny.get_config(),
        run_dir="runs/ppo_tiny",
        algo=ppo.Config(kl_coef=0.0),
        critic=CriticConfig(warmup_steps=3, optim=OptimConfig(learning_rate=1e-3, b2=0.99)),
    )
