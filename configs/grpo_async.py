"""Asynchronous GRPO on two SGLang servers with bounded staleness; few responses are long.

Command:   python -m jaxrl_llm.train --config grpo_async.py \\
               --servers.python .venv-sglang/bin/python
           (scripts/sglang_cpu/install.sh .venv-sglang makes that environment; docs/servers.md)
Hardware:  any CPU with 2 cores and 8 GB for the two servers (on GPUs: --servers.flags "")
Time:      51 s for 15 steps on two CPU cores, 81 to 93 s with --rollout.max_staleness 0
Expected:  the held-out accuracy of the synchronous run: after 16 steps 0.93, 0.73, 0.96 with seeds 0, 1, 2
           on two SGLang servers, synchronous 0.98, 0.81, 0.88 (benchmarks/README.md)

One prompt in 32 has 47 sums in a row, the others have one, so that a step that waits for its longest
response leaves the servers almost idle. With --rollout.max_staleness 2 they generate the responses of the
next two steps meanwhile, and truncated importance sampling weighs tokens of older weights.
--rollout.max_staleness 0 is the synchronous run.
"""

import dataclasses

from jaxrl_llm.algos.config import Correction
from jaxrl_llm.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    RolloutConfig,
    ServersConfig,
    SourceConfig,
    TrainConfig,
)
from jaxrl_llm.configs import grpo_tiny

CPU = "--device cpu --attention-backend torch_native --sampling-backend pytorch --max-total-tokens 16384"


def get_config() -> TrainConfig:
    base = grpo_tiny.get_config()
    longer = dataclasses.replace(base.model.architecture, max_position=320)
    short = SourceConfig(path="task:arithmetic", options='{"digits": 1, "terms": 3, "noise": 0.7}', weight=31)
    long = SourceConfig(path="task:steps", options='{"terms": 48}', weight=1)
    return dataclasses.replace(
        base,
        run_dir="runs/grpo_async",
        steps=60,
        algo=dataclasses.replace(base.algo, correction=Correction(weight="token")),
        tokens_per_device=1280,
        max_prompt_tokens=104,
        max_response_tokens=216,
        model=dataclasses.replace(base.model, architecture=longer),
        rollout=RolloutConfig(engine="sglang", launch=2, slots=16, max_staleness=2),
        servers=ServersConfig(flags=f"{CPU} --disable-overlap-schedule"),
        data=DataConfig(train=(short, long), eval=(short,)),
        eval=EvalConfig(every=20, prompts=128),
        checkpoint=CheckpointConfig(every=60),
    )
