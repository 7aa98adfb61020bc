"""GRPO on grade-school maths with responses from SGLang servers: grpo_qwen.py on two kinds of devices.

Command:   CUDA_VISIBLE_DEVICES=0 python -m jaxrl_llm.train --config grpo_qwen_sglang.py --servers.devices 1
           python -m jaxrl_llm.train --config grpo_qwen_sglang.py --rollout.launch 0 \\
               --rollout.servers http://gpu1:30000 http://gpu2:30000 --servers.transport http
Hardware:  meant for two GPUs with 80 GB, one for the trainer; or a TPU slice with servers on GPUs elsewhere
           (the second command: weights go over the network)
Time:      not measured: this recipe has not been run yet
Expected:  not measured either

Rollout is asynchronous, with a staleness of one step at most. The servers compute in bfloat16 with other
kernels, so tokens are weighed by truncated importance sampling, which also covers tokens of older weights.
"""

import dataclasses

from jaxrl_llm.algos.config import Correction
from jaxrl_llm.config import RolloutConfig, ServersConfig, TrainConfig
from jaxrl_llm.configs import grpo_qwen


def get_config() -> TrainConfig:
    base = grpo_qwen.get_config()
    return dataclasses.replace(
        base,
        run_dir="runs/grpo_qwen_sglang",
        algo=dataclasses.replace(base.algo, correction=Correction(weight="token")),
        rollout=RolloutConfig(engine="sglang", launch=1, slots=256, dtype="bfloat16", max_staleness=1),
        servers=ServersConfig(flags="--mem-fraction-static 0.8"),
    )
