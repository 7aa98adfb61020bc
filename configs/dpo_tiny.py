"""DPO on generated preferences, after an SFT warm-up on flawed demonstrations (as in grpo_tiny.py).

Command:   python -m jaxrl_llm.train --config dpo_tiny.py [--algo simpo | orpo | cpo | kto]
Hardware:  any CPU with 2 cores
Time:      about 2 minutes
Expected:  eval/margin and eval/accuracy of held-out pairs rise, and eval/pass@1 of its answers
"""

import dataclasses

from jaxrl_llm.algos import dpo
from jaxrl_llm.config import DataConfig, OptimConfig, SourceConfig, TrainConfig
from jaxrl_llm.configs import grpo_tiny


def get_config() -> TrainConfig:
    base = grpo_tiny.get_config()
    pairs = SourceConfig(path="task:preference", options='{"digits": 1, "terms": 3}')
    return dataclasses.replace(
        base,
        run_dir="runs/dpo_tiny",
        algo=dpo.Config(),
        prompts_per_step=64,
        optim=OptimConfig(learning_rate=5e-4, schedule="linear", b2=0.99),
        data=DataConfig(train=(pairs,)),
        warm_start=dataclasses.replace(base.warm_start, sources=base.data.train),
    )
