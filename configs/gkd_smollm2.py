"""On-policy distillation: SmolLM2-135M-Instruct learns from sft_smollm2.py's result, on its own responses.

Command:   python -m jaxrl_llm.train --config sft_smollm2.py
           python -m jaxrl_llm.train --config gkd_smollm2.py
Hardware:  any CPU with 2 cores and 8 GB
Time:      27 minutes beside other work (docs/real.md)
Expected:  held-out accuracy rises from 0.03 to 0.53 (docs/real.md)
"""

import dataclasses

from jaxrl_llm.algos import gkd
from jaxrl_llm.config import TrainConfig
from jaxrl_llm.configs import grpo_smollm2


def get_config() -> TrainConfig:
    return dataclasses.replace(
        grpo_smollm2.get_config(),
        run_dir="runs/gkd_smollm2",
        algo=gkd.Config(teachers=("runs/sft_smollm2/hf",)),
        prompts_per_step=64,
        responses_per_prompt=1,
    )
