"""On-policy distillation: a policy trained on flawed demonstrations learns from a correct teacher.

Command:   python -m jaxrl_llm.train --config grpo_tiny.py
           python -m jaxrl_llm.train --config gkd_tiny.py
Hardware:  any CPU with 2 cores
Time:      about 2 minutes after the teacher
Expected:  held-out accuracy rises from the demonstrations' to the teacher's
"""

import dataclasses

from jaxrl_llm.algos import gkd
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.configs import grpo_tiny


def get_config() -> TrainConfig:
    return dataclasses.replace(
        grpo_tiny.get_config(),
        run_dir="runs/gkd_tiny",
        algo=gkd.Config(teachers=("runs/grpo_tiny/hf",)),
        responses_per_prompt=1,
        prompts_per_step=128,
    )
