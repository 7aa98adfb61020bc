"""PPO against reward_model_smollm2.py's scores; the verifier only evaluates.

Command:   python -m jaxrl_llm.train --config reward_model_smollm2.py
           python -m jaxrl_llm.train --config ppo_smollm2.py
Hardware:  any CPU with 2 cores and 12 GB
Time:      13 minutes (docs/real.md)
Expected:  held-out accuracy rises from 0.03 to 0.29 at step 10; from there PPO exploits the reward
           model, and it falls to 0.20 (docs/real.md)
"""

import dataclasses

from jaxrl_llm.algos import ppo
from jaxrl_llm.config import CriticConfig, OptimConfig, RewardConfig, RewardModelConfig, TrainConfig
from jaxrl_llm.configs import grpo_smollm2


def get_config() -> TrainConfig:
    return dataclasses.replace(
        grpo_smollm2.get_config(),
        run_dir="runs/ppo_smollm2",
        algo=ppo.Config(),
        critic=CriticConfig(optim=OptimConfig(learning_rate=2e-5)),
        reward=RewardConfig(
            name="arithmetic",
            workers=1,
            weight=0.0,
            models=(RewardModelConfig(path="runs/reward_model_smollm2/hf"),),
        ),
    )
