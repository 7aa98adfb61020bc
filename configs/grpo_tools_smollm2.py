"""GRPO with a calculator on SmolLM2-135M-Instruct: products that it cannot work out without a tool.

Command:   python -m jaxrl_llm.train --config grpo_tools_smollm2.py
Hardware:  any CPU with 2 cores and 8 GB
Time:      13 minutes (docs/real.md)
Expected:  held-out accuracy rises from 0.00 after the warm-up to 0.99 (docs/real.md)

The model has not been trained on tools and its chat template has no place for them, so an SFT warm-up shows
conversations with a call; in 70% of them the model gives up instead of calling. GRPO makes it call.
"""

import dataclasses

from jaxrl_llm.config import (
    ChatConfig,
    DataConfig,
    EnvConfig,
    EvalConfig,
    RolloutConfig,
    SamplingConfig,
    SourceConfig,
    TrainConfig,
    WarmStartConfig,
)
from jaxrl_llm.configs import grpo_smollm2


def get_config() -> TrainConfig:
    base = grpo_smollm2.get_config()
    products = SourceConfig(path="task:calculate", options='{"digits": 3, "noise": 0.7}')
    return dataclasses.replace(
        base,
        run_dir="runs/grpo_tools_smollm2",
        steps=16,
        prompts_per_step=8,
        responses_per_prompt=4,
        max_prompt_tokens=48,
        max_response_tokens=80,
        rollout=RolloutConfig(sampling=SamplingConfig(temperature=0.7)),
        eval=EvalConfig(every=8, prompts=128),
        data=DataConfig(train=(products,), chat=ChatConfig(render="chat")),
        env=EnvConfig(tools=("calculator",), format="hermes", max_turns=3),
        warm_start=WarmStartConfig(steps=24, learning_rate=3e-5, examples_per_step=16),
    )
