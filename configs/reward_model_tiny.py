"""A reward model on generated preferences: which of two answers to a sum is right.

Command:   python -m jaxrl_llm.train --config reward_model_tiny.py
Hardware:  any CPU with 2 cores
Time:      2 to 3 minutes
Expected:  eval/accuracy of at least 0.98 on held-out pairs; ppo_reward_tiny.py then trains on its scores
"""

import dataclasses

from jaxrl_llm.algos import reward_model
from jaxrl_llm.config import DataConfig, OptimConfig, SourceConfig, TrainConfig
from jaxrl_llm.configs import grpo_tiny

SUMS = '{"digits": 1, "terms": 3}'


def get_config() -> TrainConfig:
    base = grpo_tiny.get_config()
    warm = dataclasses.replace(base.warm_start, sources=(SourceConfig(path="task:arithmetic", options=SUMS),))
    return dataclasses.replace(
        base,
        run_dir="runs/reward_model_tiny",
        steps=500,
        algo=reward_model.Config(),
        prompts_per_step=64,
        optim=OptimConfig(learning_rate=2e-3, schedule="linear", b2=0.99),
        data=DataConfig(train=(SourceConfig(path="task:preference", options=SUMS),)),
        eval=dataclasses.replace(base.eval, every=50),
        warm_start=warm,  # correct sums: a reward model must be able to add
    )
