"""GRPO on a program: a small Qwen3 from random weights learns to play for an agent that calls it over HTTP.

Command:   python -m jaxrl_llm.train --config grpo_agent_tiny.py
Hardware:  any CPU with 2 cores
Time:      about 18 minutes of CPU time, the 128 programs of each step included
Expected:  the share of games that are won, eval/pass@1, after the SFT warm-up, after 20 steps and after 40:
           0.38, 0.56, 0.57 with seed 0, 0.21, 0.62, 0.80 with seed 1 and 0.34, 0.88, 0.94 with seed 2

The game is grpo_guess_tiny.py's. The other side is a program of 40 lines, examples/guess_agent.py (run it in
a checkout), which is started for each response; its exit code is the reward.
"""

import dataclasses

from jaxrl_llm.config import EnvConfig, EvalConfig, GatewayConfig, TrainConfig
from jaxrl_llm.configs import grpo_guess_tiny


def get_config() -> TrainConfig:
    return dataclasses.replace(
        grpo_guess_tiny.get_config(),
        run_dir="runs/grpo_agent_tiny",
        steps=40,
        env=EnvConfig(
            max_turns=5,
            gateway=GatewayConfig(command="python examples/guess_agent.py", reward="exit", seconds=120.0),
        ),
        eval=EvalConfig(every=20, prompts=128),
    )
