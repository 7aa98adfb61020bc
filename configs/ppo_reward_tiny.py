"""PPO against a reward model: reward_model_tiny.py's scores in place of the verifier's, which only evaluates.

Command:   python -m jaxrl_llm.train --config reward_model_tiny.py
           python -m jaxrl_llm.train --config ppo_reward_tiny.py
Hardware:  any CPU with 2 cores
Time:      about 3 minutes after the reward model
Expected:  held-out accuracy rises as in ppo_tiny.py, though the verifier gives no reward
"""

import dataclasses

from jaxrl_llm.config import RewardConfig, RewardModelConfig, TrainConfig
from jaxrl_llm.configs import ppo_tiny


def get_config() -> TrainConfig:
    return dataclasses.replace(
        ppo_tiny.get_config(),
        run_dir="runs/ppo_reward_tiny",
        reward=RewardConfig(weight=0.0, models=(RewardModelConfig(path="runs/reward_model_tiny/hf"),)),
    )
