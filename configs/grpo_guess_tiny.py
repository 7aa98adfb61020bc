"""GRPO on a game of several turns: a small Qwen3 from random weights learns to search for a number.

Command:   python -m jaxrl_llm.train --config grpo_guess_tiny.py
Hardware:  any CPU with 2 cores
Time:      about 4 minutes of CPU time
Expected:  the share of games that are won, eval/pass@1, rises from 0.23 after the SFT warm-up to 0.88
           (seed 0; 0.59 after 40 steps, 0.66 after 80), from 0.36 to 0.78 and from 0.38 to 0.81 with seeds 1
           and 2; bisection wins all of them

The environment answers a guess with "higher" or "lower"; the fifth guess is the last. The SFT warm-up shows
games, and in 70% of them the player ignores the answers.
"""

import dataclasses

from jaxrl_llm.config import DataConfig, EnvConfig, EvalConfig, SourceConfig, TrainConfig
from jaxrl_llm.configs import grpo_tools_tiny


def get_config() -> TrainConfig:
    tools = grpo_tools_tiny.get_config()
    return dataclasses.replace(
        tools,
        run_dir="runs/grpo_guess_tiny",
        steps=120,
        max_prompt_tokens=16,
        max_response_tokens=96,
        data=DataConfig(train=(SourceConfig(path="task:guess", options='{"largest": 15, "noise": 0.7}'),)),
        env=EnvConfig(name="guess", max_turns=5),
        eval=EvalConfig(every=40, prompts=128),
        warm_start=dataclasses.replace(tools.warm_start, steps=500),
    )
