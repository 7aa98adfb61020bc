"""DAPO where nine prompts of ten are too hard: dynamic sampling replaces groups whose rewards are all equal.

Command:   python -m jaxrl_llm.train --config dapo_tiny.py [--algo.dynamic_sampling False]
Hardware:  any CPU with 2 cores
Time:      about 2 minutes
Expected:  held-out accuracy of the sums from under 0.5 to at least 0.9 in 30 small steps; without dynamic
           sampling most groups have no advantage, and it takes three times as long
"""

import dataclasses

from jaxrl_llm.algos import dapo
from jaxrl_llm.config import DataConfig, OptimConfig, SourceConfig, TrainConfig
from jaxrl_llm.configs import grpo_tiny


def get_config() -> TrainConfig:
    base = grpo_tiny.get_config()
    sums = base.data.train[0]
    unsolvable = SourceConfig(path="task:countdown", options='{"numbers": 4}', weight=9.0)
    return dataclasses.replace(
        base,
        run_dir="runs/dapo_tiny",
        steps=30,
        algo=dapo.Config(max_draws=10),
        prompts_per_step=8,
        responses_per_prompt=4,
        max_prompt_tokens=24,
        optim=OptimConfig(learning_rate=2e-4, schedule="linear", b2=0.99),
        data=DataConfig(train=(sums, unsolvable), eval=(sums,)),
        eval=dataclasses.replace(base.eval, every=5),
        warm_start=dataclasses.replace(base.warm_start, sources=(sums,)),
    )
